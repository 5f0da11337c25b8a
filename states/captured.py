"""What every layout of captured states has (read.py opens them), and what several of them check."""

import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

from torch import Tensor, nn

from data.documents import Document, Skipped
from data.files import Damaged, is_finite, naming
from states.tensors import Tensors
from target.model import check_aux_layers

READERS = 8  # threads that look at headers: opening files waits for the disk, not for the interpreter


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


def check_tokens(tokens: Tensor, vocab_size: int) -> Tensor:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"its ids span {tokens.min()}..{tokens.max()}; the target has 0..{vocab_size - 1}")
    return tokens


def numbers_in(path: Path) -> tuple:
    """Sorts hs_2 before hs_10."""
    return tuple(int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(path)))
