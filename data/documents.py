"""Documents: one conversation each, as tokens with a loss mask; what was left out of them; held out, or trained on."""

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Document(NamedTuple):
    """One conversation as tokens; `loss_mask[i]` is set where token i is learned: the answer and its end of turn."""

    tokens: Tensor  # [L] long
    loss_mask: Tensor  # [L] bool
    source: str  # where it came from, for messages


class Skipped(Counter):
    """What was left out: how many by reason, the first few of each by name; and how many were `kept`."""

    few = 3

    def __init__(self):
        super().__init__()
        self.named, self.kept = {}, 0

    def add(self, reason: str, names: Iterable[str] = (), n: int = 1) -> None:
        self[reason] += n
        known = self.named.setdefault(reason, [])
        known += list(names)[: self.few - len(known)]

    def lines(self, what: str = "skipped") -> Iterator[str]:
        """For people. what: became of them."""
        for reason, n in (+self).most_common():
            names = ", ".join(self.named.get(reason, ()))
            more = ", ..." if n > len(self.named.get(reason, ())) else ""
            yield f"  {what} {n:,}: {reason}" + (f" ({names}{more})" if names else "")


def listed(ids, loss_mask, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [S] int64 and loss mask [S] bool out of what a file says they are; ValueError with the reason if it
    says anything else. vocab_size None: ids may be any."""
    try:
        ids, mask = np.array(ids), np.array(loss_mask)
    except (ValueError, OverflowError):
        ids = mask = np.empty(0)
    if ids.ndim != 1 or mask.ndim != 1 or ids.dtype.kind not in "iu" or mask.dtype.kind not in "biu":
        raise ValueError("input_ids and loss_mask that are no lists of integers")
    if len(ids) != len(mask):
        raise ValueError("input_ids and loss_mask of different length")
    if ids.min() < 0 or ids.max() >= (1 << 31 if vocab_size is None else vocab_size):
        raise ValueError("input_ids outside the vocabulary")
    if mask.min() < 0 or mask.max() > 1:
        raise ValueError("a loss_mask of other numbers than 0 and 1")
    return ids.astype(np.int64), mask.astype(bool)


class Documents(Sequence):
    """Documents as views of one array of tokens [N] int32 and one mask [N] bool.

    An index makes a `Document` (with int64 tokens, a copy), a slice another `Documents` over the same arrays.
    """

    def __init__(self, tokens: Tensor, loss_mask: Tensor, begins, lengths, sources: list[str]):
        self.tokens, self.loss_mask = tokens, loss_mask
        self.begins, self.lengths, self.sources = begins, lengths, sources

    @classmethod
    def gather(cls, documents: list[Document]) -> "Documents":
        lengths = np.array([len(d.tokens) for d in documents])
        tokens, loss_mask = torch.cat([d.tokens.int() for d in documents]), torch.cat([d.loss_mask for d in documents])
        return cls(tokens, loss_mask, lengths.cumsum() - lengths, lengths, [d.source for d in documents])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int | slice) -> "Document | Documents":
        if isinstance(i, slice):
            return self.take(range(len(self))[i])
        at = slice(self.begins[i], self.begins[i] + self.lengths[i])
        return Document(self.tokens[at].long(), self.loss_mask[at], self.sources[i])

    def take(self, indices: Iterable[int]) -> "Documents":
        i = np.fromiter(indices, np.int64)
        return Documents(self.tokens, self.loss_mask, self.begins[i], self.lengths[i], [self.sources[j] for j in i])

    @property
    def learned(self) -> int:
        return sum(int(self.loss_mask[b : b + n].sum()) for b, n in zip(self.begins, self.lengths, strict=True))

    def summary(self) -> str:
        tokens = self.lengths.sum()
        return f"{len(self):,} documents, {tokens:,} tokens, {self.learned / tokens:.0%} learned"


def split(documents: Documents, share: float, seed: int = 0) -> tuple[Documents, Documents]:
    """(training, held out): about `share` of the conversations is held out, each side shuffled by `seed`.

    A hash of the tokens of a conversation's first document alone decides the side. So it is the same on every machine
    and for every seed and stays when data are added, and identical conversations never part, nor do the documents of
    one; nor does the order depend on that of the files. Neither side is empty. ValueError: a share outside 0..1, fewer
    than two different conversations.
    """
    if not 0 < share < 1:
        raise ValueError(f"the held-out share is {share}; it must lie between 0 and 1")
    positions, source = [], None
    for document in documents:
        if document.source != source:  # the documents of one conversation are neighbours
            digest = hashlib.sha256(document.tokens.numpy().astype("<i4").tobytes()).digest()
            source, position = document.source, int.from_bytes(digest[:8], "big") / 2**64
        positions.append(position)
    positions = np.array(positions)
    if len(np.unique(positions)) < 2:
        raise ValueError(
            f"{len(documents)} documents of one conversation: one is held out, so two different ones are needed"
        )
    edge = np.clip(share, np.nextafter(positions.min(), 1), positions.max())  # one conversation a side at least
    held_out = positions < edge
    order = positions.argsort(kind="stable")[np.random.default_rng(seed).permutation(len(documents))]
    return documents.take(order[~held_out[order]]), documents.take(order[held_out[order]])


def cut_to(document: Document, row_tokens: int) -> Document:
    return Document(document.tokens[:row_tokens], document.loss_mask[:row_tokens], document.source)


def prompt_and_answer(document: Document, middle: bool = False) -> tuple[Tensor, Tensor]:
    """Tokens up to its first answer, and that answer's. middle: cut halfway through the answer instead."""
    learned = document.loss_mask.int()
    begin = int(learned.argmax())
    end = begin + int(learned[begin:].cumprod(0).sum())
    cut = (begin + end) // 2 if middle else begin
    return document.tokens[:cut], document.tokens[cut:end]
