"""Captured hidden states: read in the layouts of this and other tools.

    captured = open_captured(directory, load_ends(target_directory))
    captured.documents                  # unshifted tokens and loss masks, known up front from headers and indices
    captured.states(documents)          # their (features, last), read from disk now
    captured.head                       # turns `last` into logits over the target's vocabulary

Shapes: S tokens of a document, H the target's hidden size, V its vocabulary, Vd the draft's, W the width of `last`: H
behind the final norm, or Vd + 1 where a cache carries the teacher itself (`AutoModelCache`).
Layers are named by output, as in target.py: j is the residual stream behind 0-based decoder layer j.
"""

import fcntl
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from data import Document, Skipped, check_draft_ids, listed
from files import Damaged, naming, read_json, replace_with
from stored import Tensors, open_checkpoint, open_regular, open_safetensors
from target import check_aux_layers

CAPTURE_VERSION = 1  # of our own layout
CAPTURE_KEYS = ("version", "last_hidden", "aux_layers", "hidden_size", "vocab_size", "documents", "head")
READERS = 8  # threads that look at headers: opening files waits for the disk, not for the interpreter

# ---------------------------------------------------------------------------------------------------- what was captured


def open_captured(directory, ends=None, aux_layers=None, masks=None, skip_damaged=False) -> "Captured":
    """The captured states in `directory`, of the kind that its files show. Opening reads headers, not the states.

    ends: the `TargetEnds` they were captured from (a `Target` will do for our own and SpecForge's, which are normed);
    needed but for AutoModel caches. aux_layers: the output ids wanted, None for the default ones of the target's depth;
    vLLM's and speculators' files do not say which they hold and are taken at your word. masks: loss masks by
    `token_key`, for files that carry none. skip_damaged: count files that cannot be used in `skipped` instead of
    raising. ValueError: no directory, files of no kind or of several, other layers, another width, a damaged file.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ValueError(f"{directory} is no directory; give the folder that holds the captured states")
    found = [(kind, mark) for kind in KINDS if (mark := kind.mark(directory))]
    if len(found) != 1:
        marks = ", ".join(f"{mark} ({kind.kind})" for kind, mark in found) or "no mark of any"
        raise ValueError(
            f"{directory} has {marks}; one kind is wanted: {', '.join(f'{k.kind} ({k.sign})' for k in KINDS)}"
        )
    return found[0][0](directory, ends, aux_layers, masks, skip_damaged)


def is_captured(path: Path) -> bool:
    """Does the directory show one of these kinds?"""
    return path.is_dir() and any(kind.mark(path) for kind in KINDS)


class Captured:
    """Documents known up front, their states read when asked for.

    `kind`; `documents`, whose `source` is where their states lie; `aux_layers`; `width` W; `hidden_size`, `vocab_size`;
    `draft_ids` [Vd], the draft vocabulary that a cache is bound to, or None; `skipped` says what opening left out,
    `unread` what could not be used when it was read.
    """

    kind = sign = ""
    needs_ends = True
    draft_ids: Tensor | None = None

    def __init__(self, directory: Path, ends, aux_layers, masks, skip_damaged: bool):
        if ends is None and self.needs_ends:
            raise ValueError(f"{directory} ({self.kind}) holds no output head; give the target's directory as well")
        self.directory, self.ends, self.masks, self.skip_damaged = directory, ends, masks, skip_damaged
        self.skipped, self.unread, self.damaged = Skipped(), Skipped(), set()
        if ends is not None:
            self.hidden_size = self.width = ends.hidden_size
            self.vocab_size = ends.vocab_size
        self.aux_layers = self.agreed_layers(aux_layers, self.declared_layers())
        self.documents = list(self.scan())
        if not self.documents:
            reasons = "; ".join(line.strip() for line in self.skipped.lines()) or "it is empty"
            raise ValueError(f"{directory} ({self.kind}) has no document that can be used: {reasons}")

    @classmethod
    def mark(cls, directory: Path) -> str | None:
        """The name of what shows this kind in `directory`, if anything does."""
        return next((x.relative_to(directory).as_posix() for x in directory.glob(cls.sign) if x.is_file()), None)

    def declared_layers(self) -> list[int] | None:
        """The output ids that the capture says it holds; None where its format does not say."""

    def scan(self) -> Iterator[Document]:
        raise NotImplementedError

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        """features [S,3H] and last [S,W] of a document, or of its beginning if it was cut."""
        raise NotImplementedError

    def states(self, documents: list[Document]) -> list[tuple[Tensor, Tensor] | None]:
        """Of every document (features [S,3H], last [S,W]), finite; None for a damaged one where those are skipped."""
        return [self.read_or_skip(document) for document in documents]

    def read_or_skip(self, document: Document) -> tuple[Tensor, Tensor] | None:
        if document.source in self.damaged:
            return None
        try:
            with naming(self.directory / document.source):
                states = self.read(document)
                check_states(*states)
        except Damaged as error:
            self.skip_or_raise(error, self.unread)
            self.damaged.add(document.source)
            return None
        self.unread.kept += 1
        return states

    def skip_or_raise(self, error: Damaged, skipped: Skipped, documents: int = 1) -> None:
        if not self.skip_damaged:
            raise error
        skipped.add("damaged", [str(error).rpartition("; ")[0]], documents)

    def head(self, last: Tensor) -> Tensor:
        """last [m,W] -> logits [m,V]"""
        return self.ends.head(last)

    @property
    def embed_tokens(self) -> nn.Embedding:
        return self.ends.embed_tokens

    def agreed_layers(self, wanted, declared) -> tuple[int, ...]:
        if self.ends is not None:
            wanted = check_aux_layers(wanted, self.ends.config.num_hidden_layers)
        wanted = tuple(sorted(declared if wanted is None else wanted))
        if declared is not None and tuple(sorted(declared)) != wanted:
            held, asked = (f"{list(x)} by output, {[j + 1 for j in x]} by input" for x in (declared, wanted))
            raise ValueError(
                f"{self.directory} holds the layers {held}; wanted are {asked}; name its own, or capture again"
            )
        return wanted

    def look_at(self, items: Iterable, look) -> Iterator[Document]:
        """look(item) of all items by some threads, in order. It may return a reason to skip, and the name of what is
        skipped, instead of a document."""

        def attempt(item):
            try:
                return look(item)
            except Damaged as error:
                return error

        items = iter(items)
        with ThreadPoolExecutor(READERS) as pool:
            while some := list(islice(items, 1024)):  # an error is not held up by a million files behind it
                for result in pool.map(attempt, some):
                    if isinstance(result, Document):
                        yield result
                    elif isinstance(result, Damaged):
                        self.skip_or_raise(result, self.skipped)
                    else:
                        self.skipped.add(result[0], [result[1]])


# ------------------------------------------------------------ one safetensors file a document: hidden_states, token_ids


class LayerFiles(Captured):
    """`hidden_states` [S,4,H], three auxiliary layers ascending and the last one, and `token_ids` [S]."""

    after_norm = False  # is the last layer's state normed already?
    index_name = "index.jsonl"  # what lists ids and masks

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        features, last, tokens = read_layers(self.directory / document.source, len(document.tokens))
        if not torch.equal(tokens, document.tokens):
            raise ValueError(f"its token_ids are not those that {self.index_name} has for it")
        return features, last if self.after_norm else self.ends.norm(last)

    def document(self, name: str, tokens: np.ndarray, loss_mask: np.ndarray) -> Document:
        """What an index says of a file, once the file's header agrees."""
        path = self.directory / name
        with naming(path):
            if (length := layer_file_length(path, self.hidden_size)) != len(tokens):
                raise ValueError(f"it has {length} tokens; {self.index_name} lists {len(tokens)}")
            return Document(torch.from_numpy(tokens), torch.from_numpy(loss_mask), name)

    def listed_document(self, row: tuple) -> Document:
        """row: where an index says it, the file, ids and mask."""
        where, name, *said = row
        with naming(where, "write it anew, or skip what is damaged"):
            if not isinstance(name, str) or Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"it names the file {name!r}; one within the folder is wanted")
            tokens, loss_mask = listed(*said, self.vocab_size)
        return self.document(name, tokens, loss_mask)


class OwnCapture(LayerFiles):
    """What `write_capture` wrote: capture.json declares layers and norm state, index.jsonl lists the conversations."""

    kind, sign = "our own capture", "capture.json"

    def declared_layers(self) -> list[int]:
        path = self.directory / self.sign
        self.meta = read_json(path, CAPTURE_KEYS)
        if self.meta["version"] != CAPTURE_VERSION or self.meta["last_hidden"] not in ("after_norm", "before_norm"):
            said = {key: self.meta[key] for key in ("version", "last_hidden")}
            raise ValueError(f"{path} says {said}; this reads version {CAPTURE_VERSION}")
        widths = {key: self.meta[key] for key in ("hidden_size", "vocab_size")}
        if widths != {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}:
            wanted = f"hidden size {self.hidden_size}, vocabulary {self.vocab_size}"
            raise ValueError(
                f"{self.directory} was captured from a target of {widths}, not of {wanted}; give its target"
            )
        with naming(path, "copy it again, or capture again"):
            check_whole(self.meta, "documents")
            check_layers(self.meta["aux_layers"])
            held, head = (torch.tensor(x) for x in (self.meta["head"], head_sample(self.ends.lm_head)))
            same = torch.allclose(held, head, rtol=0.02, atol=1e-4)  # either may have been rounded to bf16
        if not same:
            raise ValueError(f"{self.directory} was captured from a target with another output head; give its target")
        self.after_norm = self.meta["last_hidden"] == "after_norm"
        return self.meta["aux_layers"]

    def scan(self) -> Iterator[Document]:
        path, keys = self.directory / self.index_name, ("file", "input_ids", "loss_mask")
        rows, wanted = read_index(path, keys)[0], self.meta["documents"]
        names = [str(row["file"]) for row in rows]
        if len(rows) > wanted or len(set(names)) < len(names):
            raise ValueError(
                f"{path} lists {len(rows)} documents in {len(set(names))} files, capture.json says {wanted}; copy both "
                "again, or capture again"
            )
        if (left := wanted - len(rows)) and not self.skip_damaged:
            raise ValueError(f"{self.directory} lacks {left} of {wanted} documents; capture on, or skip them")
        self.skipped.add("unfinished", n=left)
        numbered = ((f"line {i} of {path}", *(row[key] for key in keys)) for i, row in enumerate(rows, start=1))
        yield from self.look_at(numbered, self.listed_document)


class SpeculatorsFiles(LayerFiles):
    """speculators 0.9: hidden_states/hs_{i}.safetensors, before the final norm; masks in an Arrow dataset beside them.

    Without that dataset the masks come from an `index.jsonl` (input_ids, loss_mask) or from `masks`, by the token ids.
    """

    kind, sign = "speculators", "hidden_states/hs_*.safetensors"

    @classmethod
    def mark(cls, directory: Path) -> str | None:
        return None if (directory / OwnCapture.sign).exists() else super().mark(directory)

    def scan(self) -> Iterator[Document]:
        if any(self.directory.glob("*.arrow")):
            self.index_name = "its Arrow dataset"
            rows = enumerate(arrow_rows(self.directory))
            where = f"{self.directory}, its Arrow dataset, row"
            named = ((f"{where} {i}", f"hidden_states/hs_{i}.safetensors", *row) for i, row in rows)
            yield from self.look_at(named, self.listed_document)
            return
        masks = self.masks
        if masks is None and (self.directory / self.index_name).is_file():
            masks = read_masks(self.directory / self.index_name, self.skipped if self.skip_damaged else None)
        if masks is None:
            raise ValueError(
                f"{self.directory} holds no loss masks: put an index.jsonl beside the states, one line a conversation "
                "with input_ids and loss_mask, or give the conversations they were captured from"
            )
        paths = sorted(self.directory.glob(self.sign), key=numbers_in)
        yield from self.look_at(paths, partial(self.masked, masks))

    def masked(self, masks: dict, path: Path) -> Document | tuple[str, str]:
        name = path.relative_to(self.directory).as_posix()
        if being_written(path):
            return "unfinished", name
        with naming(path):
            layer_file_length(path, self.hidden_size)
            with open_safetensors(path) as file:
                tokens = check_tokens(file.read("token_ids").long(), self.vocab_size)
        mask = masks.get(token_key(tokens))
        return ("no mask", name) if mask is None else self.document(name, tokens.numpy(), np.asarray(mask, bool))


class ConnectorFiles(SpeculatorsFiles):
    """vLLM's extract_hidden_states connector alone: {request}.safetensors, and {request}.safetensors.lock beside it."""

    kind, sign = "vLLM connector", "*.safetensors"

    @classmethod
    def mark(cls, directory: Path) -> str | None:
        others = (AutoModelCache.sign, "config.json")  # a cache of another kind, a model
        return None if any((directory / name).exists() for name in others) else super().mark(directory)


def layer_file_length(path: Path, hidden: int) -> int:
    """S, from the header alone; ValueError: other tensors, types or shapes."""
    with open_safetensors(path) as file:
        check_types(file, states=["hidden_states"], whole=["token_ids"])
        states, tokens = (file.shapes[name] for name in ("hidden_states", "token_ids"))
    if len(states) != 3 or states[1:] != [4, hidden]:
        raise ValueError(f"hidden_states are {states}; wanted is [S, 4 layers, hidden size {hidden}]")
    if tokens != states[:1] or not tokens[0]:
        raise ValueError(f"hidden_states are {states} and token_ids {tokens}; one state a token is wanted")
    return tokens[0]


def read_layers(path: Path, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """features [S,3H], last [S,H] as stored and tokens [S], the first `length` of them; both states are views of one
    tensor."""
    with open_safetensors(path) as file:
        states, tokens = (file.read(name, slice(length)) for name in ("hidden_states", "token_ids"))
    return rearrange(states[:, :3], "s l h -> s (l h)"), states[:, 3], tokens.long()


def check_types(file: Tensors, states: list[str], whole: list[str]) -> None:
    """ValueError: tensors that are missing, states that are no floating-point numbers, ids and masks that are."""
    if missing := [name for name in (*states, *whole) if name not in file.held]:
        raise ValueError(f"it lacks {missing} and holds {sorted(file.held)}")
    for name in (*states, *whole):
        dtype = file.held[name].dtype
        if dtype.is_complex or dtype.is_floating_point != (name in states) or name in states and dtype.itemsize < 2:
            wanted = "floating-point numbers of 2 bytes or more are" if name in states else "whole numbers are"
            raise ValueError(f"its {name} are {str(dtype).removeprefix('torch.')}; {wanted} wanted")


def check_states(features: Tensor, last: Tensor) -> None:
    if not (is_finite(features) and is_finite(last)):
        raise ValueError("its states hold NaN or Inf")


def check_whole(values: dict, *keys: str) -> None:
    """ValueError: what is counted there is no positive whole number, or one that nothing has."""
    good = (type(values[key]) is int and 0 < values[key] < 1 << 48 for key in keys)
    if bad := [f"{key} {values[key]!r}"[:60] for key, fits in zip(keys, good, strict=True) if not fits]:
        raise ValueError(f"it says {', '.join(bad)}; positive whole numbers are wanted")


def check_layers(layers) -> None:
    good = isinstance(layers, list) and all(type(j) is int and 0 <= j < 1 << 20 for j in layers)
    if not good or not len(layers) == len(set(layers)) == 3:
        raise ValueError(f"its auxiliary layers are {str(layers)[:60]}; three different output ids are wanted")


def being_written(path: Path) -> bool:
    """Does a writer hold path.lock? vLLM leaves that file behind and holds a lock on it (flock) while it writes."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


def is_finite(x: Tensor) -> bool:
    """No NaN and no Inf in x, in one pass and without a copy: extremes carry both, 20 times faster than isfinite()."""
    return bool(torch.stack(torch.aminmax(x)).isfinite().all())


def token_key(tokens: Tensor | list[int]) -> str:
    """Names a conversation by its token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def masks_of(documents: Iterable[Document]) -> dict[str, Tensor]:
    """Loss masks by `token_key`."""
    return {token_key(document.tokens): document.loss_mask for document in documents}


def read_masks(path, skipped: Skipped | None = None) -> dict[str, np.ndarray]:
    """The same out of a .jsonl file whose lines hold `input_ids` and `loss_mask`. ValueError: a line that does not, or
    the same ids with two masks; with `skipped` such lines are left out and named there."""
    masks = {}
    for number, row in enumerate(read_index(Path(path), ("input_ids", "loss_mask"))[0], start=1):
        try:
            with naming(f"line {number} of {path}", "write it anew, or skip what is damaged"):
                tokens, mask = listed(row["input_ids"], row["loss_mask"])
                before = masks.setdefault(token_key(tokens), mask)
                if not np.array_equal(before, mask):
                    raise ValueError("another line gives the same input_ids another loss_mask")
        except Damaged as error:
            if skipped is None:
                raise
            skipped.add("damaged", [str(error).rpartition("; ")[0]])
    return masks


def arrow_rows(directory: Path) -> list[tuple[list, list]]:
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ValueError(
            f"{directory} keeps its loss masks in an Arrow dataset, which the package `datasets` reads; install it, or "
            "put an index.jsonl with input_ids and loss_mask in place of the .arrow files"
        ) from None
    for path in (*directory.glob("*.arrow"), *directory.glob("*.json")):
        with naming(path, "copy it again"):
            open_regular(path).close()
    with naming(directory, "copy its Arrow dataset again"):
        table = load_from_disk(str(directory), keep_in_memory=True).with_format(None)  # read, not mapped
        return list(zip(table["input_ids"], table["loss_mask"], strict=True))


def read_index(path: Path, keys: tuple[str, ...]) -> tuple[list[dict], int]:
    """Rows of a .jsonl file and how many bytes they take; a torn last line is left out. ValueError: no such index."""
    rows, used = [], 0
    with naming(path, "copy it again, or write it anew"), open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = read_row(line, f"line {len(rows) + 1}")
            if missing := [key for key in keys if key not in row]:
                raise ValueError(f"line {len(rows) + 1} lacks {missing}")
            rows.append(row)
            used += len(line)
    return rows, used


def read_row(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object")
    return row


def check_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"its ids span {tokens.min()}..{tokens.max()}; the target has 0..{vocab_size - 1}")
    return tokens


def numbers_in(path: Path) -> tuple:
    """Sorts hs_2 before hs_10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path)))


# ----------------------------------------------------------------------------------------------------------- SpecForge


class SpecForgeFiles(Captured):
    """SpecForge's rows_{a}-{b}/data_{i}.ckpt or .ckpt.gz: input_ids, loss_mask, aux_hidden_state [1,S,3H] and
    hidden_state [1,S,H], the last, after the final norm.

    The ids lie inside the files, so the first opening looks into all of them (the .gz ones are unpacked whole) and
    keeps what it saw in specforge_index.jsonl; later openings read only files whose size or time changed.
    """

    kind, sign, index = "SpecForge", "rows_*/data_*.ckpt*", "specforge_index.jsonl"
    names = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")

    def scan(self) -> Iterator[Document]:
        paths = (x for x in self.directory.glob(self.sign) if x.name.endswith((".ckpt", ".ckpt.gz")))
        known, seen = self.known(), {}
        for document in self.look_at(sorted(paths, key=numbers_in), partial(self.look, known)):
            seen[document.source] = known[document.source]
            yield document
        if seen != self.known():
            with suppress(OSError):  # a directory that cannot be written is only slower to open
                text = "".join(json.dumps(row) + "\n" for row in seen.values())
                replace_with(self.directory / self.index, lambda half: half.write_text(text))

    def known(self) -> dict[str, dict]:
        """Rows of the index by file; none where it cannot be read, it is made anew then."""
        with suppress(ValueError):
            rows = read_index(self.directory / self.index, ("file", "stamp", "input_ids", "loss_mask"))[0]
            return {str(row["file"]): row for row in rows}
        return {}

    def look(self, known: dict, path: Path) -> Document:
        with naming(path):
            with open_regular(path) as file:
                about = os.fstat(file.fileno())
            name, stamp = path.relative_to(self.directory).as_posix(), [about.st_size, about.st_mtime_ns]
            with suppress(KeyError, ValueError):  # what the index says cannot be, so the file is asked again
                if known[name]["stamp"] == stamp:
                    return self.listed_document(known[name])
            with open_checkpoint(path, self.names) as file:
                tokens, loss_mask = self.ids_and_mask(file)
            row = {"input_ids": tokens.tolist(), "loss_mask": loss_mask.tolist()}
            known[name] = {"file": name, "stamp": stamp} | row
            return self.listed_document(known[name])

    def listed_document(self, row: dict) -> Document:
        tokens, loss_mask = listed(row["input_ids"], row["loss_mask"], self.vocab_size)
        return Document(torch.from_numpy(tokens), torch.from_numpy(loss_mask), row["file"])

    def ids_and_mask(self, file: Tensors) -> tuple[Tensor, Tensor]:
        """input_ids and loss_mask [S] as stored; ValueError: other types or shapes of what the file holds."""
        check_types(file, states=["aux_hidden_state", "hidden_state"], whole=["input_ids", "loss_mask"])
        tokens, loss_mask = (file.read(name).flatten() for name in ("input_ids", "loss_mask"))
        s, h = len(tokens), self.hidden_size
        shapes = [[len(loss_mask)], *(file.shapes[name] for name in ("aux_hidden_state", "hidden_state"))]
        if shapes != [[s], [1, s, 3 * h], [1, s, h]] or s == 0:
            raise ValueError(
                f"loss_mask, aux_hidden_state, hidden_state are {shapes} for {s} tokens and hidden size {h}"
            )
        return tokens, loss_mask

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        n = len(document.tokens)
        with open_checkpoint(self.directory / document.source, self.names) as file:
            tokens, loss_mask = self.ids_and_mask(file)
            if not (torch.equal(tokens[:n], document.tokens) and torch.equal(loss_mask[:n] > 0, document.loss_mask)):
                raise ValueError(
                    f"its input_ids and loss_mask are not those that {self.index} has; remove that if this is whole"
                )
            return tuple(file.read(name, 0, slice(n)) for name in self.names[2:])


# ---------------------------------------------------------------------------------------------------- NeMo AutoModel


class AutoModelCache(Captured):
    """NeMo AutoModel's precompute_eagle3, format 2: padded rows in shards, with the teacher instead of last states.

    Stored ids, loss mask, p and position_mask stand one place early: place t holds what belongs to token t+1, with the
    features of token t. They move back by one, which leaves token 0 without an id (0 stands in), a mask and a p.
    Nothing reads those: slot t is fed token t+1+s and learns about it, so token 0 only gives features.
    position_mask is the loss mask where the argmax over all V is a draft id.

    `last` of a token is [p over the draft ids, position_mask], W = Vd + 1, stored top-k or not.
    """

    kind, sign = "AutoModel", "manifest.json"
    needs_ends = False
    keys = ("target_vocab_size", "num_samples", "shard_size", "aux_hidden_dim")

    def declared_layers(self) -> list[int]:
        path = self.directory / self.sign
        meta = self.meta = read_json(path, (*self.keys, "format_version", "aux_layer_ids", "selected_token_ids"))
        if meta["format_version"] != 2:
            raise ValueError(f"{path} says format_version {meta['format_version']}; version 2 is read")
        with naming(path, "copy it again"):
            check_whole(meta, *self.keys)
            check_layers(meta["aux_layer_ids"])
            hidden, vocab = meta["aux_hidden_dim"] // 3, meta["target_vocab_size"]
            if meta["aux_hidden_dim"] % 3:
                raise ValueError(f"it says aux_hidden_dim {meta['aux_hidden_dim']}, which is not of 3 layers")
            ids, _ = listed(meta["selected_token_ids"], [0] * len(meta["selected_token_ids"]))
            self.draft_ids = torch.from_numpy(ids)
            check_draft_ids(self.draft_ids, vocab)
        if self.ends is not None and (hidden, vocab) != (self.hidden_size, self.vocab_size):
            raise ValueError(
                f"{path} is of a target of hidden size {hidden}, vocabulary {vocab}, not of {self.hidden_size}, "
                f"{self.vocab_size}; give its target"
            )
        self.hidden_size, self.vocab_size = hidden, vocab
        self.width = len(self.draft_ids) + 1
        if self.ends is None:
            self.embedding(slice(0))  # are these sizes those of what is there?
        drafted = torch.zeros(vocab, dtype=torch.bool).index_fill(0, self.draft_ids, True)
        self.undrafted = None if drafted.all() else int(drafted.int().argmin())  # some id that no draft says
        return meta["aux_layer_ids"]

    def scan(self) -> Iterator[Document]:
        samples, size = self.meta["num_samples"], self.meta["shard_size"]
        count, found = -(-samples // size), []
        for path in self.directory.glob("shard-*.safetensors"):
            number = path.stem.removeprefix("shard-")
            if re.fullmatch(r"\d{6,}", number) and int(number) < count and path.name == shard_name(int(number)):
                found.append(int(number))
        found.sort()
        lost = samples - sum(min(size, samples - size * shard) for shard in found)
        if lost:  # however many the manifest says there are
            first = next((i for i, shard in enumerate(found) if i != shard), len(found))
            name = (
                f"{self.directory / shard_name(first)} cannot be used (it is missing, with {count - len(found):,} of "
            )
            error = Damaged(f"{name}{count:,} shards in all by {self.sign}); copy them again, or skip damaged files")
            self.skip_or_raise(error, self.skipped, lost)
        for shard in found:
            path, rows = self.directory / shard_name(shard), min(size, samples - size * shard)
            try:
                with naming(path):
                    ids, learned, real = self.open_shard(path, rows)
            except Damaged as error:
                self.skip_or_raise(error, self.skipped, rows)
                continue
            yield from self.look_at(range(rows), partial(self.row, path, ids, learned, real))

    def open_shard(self, path: Path, rows: int) -> list[Tensor]:
        """input_ids, loss_mask and attention_mask [n,S]; ValueError: other tensors, types or shapes."""
        whole = ["input_ids", "loss_mask", "attention_mask", "position_mask"]
        with open_safetensors(path) as file:
            is_dense = "target_probs" in file.held
            states = ["aux_hidden_states", "target_probs" if is_dense else "target_probs_values"]
            names = [*whole, *states] + ([] if is_dense else ["target_probs_indices"])
            check_types(file, states, [name for name in names if name not in states])
            held = file.shapes
            s, k = held["input_ids"][-1], len(self.draft_ids) if is_dense else held[names[-1]][-1]
            widths = [1, self.meta["aux_hidden_dim"], k, k]
            wanted = [[rows, s]] * 3 + [[rows, s, width] for width in widths]
            if [held[name] for name in names] != wanted[: len(names)]:
                said = f"{rows} rows, features {widths[1]} wide, {len(self.draft_ids)} draft ids"
                raise ValueError(f"its tensors are {held}; {self.sign} says {said}")
            return [file.read(name) for name in names[:3]]

    def row(self, path: Path, ids: Tensor, learned: Tensor, real: Tensor, i: int) -> Document | tuple[str, str]:
        name = f"{path.name}[{i}]"
        with naming(self.directory / name):
            at = stretch(real[i])
            if at.start == at.stop:
                return "empty", name
            # token 0 has neither an id nor a mask, whatever stands before it
            tokens, loss_mask = (moved_back(x[i])[at].numpy() for x in (ids, learned))
            tokens, loss_mask = listed(tokens, loss_mask, self.vocab_size)
            return Document(torch.from_numpy(tokens), torch.from_numpy(loss_mask), name)

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        shard, i = re.fullmatch(r"(.*)\[(\d+)\]", document.source).groups()
        with open_safetensors(self.directory / shard) as file:
            at = stretch(file.read("attention_mask", int(i), slice(None)))
            here = int(i), slice(at.start, min(at.stop, at.start + len(document.tokens)))
            early = int(i), slice(max(here[1].start - 1, 0), here[1].stop - 1)  # a place before
            features = file.read("aux_hidden_states", *here)
            covered = file.read("position_mask", *early)
            p = file.read("target_probs", *early) if "target_probs" in file.held else self.dense(file, early)
        if covered.numel() and not (covered.min() >= 0 and covered.max() <= 1):
            raise ValueError("its position_mask has other numbers than 0 and 1")
        last = p.new_zeros(len(features), self.width)
        last[len(last) - len(p) :, :-1], last[len(last) - len(p) :, -1:] = p, covered
        mass = last[document.loss_mask, :-1].float().sum(-1)
        if (last < 0).any() or (mass - 1).abs().gt(0.1).any():  # bf16 and fp16 round each entry
            raise ValueError(f"its target_probs sum to {mass.min():.3f}..{mass.max():.3f} at learned tokens, not to 1")
        order = torch.tensor(self.meta["aux_layer_ids"]).argsort()
        if not torch.equal(order, torch.arange(3)):
            features = rearrange(rearrange(features, "s (l h) -> s l h", l=3)[:, order], "s l h -> s (l h)")
        return features, last

    def dense(self, file: Tensors, at: tuple) -> Tensor:
        values, indices = (file.read(f"target_probs_{name}", *at) for name in ("values", "indices"))
        return values.new_zeros(len(values), len(self.draft_ids)).scatter_(-1, indices.long(), values)

    def head(self, last: Tensor) -> Tensor:
        """last [m,Vd+1] -> logits [m,V] whose softmax over the draft ids is p, exactly 0 where p is, and whose argmax
        is a draft id where position_mask is set alone."""
        p, covered = last[:, :-1].float(), last[:, -1] > 0.5
        logits = p.new_full((len(p), self.vocab_size), -torch.inf)
        logits[:, self.draft_ids.to(p.device)] = p.log()
        if self.undrafted is not None:
            logits[:, self.undrafted] = torch.where(covered, -torch.inf, 1.0)  # log p stays below
        return logits

    @property
    def embed_tokens(self) -> nn.Embedding:
        if self.ends is not None:
            return self.ends.embed_tokens
        return nn.Embedding.from_pretrained(self.embedding(slice(None)))

    def embedding(self, rows: slice) -> Tensor:
        """Rows of the target's embedding [V,H]; ValueError where the file has another."""
        path = self.directory / "target_embeddings.safetensors"
        with naming(path, "copy it again"), open_safetensors(path) as file:
            check_types(file, ["weight"], [])
            if file.shapes["weight"] != [self.vocab_size, self.hidden_size]:
                sizes = f"{self.sign} says [{self.vocab_size}, {self.hidden_size}]"
                raise ValueError(f"weight is {file.shapes['weight']}, {sizes}")
            return file.read("weight", rows)


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def stretch(real: Tensor) -> slice:
    """Where the attention mask [S] is set; ValueError: not in one stretch, or other numbers than 0 and 1."""
    at = real.nonzero().flatten()
    begin, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
    if not bool((real[begin:end] == 1).all()):
        raise ValueError("its attention_mask is no single stretch of 1 between 0")
    return slice(begin, end)


def moved_back(x: Tensor) -> Tensor:
    """x [S,..]: what stands at place t goes to t+1; zeros at 0. With padding on the left nothing is lost."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


KINDS = (OwnCapture, AutoModelCache, SpecForgeFiles, SpeculatorsFiles, ConnectorFiles)


def head_sample(head: nn.Linear) -> list[float]:
    """A few numbers that tell one target's output head [V,H] from another's."""
    return head.weight[:: -(-len(head.weight) // 16), 0].float().tolist()
