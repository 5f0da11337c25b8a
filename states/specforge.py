"""SpecForge's hidden states."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from data.documents import Document, listed
from data.files import naming, open_regular, replace_with
from states.captured import Captured, check_types, numbers_in
from states.index import read_index
from states.tensors import Tensors, open_checkpoint


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
