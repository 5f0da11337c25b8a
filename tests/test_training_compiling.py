"""Claims about the two static graphs: compiled equals eager, whatever the documents and the number of chunks."""

import copy

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import draft_deepseek
from draft_deepseek import TTTLoss, block_mask
from measuring import step
from serving.slots import judge
from test_drafts import make_batch, make_chunks, make_draft, make_rows
from training import compiling


def run(loss, rows):
    """The loss, and the gradient of every parameter."""
    loss.draft.zero_grad(set_to_none=True)
    value, metrics = loss(rows)
    value.backward()
    return value.detach(), metrics, {k: p.grad.clone() for k, p in loss.draft.named_parameters() if p.grad is not None}


def same(got, want, tolerance=1e-5):
    assert (got[0] - want[0]).abs() <= tolerance * want[0].abs()
    assert got[2].keys() == want[2].keys()
    rounding = 1e-6 * max(gradient.abs().max() for gradient in want[2].values())  # all that a gradient of zero shows
    for name, gradient in want[2].items():
        assert (got[2][name] - gradient).abs().max() <= tolerance * gradient.abs().max() + rounding, name
    for field in want[1]._fields[:-2]:  # `hit` has places for anchors that none of the rows has
        value = getattr(want[1], field)
        assert torch.allclose(getattr(got[1], field).float(), value.float(), atol=tolerance), field


def learn(loss, chunks):
    loss.draft.zero_grad(set_to_none=True)
    value, metrics = loss.learn(chunks)
    return value, metrics, {k: p.grad.clone() for k, p in loss.draft.named_parameters() if p.grad is not None}


class Counting:
    """The backend aot_eager, and how many graphs it was given."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, inputs):
        self.graphs += 1
        return aot_eager(graph, inputs)


@pytest.mark.parametrize("variant", ["deepseek-yarn", pytest.param("kimi-3.1", marks=pytest.mark.slow)])
def test_compiled_equals_eager_packed_and_not(variant):
    """The whole loss of all anchors as one graph, as README's snippet does."""
    draft, _ = make_draft(variant)
    eager, compiled = TTTLoss(draft), TTTLoss(copy.deepcopy(draft))
    torch._dynamo.reset()
    compiled.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    for layout in ([[20]], [[7, 6, -2, 5]]):
        rows = make_rows(draft, make_batch(layout, share=0.6), steps=3, anchors=16)
        same(run(compiled, rows), run(eager, rows))


@pytest.mark.slow
def test_fifty_batches_of_one_to_seven_chunks_are_a_graph_each_and_another_without_gradients():
    """Keys and chunk are two graphs; their gradients, in chunks and compiled, are those of the whole row, eager."""
    draft, _ = make_draft("deepseek")
    torch._dynamo.reset()
    backend, generator, numbers = Counting(), torch.Generator().manual_seed(0), set()
    loss, eager = TTTLoss(draft), TTTLoss(copy.deepcopy(draft))
    compiling.compile_loss(loss, None, backend=backend)
    for i in range(50):
        first, share = int(torch.randint(1, 27, (), generator=generator)), float(torch.rand((), generator=generator))
        batch = make_batch([[first, 27 - first, -2]], seed=i, share=share * (i % 3 > 0) + 0.04)
        chunks = make_chunks(draft, batch, steps=2, chunk=4)
        same(learn(loss, chunks), run(eager, make_rows(draft, batch, steps=2)))
        numbers.add(len(chunks))
    assert numbers == set(range(1, 8)) and backend.graphs == 3  # keys without gradients and with them, chunk
    with torch.no_grad():
        for i in range(10):
            loss.learn(make_chunks(draft, make_batch([[9, 15, -5]], seed=i, share=i / 10), steps=2, chunk=4))
    assert backend.graphs == 4
    for i in range(10):
        chunks = make_chunks(draft, make_batch([[9, 15, -5]], seed=i, share=i / 10), steps=2, chunk=4)
        for got, want in zip(judge(loss, chunks), judge(eager, chunks), strict=True):
            assert torch.allclose(got.float(), want.float(), atol=1e-5)
    assert backend.graphs == 5  # the steps without the loss


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_inductor_equals_eager(variant):
    draft, _ = make_draft(variant)
    eager, compiled = TTTLoss(draft), TTTLoss(copy.deepcopy(draft))
    torch._dynamo.reset()
    compiling.compile_loss(compiled, "default")
    for layout in ([[20]], [[7, 6, -2, 5]]):
        batch = make_batch(layout, share=0.6)
        same(learn(compiled, make_chunks(draft, batch, steps=3, chunk=8)), run(eager, make_rows(draft, batch, steps=3)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["deepseek-v3", "kimi-k3"])
def test_bf16_compute_costs_little_accuracy_at_the_mid_size(kind):
    cell = step.Cell(draft=kind, slots=512)
    draft = step.make_draft(cell)
    loss, (rows,) = TTTLoss(draft), step.Ours(draft).prepare(step.make_batch(cell, draft))
    exact = learn(loss, rows)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = learn(loss, rows)
    assert (rounded[0] - exact[0]).abs() <= 1e-2 * exact[0]
    for name, gradient in exact[2].items():
        assert torch.cosine_similarity(rounded[2][name].flatten(), gradient.flatten(), 0) > 0.999, name


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_graphs_read_a_mask_that_is_given_and_make_none(monkeypatch):
    """Inductor compiles no FlexAttention for CUDA, in a graph without a backward, whose mask the graph made."""
    draft, _ = make_draft("deepseek", qk_nope_head_dim=24, v_head_dim=16)
    loss, rows = TTTLoss(draft), make_rows(draft, make_batch([[7, 6, -2, 5]], share=0.6), steps=3)
    with torch.no_grad():
        want, _ = loss(rows)
        given = rows._replace(block_mask=block_mask(rows.anchors, rows.document))
        monkeypatch.setattr(draft_deepseek, "anchor_mask", None)
        assert torch.allclose(loss(given)[0], want, rtol=1e-5)


# --------------------------------------------------------------------------------------------- CUDA graphs (need a GPU)

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def on_cuda(batch):
    return {k: v.cuda() if k in ("features", "last_hidden") else v for k, v in batch.items()}


@cuda
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_captured_chunks_replay_new_documents_as_eager_and_accumulate(variant):
    """max-autotune with CUDA graphs against the eager dense fallback: four batches one by one, then summed in .grad."""
    draft = make_draft(variant)[0].cuda()
    eager, captured = TTTLoss(draft), TTTLoss(copy.deepcopy(draft))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiling.compile_loss(captured, "max-autotune")
    layouts = [[200, 50, -6]], [[256]], [[1, 100, 155]], [[-100, 156]]
    batches = [on_cuda(make_batch(x, i, share=0.7)) for i, x in enumerate(layouts)]
    for batch in batches * 2:
        whole = make_rows(draft, batch, steps=3)
        assert whole.block_mask is not None
        chunks = make_chunks(draft, batch, steps=3, chunk=128)
        same(learn(captured, chunks), run(eager, whole._replace(block_mask=None)), tolerance=5e-3)
    for loss in (eager, captured):
        for p in loss.draft.parameters():
            p.grad = torch.zeros_like(p)
    for batch in batches:
        captured.learn(make_chunks(draft, batch, steps=3, chunk=128))
        eager(make_rows(draft, batch, steps=3)._replace(block_mask=None))[0].backward()
    for (name, p), q in zip(eager.draft.named_parameters(), captured.draft.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 5e-3 * p.grad.abs().max(), name
    assert torch._dynamo.utils.counters["inductor"]["cudagraph_skips"] == 0


@cuda
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_compiled_evaluation_sees_what_eager_sees(variant):
    draft = make_draft(variant)[0].cuda()
    eager, compiled = TTTLoss(draft), TTTLoss(copy.deepcopy(draft))
    torch._dynamo.reset()
    compiling.compile_loss(compiled, "max-autotune")
    for i, layout in enumerate(([[200, 50, -6]], [[256]])):
        chunks = make_chunks(draft, on_cuda(make_batch(layout, i, share=0.7)), steps=3, chunk=128)
        for got, want in zip(judge(compiled, chunks), judge(eager, chunks), strict=True):
            assert (got.float() - want.float()).abs().mean() < 1e-2
        with torch.no_grad():
            assert (compiled.learn(chunks)[0] - eager.learn(chunks)[0]).abs() < 1e-2


@cuda
def test_block_masks_at_131072_tokens_take_little_memory():
    document = torch.arange(131072, device="cuda")[None] // 5000
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    block_mask(torch.arange(131072, device="cuda")[None], document)
    assert torch.cuda.max_memory_allocated() - before < 500e6
