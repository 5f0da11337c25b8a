"""Packing: which documents share a row, and how they lie in it."""

import random
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from data.documents import Document

PACKING = 2  # of the order that `pack` gives, in which checkpoints count


def anchors_of(loss_mask: Tensor, steps: int) -> int:
    """Slots of one document [L] that are valid at one of `steps` steps: those within reach of a learned token."""
    learned = F.pad(loss_mask[1:].float(), (0, steps))
    return int(learned.unfold(0, steps, 1).amax(1).sum()) if len(loss_mask) > 1 else 0


def sizes_of(documents: Iterable[Document], steps: int) -> list[tuple[int, int]]:
    """(tokens, anchors) of every document."""
    return [(len(d.tokens), anchors_of(d.loss_mask, steps)) for d in documents]


def pack(lengths: Sequence[int], row_tokens: int, rng: random.Random) -> list[list[int]]:
    """Indices of documents of so many tokens, in rows of at most `row_tokens`.

    Best fit: in pools of 1024 shuffled documents the longest goes first, into the row that it leaves fullest. The rows
    are shuffled; the same `rng` state gives the same rows.
    """
    order, rows = list(range(len(lengths))), []
    rng.shuffle(order)
    for start in range(0, len(order), 1024):
        rows += best_fit(order[start : start + 1024], lengths, row_tokens)
    rng.shuffle(rows)
    return rows


def best_fit(pool: list[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    rows, left = [], []  # left: free tokens of each row
    for i in sorted(pool, key=lambda i: -lengths[i]):
        fitting = [(free, r) for r, free in enumerate(left) if free >= lengths[i]]
        if fitting:
            _, r = min(fitting)
            rows[r].append(i)
            left[r] -= lengths[i]
        else:
            rows.append([i])
            left.append(row_tokens - lengths[i])
    return rows


def lay_out(rows: list[list[tuple]], row_tokens: int, like: tuple[Tensor, Tensor]) -> dict:
    """Rows of (tokens [L], loss_mask [L], features [L,n_aux*H], last_hidden [L,W]) as build_rows wants them, [B,T,...].

    like: features and last hidden states of the widths, dtypes and devices wanted, of no tokens at all. Documents are
    numbered from 0 and positions restart with each; behind the last lies padding (document -1), and a row without
    documents is nothing else.
    """
    b = len(rows)
    features, last_hidden = (x.new_zeros(b, row_tokens, x.shape[-1]) for x in like)
    out = {
        "tokens": torch.zeros(b, row_tokens, dtype=torch.long),
        "loss_mask": torch.zeros(b, row_tokens, dtype=torch.bool),
        "document": torch.full((b, row_tokens), -1),
        "position": torch.zeros(b, row_tokens, dtype=torch.long),
        "features": features,
        "last_hidden": last_hidden,
    }
    for r, row in enumerate(rows):
        begin = 0
        for number, (tokens, loss_mask, features, last_hidden) in enumerate(row):
            at = slice(begin, begin := begin + len(tokens))
            out["tokens"][r, at], out["loss_mask"][r, at] = tokens, loss_mask
            out["features"][r, at], out["last_hidden"][r, at] = features, last_hidden
            out["document"][r, at], out["position"][r, at] = number, torch.arange(len(tokens))
    return out
