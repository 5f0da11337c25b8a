"""Training rows: documents and their states, packed into the micro-batches of every optimizer step.

Shapes as in sources.py; T slots of a row.
"""

import itertools
import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from data.documents import Document, Documents, cut_to
from data.packing import lay_out, pack, sizes_of
from draft_deepseek import RowChunks
from states.follow import prefetched
from states.index import token_key
from training.sources import POOL_ROWS, SAMPLE_DOCUMENTS, Source, check_some_left, teacher_check

NOT_ONE = 100  # documents that cannot be used, before a run is given up that has read no other
Filled = list[list[tuple[Document, tuple[Tensor, Tensor]]]]  # rows of documents with their features and last states


class Assembler:
    """Makes the rows of a micro-batch from documents and their states. make_mask: keep FlexAttention's block mask."""

    def __init__(self, args, source: Source, draft_ids: Tensor, make_mask: bool = True):
        self.args, self.source, self.draft_ids, self.make_mask = args, source, draft_ids, make_mask
        dtype, device = getattr(torch, args.precision), torch.device(args.device)
        features = torch.zeros(0, len(source.aux_layers) * source.hidden_size, dtype=dtype, device=device)
        is_state = source.width == source.hidden_size  # else probabilities, which bfloat16 would round
        last = torch.zeros(0, source.width, dtype=dtype if is_state else torch.float32, device=device)
        self.like = features, last

    def __call__(self, rows: Filled, choice: Tensor | None = None) -> RowChunks:
        """Filled up with rows of padding to args.batch_rows. choice: the target's, from a first call."""
        rows = [[(d.tokens, d.loss_mask, *states) for d, states in row] for row in rows]
        rows += [[]] * (self.args.batch_rows - len(rows))
        laid_out = lay_out(rows, self.args.row_tokens, self.like)
        how = {"steps": self.args.ttt_steps, "chunk": self.args.chunk, "make_mask": self.make_mask}
        how["even"] = self.args.compile == "off"
        return RowChunks(self.draft_ids, **laid_out, head=self.source.head, choice=choice, **how)


class Batch:
    """A micro-batch of documents with their states, which are laid out on the device when its rows are asked for.

    keep: hold them there, where no other micro-batch of the optimizer step wants the place.
    """

    def __init__(self, make: Assembler, filled: Filled, keep: bool):
        self.make, self.filled, self.keep = make, filled, keep
        self.choice, self.kept = None, None

    def rows(self) -> RowChunks:
        if self.kept is not None:
            return self.kept
        made = self.make(self.filled, self.choice)
        self.choice = made.choice
        if self.keep:
            self.kept, self.filled = made, None  # one copy of the states is enough
        return made


class Window(NamedTuple):
    """What one rank computes in one optimizer step."""

    batches: list[Batch]
    documents: list[Document]
    consumed: int  # micro-batches of all ranks, this window's included
    ended: bool = False  # the stream has no more


class Rows:
    """The stream of micro-batches: number i of it, its states read or captured when asked for, is always the same."""

    def __init__(self, args, source: Source, documents: Documents, sizes: list[tuple[int, int]], make: Assembler):
        self.args, self.source, self.documents, self.sizes, self.make = args, source, documents, sizes, make
        self.lengths, self.latest = [], (-1, [])

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Micro-batches of rows of documents, in an order fixed by (seed, epoch).

        Rows of one micro-batch have about as many anchors each, since their chunks go side by side.
        """
        if self.latest[0] != number:
            b, rng = self.args.batch_rows, random.Random(f"{self.args.seed}/{number}")
            rows = pack([tokens for tokens, _ in self.sizes], self.args.row_tokens, rng)
            if b > 1:
                rows.sort(key=self.anchors)
            batches = [rows[i : i + b] for i in range(0, len(rows), b)]
            rng.shuffle(batches)
            self.latest = (number, batches)
        return self.latest[1]

    def anchors(self, row: list[int]) -> int:
        return sum(self.sizes[i][1] for i in row)

    @property
    def computed(self) -> int:
        """Anchors that the chunks of the first epoch have room for."""
        c, most = self.args.chunk, [max(1, *map(self.anchors, rows)) for rows in self.epoch(0)]
        return self.args.batch_rows * sum(n if self.args.compile == "off" else c * -(-n // c) for n in most)

    def count(self, epochs: int) -> int:
        while len(self.lengths) < epochs:
            self.lengths.append(len(self.epoch(len(self.lengths))))
        return sum(self.lengths[:epochs])

    @property
    def per_epoch(self) -> int:
        """Micro-batches of the first one."""
        return self.count(1)

    def steps_after(self, consumed: int, per_step: int) -> int:
        return -(-(self.count(self.args.epochs) - consumed) // per_step)

    def batch(self, i: int) -> list[list[int]]:
        """The documents of each row of micro-batch i; none past the last of `epochs` epochs."""
        epoch = 0
        while self.count(epoch + 1) <= i:
            epoch += 1
            if self.args.steps is None and epoch == self.args.epochs:
                return []
        return self.epoch(epoch)[i - self.count(epoch)]

    def windows(self, consumed: int, ranks) -> Iterator[Window]:
        """This rank's part of one optimizer step after another, from micro-batch `consumed` on."""

        def read():
            for first in itertools.count(consumed + ranks.rank, self.args.accumulate * ranks.world):
                numbers = range(first, first + self.args.accumulate * ranks.world, ranks.world)
                window, unread = [self.fill(self.batch(i)) for i in numbers], self.source.unread
                if unread is not None and unread.total() >= min(NOT_ONE, len(self.documents)):
                    check_some_left(unread)
                yield window

        with closing(prefetched(read(), 1) if self.source.on_disk else read()) as windows:
            for window in windows:
                consumed += self.args.accumulate * ranks.world
                batches = [Batch(self.make, filled, len(window) == 1) for filled in window]
                yield Window(batches, documents_in(window), consumed)

    def some(self, rows: int, ranks) -> Iterator[RowChunks]:
        """This rank's share of the first `rows` rows."""
        for batch in self.epoch(0)[: max(1, rows // self.args.batch_rows)][ranks.rank :: ranks.world]:
            yield self.make(self.fill(batch))

    def fill(self, batch: list[list[int]]) -> Filled:
        documents = [[self.documents[i] for i in row] for row in batch]
        states = iter(self.source.states([d for row in documents for d in row]))
        return [[(d, found) for d in row if (found := next(states)) is not None] for row in documents]

    def used(self, window: Window) -> None:
        """Nothing to clear away."""

    def stop(self) -> None:
        """Nothing to wake up."""


def documents_in(window: list[Filled]) -> list[Document]:
    return [d for rows in window for row in rows for d, _ in row]


class FollowedRows:
    """Rows of documents as a running vLLM delivers them, each seen once; those held out are kept in memory. What was
    used since the last checkpoint when a run is killed is gone: it goes on with what arrives.

    expected: the rows that the conversations of --data would make.
    """

    def __init__(self, args, source: Source, expected: Rows):
        self.args, self.follower, self.make = args, source.follower, expected.make
        self.per_epoch, self.sizes, self.computed = expected.per_epoch, expected.sizes, expected.computed
        self.keys, self.held = {token_key(d.tokens) for d in source.held_out}, []
        self.check = partial(teacher_check, source)

    def steps_after(self, consumed: int, per_step: int) -> int:
        return max(1, -(-(self.per_epoch - consumed) // per_step))

    def arriving(self) -> Iterator[tuple[Document, tuple[Tensor, Tensor]]]:
        """Those to train on; of those held out as many as evaluation rows hold are kept, all are done with at once."""
        room = self.args.eval_rows * self.args.row_tokens
        for whole, *states in self.follower:
            document = cut_to(whole, self.args.row_tokens)
            states = tuple(x[: len(document.tokens)] for x in states)
            if token_key(document.tokens) not in self.keys:
                yield document, states
                continue
            if sum(len(d.tokens) for d, _ in self.held) + len(document.tokens) <= room:
                self.held.append((document, states))
            self.follower.done(document)

    def rows(self, arriving: Iterator) -> Iterator[list]:
        pool, more, is_first = [], True, True
        while more:
            arrived = next(arriving, None)
            more = arrived is not None
            pool += [arrived] if more else []
            if pool and (not more or sum(len(d.tokens) for d, _ in pool) >= POOL_ROWS * self.args.row_tokens):
                if is_first and self.follower.rank == 0:
                    print(self.check(pool[:SAMPLE_DOCUMENTS]), flush=True)
                is_first = False
                *full, last = self.pack(pool)
                yield from full if more else [*full, last]
                pool = last

    def pack(self, pool: list) -> list[list]:
        """Rows of the pool, the emptiest last."""
        lengths = [len(d.tokens) for d, _ in pool]
        rows = pack(lengths, self.args.row_tokens, random.Random(self.args.seed))
        rows.sort(key=lambda row: -sum(lengths[i] for i in row))
        return [[pool[i] for i in row] for row in rows]

    def windows(self, consumed: int, ranks) -> Iterator[Window]:
        """One optimizer step's rows after another; once nothing arrives any more, empty ones for good."""
        rows = self.rows(self.arriving())
        while True:
            ours = list(itertools.islice(rows, self.args.accumulate * self.args.batch_rows))
            b = self.args.batch_rows
            batches = [ours[i : i + b] for i in range(0, self.args.accumulate * b, b)]
            consumed += self.args.accumulate * ranks.world
            made = [Batch(self.make, filled, len(batches) == 1) for filled in batches]
            yield Window(made, documents_in(batches), consumed, not ours)

    def some(self, rows: int, ranks) -> Iterator[RowChunks]:
        """Rows of what this rank has held out so far."""
        for row in self.pack(self.held) if self.held else []:
            yield self.make([row])

    def used(self, window: Window) -> None:
        for document in window.documents:
            self.follower.done(document)

    def stop(self) -> None:
        self.follower.stop()


def make_rows(
    args, source: Source, draft_ids: Tensor, make_mask: bool
) -> tuple[Rows | FollowedRows, Rows | FollowedRows]:
    """The rows to train on and those to evaluate on, of the same shapes."""
    sizes = [sizes_of(documents, args.ttt_steps) for documents in (source.training, source.held_out)]
    make = Assembler(args, source, draft_ids, make_mask)
    rows = [Rows(args, source, d, s, make) for d, s in zip((source.training, source.held_out), sizes, strict=True)]
    if source.follower is None:
        return tuple(rows)
    followed = FollowedRows(args, source, rows[0])
    return followed, followed
