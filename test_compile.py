"""Claims about the one static graph: compiled equals eager, whatever the documents, and compiles once per capacity."""

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import bench
from draft_deepseek import TTTLoss, anchor_mask, block_index
from test_drafts import make_batch, make_draft, make_rows


def run(loss, rows):
    """The loss, and the gradient of every parameter."""
    loss.draft.zero_grad(set_to_none=True)
    value, metrics = loss(rows)
    value.backward()
    return value.detach(), metrics, {k: p.grad.clone() for k, p in loss.draft.named_parameters() if p.grad is not None}


def same(got, want, tolerance=1e-5):
    assert (got[0] - want[0]).abs() <= tolerance * want[0].abs()
    assert got[2].keys() == want[2].keys()
    for name, gradient in want[2].items():
        assert (got[2][name] - gradient).abs().max() <= tolerance * gradient.abs().max().clamp(min=1e-8), name
    for field, value in want[1]._asdict().items():
        assert torch.allclose(getattr(got[1], field).float(), value.float(), atol=tolerance), field


class Counting:
    """The backend aot_eager, and how many graphs it was given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


CROSSED = [("deepseek-yarn", "step"), ("kimi-3.1", "none")]  # a trace takes seconds
LEFT = [("deepseek-yarn", "none"), ("kimi-3.1", "step")]


@pytest.mark.parametrize(
    ("variant", "recompute"), [*CROSSED, *(pytest.param(*x, marks=pytest.mark.slow) for x in LEFT)]
)
def test_compiled_equals_eager_packed_and_not(variant, recompute):
    draft, _ = make_draft(variant)
    eager = TTTLoss(draft, steps=3, recompute=recompute)
    compiled = TTTLoss(copy.deepcopy(draft), steps=3, recompute=recompute)
    torch._dynamo.reset()
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for layout in ([[20]], [[7, 6, -2, 5]]):
        rows = make_rows(draft, make_batch(layout, share=0.6), steps=3, anchors=16)
        same(run(compiled, rows), run(eager, rows))


def test_fifty_batches_in_two_capacities_are_two_graphs_and_two_more_without_gradients():
    draft, _ = make_draft("deepseek")
    torch._dynamo.reset()
    backend = Counting()
    loss, eager = TTTLoss(draft, steps=2), TTTLoss(copy.deepcopy(draft), steps=2)
    loss.compile(backend=backend, fullgraph=True, dynamic=False)
    generator = torch.Generator().manual_seed(0)
    for i in range(50):
        first = int(torch.randint(1, 20, (), generator=generator))
        layout = [[first, 20 - first, -4]]
        rows = make_rows(
            draft,
            make_batch(layout, seed=i, share=float(torch.rand((), generator=generator))),
            steps=2,
            anchors=24 if i % 2 else 20,
        )
        same(run(loss, rows), run(eager, rows))
    assert backend.graphs == 2
    with torch.no_grad():
        for i in range(10):
            rows = make_rows(draft, make_batch([[9, 15]], seed=i), steps=2, anchors=24 if i % 2 else 23)
            loss(rows)
    assert backend.graphs == 4


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_inductor_equals_eager(variant):
    draft, _ = make_draft(variant)
    eager, compiled = TTTLoss(draft, steps=3), TTTLoss(copy.deepcopy(draft), steps=3)
    torch._dynamo.reset()
    compiled.compile(fullgraph=True, dynamic=False)
    for layout in ([[20]], [[7, 6, -2, 5]]):
        rows = make_rows(draft, make_batch(layout, share=0.6), steps=3, anchors=16)
        same(run(compiled, rows), run(eager, rows))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek-v3", "kimi-k3"])
def test_bf16_compute_costs_little_accuracy_at_the_mid_size(kind):
    cell = bench.Cell(draft=kind, slots=512)
    draft = bench.make_draft(cell)
    loss, (rows,) = TTTLoss(draft), bench.Ours(draft).prepare(bench.make_batch(cell, draft))
    exact = run(loss, rows)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = run(loss, rows)
    assert (rounded[0] - exact[0]).abs() <= 1e-2 * exact[0]
    for name, gradient in exact[2].items():
        assert torch.cosine_similarity(rounded[2][name].flatten(), gradient.flatten(), 0) > 0.999, name


# --------------------------------------------------------------------------------------------- CUDA graphs (need a GPU)

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def cuda_rows(draft, batch, **options):
    made = make_rows(
        draft, {k: v.cuda() if k in ("features", "last_hidden") else v for k, v in batch.items()}, **options
    )
    assert made.block_mask is not None
    return made


@cuda
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_captured_graphs_replay_new_documents_as_eager_and_accumulate(variant):
    """max-autotune with CUDA graphs against the eager dense fallback: four batches one by one, then summed in .grad."""
    draft = make_draft(variant)[0].cuda()
    eager, captured = TTTLoss(draft, steps=3), TTTLoss(copy.deepcopy(draft), steps=3)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    captured.compile(fullgraph=True, dynamic=False, mode="max-autotune")
    layouts = [[200, 50, -6]], [[256]], [[1, 100, 155]], [[-100, 156]]
    batches = [cuda_rows(draft, make_batch(x, i, share=0.7), steps=3, anchors=256) for i, x in enumerate(layouts)]
    for rows in batches * 2:
        torch.compiler.cudagraph_mark_step_begin()
        same(run(captured, rows), run(eager, rows._replace(block_mask=None)), tolerance=5e-3)
    for loss in (eager, captured):
        for p in loss.draft.parameters():
            p.grad = torch.zeros_like(p)
        for rows in batches:
            torch.compiler.cudagraph_mark_step_begin()
            loss(rows if loss is captured else rows._replace(block_mask=None))[0].backward()
    for (name, p), q in zip(eager.draft.named_parameters(), captured.draft.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 5e-3 * p.grad.abs().max(), name
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@cuda
def test_block_masks_at_131072_tokens_take_little_memory():
    document = torch.arange(131072, device="cuda")[None] // 5000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block_index(anchor_mask(torch.arange(131072, device="cuda")[None], document), 131072)
    assert torch.cuda.max_memory_allocated() - before < 500e6
