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
import gzip
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from safetensors import safe_open
from torch import Tensor, nn

from data import Document, check_draft_ids
from files import Damaged, naming, read_json, shapes_in
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
    `draft_ids` [Vd], the draft vocabulary that a cache is bound to, or None; `skipped` counts what was left out.
    """

    kind = sign = ""
    needs_ends = True
    draft_ids: Tensor | None = None

    def __init__(self, directory: Path, ends, aux_layers, masks, skip_damaged: bool):
        if ends is None and self.needs_ends:
            raise ValueError(f"{directory} ({self.kind}) holds no output head; give the target's directory as well")
        self.directory, self.ends, self.masks, self.skip_damaged = directory, ends, masks, skip_damaged
        self.skipped = Counter()
        if ends is not None:
            self.hidden_size = self.width = ends.hidden_size
            self.vocab_size = ends.vocab_size
        self.aux_layers = self.agreed_layers(aux_layers, self.declared_layers())
        self.documents = list(self.scan())
        if not self.documents:
            raise ValueError(
                f"{directory} ({self.kind}) has no document that can be used; skipped: {dict(self.skipped)}"
            )

    @classmethod
    def mark(cls, directory: Path) -> str | None:
        """The name of what shows this kind in `directory`, if anything does."""
        return next((x.relative_to(directory).as_posix() for x in directory.glob(cls.sign)), None)

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
        path = self.directory / document.source
        try:
            with naming(path):
                states = self.read(document)
                if not all(is_finite(x) for x in states):
                    raise ValueError("its states hold NaN or Inf")
                return states
        except Damaged as error:
            return self.skip_or_raise(error)

    def skip_or_raise(self, error: Damaged, documents: int = 1) -> None:
        if not self.skip_damaged:
            raise error
        self.skipped["damaged"] += documents

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
        """look(item) of all items by some threads, in order. It may return a reason to skip instead of a document."""

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
                        self.skip_or_raise(result)
                    else:
                        self.skipped[result] += 1


# ------------------------------------------------------------ one safetensors file a document: hidden_states, token_ids


class LayerFiles(Captured):
    """`hidden_states` [S,4,H], three auxiliary layers ascending and the last one, and `token_ids` [S]."""

    after_norm = False  # is the last layer's state normed already?

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        features, last, tokens = read_layers(self.directory / document.source, len(document.tokens))
        if not torch.equal(tokens, document.tokens):
            raise ValueError("its token_ids are not those of the conversation it is listed with")
        return features, last if self.after_norm else self.ends.norm(last)

    def document(self, name: str, tokens, loss_mask) -> Document:
        """What an index says of a file, once the file's header agrees."""
        path = self.directory / name
        with naming(path):
            length = layer_file_length(path, self.hidden_size)
            if not len(tokens) == len(loss_mask) == length:
                raise ValueError(
                    f"it has {length} tokens; listed are {len(tokens)} ids and {len(loss_mask)} mask entries"
                )
            tokens, loss_mask = torch.as_tensor(tokens, dtype=torch.long), torch.as_tensor(loss_mask).bool()
            return Document(check_tokens(tokens, self.vocab_size), loss_mask, name)


class OwnCapture(LayerFiles):
    """What `write_capture` wrote: capture.json declares layers and norm state, index.jsonl lists the conversations."""

    kind, sign = "our own capture", "capture.json"

    def declared_layers(self) -> list[int]:
        self.meta = read_json(self.directory / "capture.json", CAPTURE_KEYS)
        if self.meta["version"] != CAPTURE_VERSION or self.meta["last_hidden"] not in ("after_norm", "before_norm"):
            said = {key: self.meta[key] for key in ("version", "last_hidden")}
            raise ValueError(f"{self.directory}/capture.json says {said}; this reads version {CAPTURE_VERSION}")
        widths = {key: self.meta[key] for key in ("hidden_size", "vocab_size")}
        if widths != {"hidden_size": self.hidden_size, "vocab_size": self.vocab_size}:
            wanted = f"hidden size {self.hidden_size}, vocabulary {self.vocab_size}"
            raise ValueError(
                f"{self.directory} was captured from a target of {widths}, not of {wanted}; give its target"
            )
        held, head = (torch.tensor(x) for x in (self.meta["head"], head_sample(self.ends.lm_head)))
        if not torch.allclose(held, head, rtol=0.02, atol=1e-4):  # either may have been rounded to bf16
            raise ValueError(f"{self.directory} was captured from a target with another output head; give its target")
        self.after_norm = self.meta["last_hidden"] == "after_norm"
        return self.meta["aux_layers"]

    def scan(self) -> Iterator[Document]:
        rows = read_index(self.directory / "index.jsonl")[0]
        left = self.meta["documents"] - len(rows)
        if left and not self.skip_damaged:
            raise ValueError(
                f"{self.directory} lacks {left} of {self.meta['documents']} documents; capture on, or skip them"
            )
        self.skipped["unfinished"] += left
        yield from self.look_at(rows, lambda row: self.document(row["file"], row["input_ids"], row["loss_mask"]))


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
            rows = enumerate(arrow_rows(self.directory))
            yield from self.look_at(
                rows, lambda pair: self.document(f"hidden_states/hs_{pair[0]}.safetensors", *pair[1])
            )
            return
        masks = self.masks
        if masks is None and (self.directory / "index.jsonl").is_file():
            masks = read_masks(self.directory / "index.jsonl")
        if masks is None:
            raise ValueError(
                f"{self.directory} holds no loss masks: put an index.jsonl beside the states, one line a conversation "
                "with input_ids and loss_mask, or give the conversations they were captured from"
            )
        paths = sorted((x for x in self.directory.glob(self.sign) if x.is_file()), key=numbers_in)
        yield from self.look_at(paths, partial(self.masked, masks))

    def masked(self, masks: dict, path: Path) -> Document | str:
        if being_written(path):
            return "unfinished"
        with naming(path):
            layer_file_length(path, self.hidden_size)
            with safe_open(path, "pt") as file:
                tokens = file.get_tensor("token_ids")
        mask = masks.get(token_key(tokens))
        return "no mask" if mask is None else self.document(path.relative_to(self.directory).as_posix(), tokens, mask)


class ConnectorFiles(SpeculatorsFiles):
    """vLLM's extract_hidden_states connector alone: {request}.safetensors, and {request}.safetensors.lock beside it."""

    kind, sign = "vLLM connector", "*.safetensors"

    @classmethod
    def mark(cls, directory: Path) -> str | None:
        others = (AutoModelCache.sign, "config.json")  # a cache of another kind, a model
        return None if any((directory / name).exists() for name in others) else super().mark(directory)


def layer_file_length(path: Path, hidden: int) -> int:
    """S, from the header alone; ValueError: other tensors or shapes."""
    with safe_open(path, "pt") as file:
        held = shapes_in(file)
    if missing := {"hidden_states", "token_ids"} - held.keys():
        raise ValueError(f"it lacks {sorted(missing)} and holds {sorted(held)}")
    states, tokens = held["hidden_states"], held["token_ids"]
    if len(states) != 3 or states[1:] != [4, hidden]:
        raise ValueError(f"hidden_states are {states}; wanted is [S, 4 layers, hidden size {hidden}]")
    if tokens != states[:1] or not tokens[0]:
        raise ValueError(f"hidden_states are {states} and token_ids {tokens}; one state a token is wanted")
    return tokens[0]


def read_layers(path: Path, length: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """features [S,3H], last [S,H] as stored and tokens [S], the first `length` of them."""
    with safe_open(path, "pt") as file:  # memory-mapped: what is not asked for is not read
        states, tokens = (file.get_slice(name)[:length] for name in ("hidden_states", "token_ids"))
    return rearrange(states[:, :3], "s l h -> s (l h)"), states[:, 3], tokens.long()


def being_written(path: Path) -> bool:
    """Does a writer hold path.lock? vLLM leaves that file behind and holds a lock on it (flock) while it writes."""
    try:
        with open(f"{path}.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def is_finite(x: Tensor) -> bool:
    """No NaN and no Inf in x, in one pass and without a copy: extremes carry both, 20 times faster than isfinite()."""
    return bool(torch.stack(torch.aminmax(x)).isfinite().all())


def token_key(tokens: Tensor | list[int]) -> str:
    """Names a conversation by its token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def masks_of(documents: Iterable[Document]) -> dict[str, Tensor]:
    """Loss masks by `token_key`."""
    return {token_key(document.tokens): document.loss_mask for document in documents}


def read_masks(path) -> dict[str, list[int]]:
    """The same out of a .jsonl file whose lines hold `input_ids` and `loss_mask`; ValueError: of different length."""
    masks = {}
    for number, row in enumerate(read_index(Path(path), ("input_ids", "loss_mask"))[0], start=1):
        if len(row["input_ids"]) != len(row["loss_mask"]):
            sizes = f"{len(row['input_ids'])} input_ids and {len(row['loss_mask'])} loss_mask entries"
            raise ValueError(f"line {number} of {path} has {sizes}; one a token is wanted")
        masks[token_key(row["input_ids"])] = row["loss_mask"]
    return masks


def arrow_rows(directory: Path) -> list[tuple[list, list]]:
    try:
        from datasets import load_from_disk
    except ImportError:
        raise ValueError(
            f"{directory} keeps its loss masks in an Arrow dataset, which the package `datasets` reads; install it, or "
            "put an index.jsonl with input_ids and loss_mask in place of the .arrow files"
        ) from None
    with naming(directory):
        table = load_from_disk(str(directory)).with_format(None)
        return list(zip(table["input_ids"], table["loss_mask"], strict=True))


def read_index(path: Path, keys=("file", "input_ids", "loss_mask")) -> tuple[list[dict], int]:
    """Rows of a .jsonl file and how many bytes they take; a torn last line is left out. ValueError: no such index."""
    rows, used = [], 0
    with naming(path):
        for line in path.read_bytes().splitlines(keepends=True):
            if not line.endswith(b"\n"):
                break
            row = json.loads(line)
            if missing := [key for key in keys if key not in row]:
                raise ValueError(f"line {len(rows) + 1} lacks {missing}")
            rows.append(row)
            used += len(line)
    return rows, used


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

    def scan(self) -> Iterator[Document]:
        paths = (x for x in self.directory.glob(self.sign) if x.name.endswith((".ckpt", ".ckpt.gz")))
        known, before, seen = {}, {}, {}
        with suppress(ValueError):  # made anew when it cannot be read
            known = {row["file"]: row for row in read_index(self.directory / self.index)[0]}
            before = dict(known)
        for document in self.look_at(sorted(paths, key=numbers_in), partial(self.look, known)):
            seen[document.source] = known[document.source]
            yield document
        half = self.directory / f".{self.index}-{os.getpid()}"
        with suppress(OSError):  # a directory that cannot be written is only slower to open
            if seen != before:
                half.write_text("".join(json.dumps(row) + "\n" for row in seen.values()))
                half.replace(self.directory / self.index)

    def look(self, known: dict, path: Path) -> Document:
        with naming(path):
            name, stat = path.relative_to(self.directory).as_posix(), path.stat()
            stamp = [stat.st_size, stat.st_mtime_ns]
            if name not in known or known[name].get("stamp") != stamp:
                tokens, loss_mask, *_ = self.load(path)
                row = {"input_ids": tokens.tolist(), "loss_mask": loss_mask.int().tolist()}
                known[name] = {"file": name, "stamp": stamp} | row
            tokens, loss_mask = (torch.tensor(known[name][key]) for key in ("input_ids", "loss_mask"))
            return Document(check_tokens(tokens, self.vocab_size), loss_mask.bool(), name)

    def load(self, path: Path) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """tokens [S], loss_mask [S], features [S,3H], last [S,H]; ValueError: other keys or shapes."""
        if path.suffix == ".gz":
            with gzip.open(path) as file:
                held = torch.load(io.BytesIO(file.read()), map_location="cpu", weights_only=True)
        else:
            held = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        names = ("input_ids", "loss_mask", "aux_hidden_state", "hidden_state")
        if missing := [name for name in names if name not in held]:
            raise ValueError(f"it lacks {missing} and holds {sorted(held)}")
        tokens, loss_mask, features, last = (held[name] for name in names)
        tokens, loss_mask = tokens.flatten().long(), loss_mask.flatten().bool()
        s, h = len(tokens), self.hidden_size
        shapes = [tuple(x.shape) for x in (loss_mask, features, last)]
        if shapes != [(s,), (1, s, 3 * h), (1, s, h)] or s == 0:
            raise ValueError(
                f"loss_mask, aux_hidden_state, hidden_state are {shapes} for {s} tokens and hidden size {h}"
            )
        return tokens, loss_mask, features[0], last[0]

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        tokens, _, features, last = self.load(self.directory / document.source)
        n = len(document.tokens)
        if not torch.equal(tokens[:n], document.tokens):
            raise ValueError("its input_ids are not those that it had when the directory was opened")
        return features[:n], last[:n]


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
    keys = ("format_version", "target_vocab_size", "num_samples", "shard_size", "aux_hidden_dim", "aux_layer_ids")

    def declared_layers(self) -> list[int]:
        path = self.directory / self.sign
        meta = self.meta = read_json(path, (*self.keys, "selected_token_ids"))
        if meta["format_version"] != 2:
            raise ValueError(f"{path} says format_version {meta['format_version']}; version 2 is read")
        with naming(path):
            hidden, vocab = meta["aux_hidden_dim"] // len(meta["aux_layer_ids"]), meta["target_vocab_size"]
            self.draft_ids = torch.tensor(meta["selected_token_ids"])
            check_draft_ids(self.draft_ids, vocab)
        if self.ends is not None and (hidden, vocab) != (self.hidden_size, self.vocab_size):
            raise ValueError(
                f"{path} is of a target of hidden size {hidden}, vocabulary {vocab}, not of {self.hidden_size}, "
                f"{self.vocab_size}; give its target"
            )
        self.hidden_size, self.vocab_size = hidden, vocab
        self.width = len(self.draft_ids) + 1
        drafted = torch.zeros(vocab, dtype=torch.bool).index_fill(0, self.draft_ids, True)
        self.undrafted = None if drafted.all() else int(drafted.int().argmin())  # some id that no draft says
        return meta["aux_layer_ids"]

    def scan(self) -> Iterator[Document]:
        samples, size = self.meta["num_samples"], self.meta["shard_size"]
        for shard, first in enumerate(range(0, samples, size)):
            path = self.directory / f"shard-{shard:06d}.safetensors"
            rows = min(size, samples - first)
            try:
                with naming(path):
                    ids, learned, real = self.open_shard(path, rows)
            except Damaged as error:
                self.skip_or_raise(error, rows)
                continue
            yield from self.look_at(range(rows), partial(self.row, path, ids, learned, real))

    def open_shard(self, path: Path, rows: int) -> list[Tensor]:
        """input_ids, loss_mask and attention_mask [n,S]; ValueError: other tensors or shapes."""
        with safe_open(path, "pt") as file:
            held = shapes_in(file)
            names = ["input_ids", "loss_mask", "attention_mask", "position_mask", "aux_hidden_states"]
            names += ["target_probs"] if "target_probs" in held else ["target_probs_values", "target_probs_indices"]
            if missing := [name for name in names if name not in held]:
                raise ValueError(f"it lacks {missing} and holds {sorted(held)}")
            s, k = held["input_ids"][-1], held[names[-1]][-1] if len(names) > 6 else len(self.draft_ids)
            widths = [1, self.meta["aux_hidden_dim"], k, k]
            wanted = [[rows, s]] * 3 + [[rows, s, width] for width in widths]
            if [held[name] for name in names] != wanted[: len(names)]:
                said = f"{rows} rows, features {widths[1]} wide, {len(self.draft_ids)} draft ids"
                raise ValueError(f"its tensors are {held}; the manifest says {said}")
            return [file.get_tensor(name) for name in names[:3]]

    def row(self, path: Path, ids: Tensor, learned: Tensor, real: Tensor, i: int) -> Document | str:
        real, name = real[i].bool(), f"{path.name}[{i}]"
        if not real.any():
            return "empty"
        with naming(self.directory / name):
            if (real[1:] != real[:-1]).sum() > 2 - int(real[0]) - int(real[-1]):
                raise ValueError("its attention_mask is no single stretch")
            tokens = check_tokens(moved_back(ids[i])[real], self.vocab_size)
            return Document(tokens, moved_back(learned[i]).bool()[real], name)

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        shard, i = re.fullmatch(r"(.*)\[(\d+)\]", document.source).groups()
        at = slice(int(i), int(i) + 1)
        with safe_open(self.directory / shard, "pt") as file:
            row = {name: file.get_slice(name)[at][0] for name in shapes_in(file)}
        real, n = row["attention_mask"].bool(), len(document.tokens)
        p = row["target_probs"] if "target_probs" in row else self.dense(row)
        payload = torch.cat([p, row["position_mask"].to(p.dtype)], dim=-1)
        features, last = row["aux_hidden_states"][real][:n], moved_back(payload)[real][:n]
        mass = last[document.loss_mask, :-1].float().sum(-1)
        if (last < 0).any() or (mass - 1).abs().gt(0.1).any():  # bf16 and fp16 round each entry
            raise ValueError(f"its target_probs sum to {mass.min():.3f}..{mass.max():.3f} at learned tokens, not to 1")
        order = torch.tensor(self.meta["aux_layer_ids"]).argsort()
        features = rearrange(features, "s (l h) -> s l h", h=self.hidden_size)[:, order]
        return rearrange(features, "s l h -> s (l h)"), last

    def dense(self, row: dict[str, Tensor]) -> Tensor:
        values, indices = row["target_probs_values"], row["target_probs_indices"].long()
        return values.new_zeros(len(values), len(self.draft_ids)).scatter_(-1, indices, values)

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
        path = self.directory / "target_embeddings.safetensors"
        with naming(path), safe_open(path, "pt") as file:
            weight = file.get_tensor("weight")
            if list(weight.shape) != [self.vocab_size, self.hidden_size]:
                raise ValueError(f"weight is {list(weight.shape)}, wanted [{self.vocab_size}, {self.hidden_size}]")
        return nn.Embedding.from_pretrained(weight)


def moved_back(x: Tensor) -> Tensor:
    """x [S,..]: what stands at place t goes to t+1; zeros at 0. With padding on the left nothing is lost."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])


KINDS = (OwnCapture, AutoModelCache, SpecForgeFiles, SpeculatorsFiles, ConnectorFiles)


def head_sample(head: nn.Linear) -> list[float]:
    """A few numbers that tell one target's output head [V,H] from another's."""
    return head.weight[:: -(-len(head.weight) // 16), 0].float().tolist()
