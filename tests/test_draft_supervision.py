"""Claims about supervision (PITFALLS 1, 7-11): which slots learn, from what, and that documents stay apart."""

import pytest
import torch

from test_drafts import DRAFT_IDS, close, close_gradients, make_batch, make_draft, make_rows, run_fast, with_tensors
from tests.helpers import reachable


def test_step_s_of_an_assistant_span_supervises_slots_a_1_s_to_b_1_s():
    a, b = 9, 14
    draft, _ = make_draft("deepseek")
    batch = make_batch([[20]])
    batch["loss_mask"] = ((torch.arange(20) >= a) & (torch.arange(20) <= b)).long()[None]
    rows = make_rows(draft, batch)
    assert rows.anchors[0].tolist() == list(range(a - 7, b))
    for s in range(7):
        assert rows.anchors[0, rows.valid[s, 0]].tolist() == list(range(a - 1 - s, b - s))


def test_the_teacher_is_the_targets_softmax_at_the_token_fed():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[9, 11], [-3, 17]])
    rows = make_rows(draft, batch)
    p = batch["target_logits"].double()[..., DRAFT_IDS].softmax(-1)
    for s, b, i in (rows.teacher_index >= 0).nonzero().tolist():
        close(rows.teacher[b, rows.teacher_index[s, b, i]], p[b, rows.anchors[b, i] + 1 + s], 1e-6)
    assert rows.teacher.dtype == torch.float32 and rows.teacher.shape == (2, rows.anchors.shape[1] + 6, 16)


def test_what_the_draft_predicts_changes_no_token_that_it_is_fed():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[15]])
    before = run_fast(draft, batch).hidden
    with torch.no_grad():
        draft.lm_head.weight.neg_()
    assert torch.equal(run_fast(draft, batch).hidden, before)


@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_packed_documents_equal_separate_runs(variant):
    lengths, (draft, _) = (5, 12, 9), make_draft(variant)
    packed = make_batch([list(lengths)], share=1.0)
    whole = run_fast(draft, packed)
    counts = [sum(max(0, n - 1 - s) for n in lengths) for s in range(7)]
    assert whole.rows.valid.sum((1, 2)).tolist() == counts
    denominators, total, loss, hidden = whole.rows.denominators, None, 0.0, []
    for i, piece in enumerate(torch.arange(26).split(lengths)):
        alone = with_tensors(lambda x, piece=piece: x[:, piece], packed)
        assert (alone["document"] == i).all()
        part = run_fast(draft, alone, denominators=denominators)
        loss, hidden = loss + part.loss, hidden + [reachable(part)]
        total = {k: g + (total[k] if total else 0) for k, g in part.gradients.items()}
    close(reachable(whole), torch.cat(hidden), 1e-5)
    close(loss, whole.loss, 1e-5)
    close_gradients(total, whole.gradients, 1e-5)


@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_a_token_of_one_document_changes_no_bit_of_another(variant):
    draft, _ = make_draft(variant)
    batch = make_batch([[30, 35], [65]], share=1.0)
    before = run_fast(draft, batch)
    batch["tokens"][0, 4:30] = (batch["tokens"][0, 4:30] + 7) % 64
    batch["features"][0, :30] += 1.0
    after = run_fast(draft, batch)
    assert torch.equal(before.rows.anchors, after.rows.anchors)
    mine = before.rows.anchors[0] < 30
    assert torch.equal(after.hidden[:, 0, ~mine], before.hidden[:, 0, ~mine])
    assert torch.equal(after.hidden[:, 1], before.hidden[:, 1])
    assert (after.hidden[:, 0, mine] - before.hidden[:, 0, mine]).abs().amax(
        (0, 2)
    ).min() > 1e-2  # each of its own moved


@pytest.mark.parametrize("loss", ["ce", "alpha", "lambda"])
def test_nothing_supervised_gives_zero_loss_and_finite_zero_gradients(loss):
    draft, _ = make_draft("deepseek")
    for layout in ([[12], [12]], [[-12], [-12]], [[1, 1, 1]], [[1]]):
        fast = run_fast(draft, make_batch(layout, share=0.0 if len(layout[0]) == 1 else 1.0), loss=loss)
        assert fast.loss == 0 and fast.metrics.accuracy == 0 and fast.metrics.valid_tokens == 0
        assert all((g == 0).all() for g in fast.gradients.values())  # NaN would fail


def test_an_empty_step_adds_zero_and_keeps_its_weight():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[3]], share=1.0)
    batch["last_hidden"], batch["head"] = batch["target_logits"], lambda hidden: hidden
    batch["target_logits"][..., DRAFT_IDS[3]] = 99.0
    fast = run_fast(draft, batch)
    assert fast.metrics.step_supervised.tolist() == [2, 1, 0, 0, 0, 0, 0] and (fast.metrics.step_loss[2:] == 0).all()
    weights = 0.8 ** torch.arange(7.0)
    close(fast.loss, (weights * fast.metrics.step_loss).sum() / weights.sum(), 1e-6)


def test_padding_anywhere_changes_nothing():
    draft, _ = make_draft("deepseek-yarn")
    plain = make_batch([[17]], share=0.7)
    want = run_fast(draft, plain)
    garbage = make_batch([[-30]], seed=1)
    for before, after in ((5, 0), (0, 5), (3, 4)):
        padded = with_tensors(
            lambda x, pad, b=before, a=after: torch.cat(
                [torch.cat([pad[:, :b], x, pad[:, :a]], 1), pad[:, : 17 + a + b]]
            ),
            plain,
            garbage,
        )
        got = run_fast(draft, padded)  # a whole row of padding beside it
        assert torch.equal(got.rows.anchors[0], want.rows.anchors[0] + before) and (got.rows.anchors[1] == -1).all()
        close(reachable(got), reachable(want), 1e-6)
        close(got.loss, want.loss, 1e-6)
        close_gradients(got.gradients, want.gradients, 2e-6)
