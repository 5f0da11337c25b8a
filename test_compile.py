"""Claims about the one static graph: compiled equals eager, whatever the documents, and compiles once per capacity."""

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

from draft_deepseek import TTTLoss
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


@pytest.mark.parametrize("recompute", ["none", "step"])
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi-3.1"])
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
