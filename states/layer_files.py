"""One safetensors file a document, hidden_states and token_ids: our own capture, speculators', vLLM's connector."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from einops import rearrange
from torch import Tensor, nn

from data.documents import Document, listed
from data.files import being_written, naming, open_regular, read_json
from states.automodel import AutoModelCache
from states.captured import Captured, check_layers, check_tokens, check_types, check_whole, numbers_in
from states.index import read_index, read_masks, token_key
from states.tensors import open_safetensors

CAPTURE_VERSION = 1  # of our own layout
CAPTURE_KEYS = ("version", "last_hidden", "aux_layers", "hidden_size", "vocab_size", "documents", "head")


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


def head_sample(head: nn.Linear) -> list[float]:
    """A few numbers that tell one target's output head [V,H] from another's."""
    return head.weight[:: -(-len(head.weight) // 16), 0].float().tolist()


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
