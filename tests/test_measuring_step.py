"""Claims about timing a step: what is compared is the same mathematics, and what is measured is what was asked for."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_deepseek import valid_slots
from measuring import step
from measuring.step import Baseline, Ours, make_batch
from tests.helpers import TINY_CELL


def sharp_draft(cell):
    """Weights large enough that masks, angles and the order of steps show in every gradient."""
    draft = step.make_draft(cell)
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.3 * torch.randn_like(p))
    return draft


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", step.DRAFTS)
def test_the_baseline_has_our_loss_and_gradients(name, packed):
    cell = replace(TINY_CELL, draft=name, packed=packed)
    draft = sharp_draft(cell)
    batch = make_batch(cell, draft)
    want, got = (step.gradients(cell, draft, batch, one) for one in (Baseline(draft), Ours(draft, chunk=20)))
    assert want.keys() == got.keys() and len(want) > 15
    for key, gradient in want.items():
        assert gradient.abs().max() > 0, key
        assert (gradient - got[key]).abs().max() <= 2e-5 * gradient.abs().max(), key


@pytest.mark.parametrize(
    "defect", [lambda b: b._replace(position=b.position * 2), lambda b: b._replace(document=b.document * 0)]
)
def test_a_disagreement_is_found_before_anything_is_timed(defect):
    draft = sharp_draft(TINY_CELL)
    batch, ours = make_batch(TINY_CELL, draft), Ours(draft, chunk=20)
    impls = {"baseline": Baseline(draft), "ours eager": ours}
    step.check(TINY_CELL, draft, batch, impls)
    prepare = ours.prepare
    ours.prepare = lambda batch: prepare(defect(batch))
    with pytest.raises(step.Disagreement, match=r"ours eager differs from baseline: .*q_b_proj"):
        step.check(TINY_CELL, draft, batch, impls)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_answers_end_their_documents_and_make_up_the_share(share):
    cell = replace(TINY_CELL, slots=1024, share=share)
    batch = make_batch(cell, step.make_draft(cell))
    assert batch.document.unique().numel() > 3
    assert abs(batch.loss_mask.float().mean() - share) < 0.02
    for number in batch.document.unique():
        mask = batch.loss_mask[batch.document == number]
        assert (mask.diff() >= 0).all() and mask[-1] == 1
    assert valid_slots(batch.document, batch.loss_mask, 1).sum() <= batch.loss_mask.sum()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("reset", [True, False])
def test_peak_memory_sees_what_was_freed_again(monkeypatch, reset):
    if not reset:  # where the kernel's mark may not be reset, a thread samples

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(Path, "write_text", refuse)
    with step.PeakMemory("cpu") as peak:
        x = torch.ones(16 << 20)
        x.add_(1)
        del x
    assert 60e6 < peak.growth < 120e6
