"""Claims about rows of any length, in chunks of anchors: loss and gradients are the whole row's and the oracle's."""

import random
from types import SimpleNamespace

import pytest
import torch

import draft_deepseek
from draft_deepseek import TTTLoss
from test_drafts import (
    DRAFT_IDS,
    at_anchors,
    close,
    close_gradients,
    make_batch,
    make_chunks,
    make_draft,
    oracle,
    run_fast,
)


def run_chunks(draft, batch, chunk, steps=7, denominators=None, **loss):
    """The same of `learn`, in chunks of so many anchors a row; anchors [B,all] as chunks hold them."""
    rows = make_chunks(draft, batch, steps=steps, chunk=chunk)
    if denominators is not None:
        rows.denominators = denominators
    draft.zero_grad(set_to_none=True)
    value, metrics = TTTLoss(draft, **loss).learn(rows)
    gradients = {k: p.grad.clone() for k, p in draft.named_parameters()}
    return SimpleNamespace(rows=rows, anchors=rows.anchors, loss=value, metrics=metrics, gradients=gradients)


@pytest.mark.parametrize("chunk", [pytest.param(1, marks=pytest.mark.slow), 7, 64, None])
@pytest.mark.parametrize("loss", ["ce", "alpha", "lambda"])
@pytest.mark.parametrize("variant", ["deepseek-yarn", "deepseek-3.1", "kimi"])
def test_chunks_of_anchors_equal_the_oracle(variant, loss, chunk):
    draft, cfg = make_draft(variant)
    batch = make_batch([[20, 30, -3], [-4, 12, 1, 36], [-53]], share=0.5)
    want = oracle(draft.state_dict(), cfg, batch, DRAFT_IDS, loss=loss)
    got = run_chunks(draft, batch, chunk, loss=loss)
    used = got.anchors >= 0
    assert torch.equal(got.metrics.hit, at_anchors(want.hit, got.anchors) & used) and got.metrics.hit.any()
    close(got.loss, want.loss)
    close(got.metrics.step_loss, want.step_loss)
    assert got.metrics.step_valid.tolist() == want.step_valid.tolist()
    assert got.metrics.step_prefix_hits.tolist() == want.step_prefix_hits.tolist()
    close_gradients(got.gradients, want.gradients, 2e-5)


@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi-3.1"])
def test_chunks_in_float64_equal_the_oracle_tightly(variant):
    draft, cfg = make_draft(variant)
    draft.double()
    batch = make_batch([[9, 21], [-4, 26]], share=0.6)
    batch["target_logits"] = batch["target_logits"].double()
    batch |= {"features": batch["features"].double(), "last_hidden": batch["target_logits"], "head": lambda x: x}
    want = oracle(draft.state_dict(), cfg, batch, DRAFT_IDS)
    got = run_chunks(draft, batch, 5)
    close(got.loss, want.loss, 1e-7)  # denominators, step weights and angles are float32
    close_gradients(got.gradients, want.gradients, 1e-6)
    whole = run_chunks(draft, batch, None)
    close_gradients(got.gradients, whole.gradients, 1e-12)


def test_random_rows_in_random_chunks_and_pieces_equal_the_whole_row(monkeypatch):
    draw = random.Random(0)
    for seed in range(12):
        draft, _ = make_draft(draw.choice(["deepseek-yarn", "deepseek-norm-output", "kimi", "kimi-no-q-lora"]), seed)
        rows = [[draw.randint(1, 12) * draw.choice([1, 1, 1, -1]) for _ in range(3)] for _ in range(draw.randint(1, 3))]
        longest = max(sum(map(abs, row)) for row in rows)
        layout = [[*row, sum(map(abs, row)) - longest] for row in rows]
        batch, steps = make_batch(layout, seed, draw.choice([0.0, 0.2, 0.9])), draw.randint(1, 7)
        monkeypatch.setattr(draft_deepseek, "PIECE", draw.randint(1, 40))  # of slots whose keys are made at a time
        whole, parts = run_fast(draft, batch, steps), run_chunks(draft, batch, draw.randint(1, 9), steps)
        close(parts.loss, whole.loss, 1e-5, scale=1e-6)
        close_gradients(parts.gradients, whole.gradients)
        for name in ("step_hits", "step_supervised", "step_valid", "step_prefix_hits"):
            assert torch.equal(getattr(parts.metrics, name), getattr(whole.metrics, name)), name


def test_without_gradients_chunks_evaluate_and_gradients_add_up():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[30]], share=0.8)
    want, loss, rows = run_fast(draft, batch), TTTLoss(draft), make_chunks(draft, batch, chunk=4)
    draft.zero_grad(set_to_none=True)
    with torch.no_grad():
        value, metrics = loss.learn(rows)
    assert all(p.grad is None for p in draft.parameters())
    close(value, want.loss, 1e-6)
    assert torch.equal(metrics.hit[..., : want.metrics.hit.shape[2]], want.metrics.hit)
    for _ in range(2):  # the same leaves, zeroed in between
        loss.learn(rows)
    twice = {k: p.grad / 2 for k, p in draft.named_parameters()}
    close_gradients(twice, want.gradients)


def test_even_chunks_are_as_many_and_as_small_as_they_can_be():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[30, 23]], share=0.8)
    whole = run_fast(draft, batch)
    most = int((whole.rows.anchors >= 0).sum())
    for chunk in (1, 5, 7, most - 1, most, 100):
        rows, uneven = (make_chunks(draft, batch, chunk=chunk, even=even) for even in (True, False))
        assert len(rows) == len(uneven) and 0 <= len(rows) * rows.chunk - most < len(rows)
        draft.zero_grad(set_to_none=True)
        close(TTTLoss(draft).learn(rows)[0], whole.loss)
        close_gradients({k: p.grad for k, p in draft.named_parameters()}, whole.gradients)
    assert len(make_chunks(draft, make_batch([[5]], share=0.0), chunk=4, even=True)) == 1


def test_a_chunk_holds_the_teacher_of_its_own_tokens_alone():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[25, 40], [-5, 60]], share=0.7)
    p, rows = batch["target_logits"][..., DRAFT_IDS].softmax(-1), make_chunks(draft, batch, steps=5, chunk=8)
    assert len(rows) > 4
    for chunk in rows:
        assert chunk.teacher.shape == (2, 8 + 4, 16) and chunk.anchors.shape == (2, 8)
        for x in (chunk.anchors, chunk.teacher_index, chunk.valid):
            assert x.stride() == torch.empty(x.shape).stride()  # else each number of chunks is a graph of its own
        for s, b, i in (chunk.teacher_index >= 0).nonzero().tolist():
            close(chunk.teacher[b, chunk.teacher_index[s, b, i]], p[b, chunk.anchors[b, i] + 1 + s], 1e-6)


def test_many_chunks_in_bf16_add_their_gradients_in_float32():
    draft, _ = make_draft("deepseek-yarn")
    batch = make_batch([[130]], share=1.0)
    with torch.autocast("cpu", torch.bfloat16):
        few, many = (run_chunks(draft, batch, chunk) for chunk in (None, 2))
    assert len(many.rows) > 60
    close(many.loss, few.loss, 1e-3)
    for name, want in few.gradients.items():
        error = (many.gradients[name] - want).norm() / want.norm()
        assert error < 1e-2, f"{name} {error:.1e}"
