"""Claims about packing documents into rows."""

import random

import torch

from data.packing import best_fit, lay_out, pack


def test_rows_hold_every_document_once_and_are_full():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(3000, generator=generator).mul(0.8).add(5.5).exp().clamp(8, 2048).int().tolist()
    rows = pack(lengths, 2048, random.Random(0))
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert rows == pack(lengths, 2048, random.Random(0)) != pack(lengths, 2048, random.Random(1))
    tokens = [sum(lengths[i] for i in row) for row in rows]
    assert max(tokens) <= 2048 and sum(tokens) >= 0.99 * 2048 * len(rows)
    assert best_fit([0, 1, 2], [6, 5, 4], 10) == [[0, 2], [1]]


def test_a_row_without_documents_is_padding():
    out = lay_out([[]], 8, (torch.zeros(0, 12), torch.zeros(0, 4)))
    assert (out["document"] == -1).all() and not out["loss_mask"].any() and out["features"].shape == (1, 8, 12)
