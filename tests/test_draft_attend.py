"""Claims about attention over anchors, its block index and its gradients, against dense ones and finite differences."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import draft_deepseek
from draft_deepseek import MadeInForward, anchor_mask, attend, attend_dense, block_index, block_mask, loss_and_gradients
from test_drafts import DRAFT_IDS, close, make_batch, make_draft, run_fast
from tests.helpers import allocated


def attend_case(dtype=torch.float64, T=11, n=2, d=6, dv=4):
    """q, k, v, documents and anchors of two rows; the second holds padding and unused anchors."""
    gen = torch.Generator().manual_seed(0)
    document = torch.tensor([[0] * 4 + [1] * (T - 4), [-1, -1] + [0] * (T - 4) + [-1, -1]])
    anchors = torch.tensor([[0, 2, 4, T - 1], [3, 5, -1, -1]])
    q, k, v = (
        torch.randn(2, n, m, w, generator=gen, dtype=dtype).requires_grad_() for m, w in ((4, d), (T, d), (T, dv))
    )
    return q, k, v, document, anchors


def attend_expected(q, k, v, document, anchors, scale):
    o, lse = torch.zeros(*q.shape[:3], v.shape[-1], dtype=q.dtype), torch.full(q.shape[:3], -math.inf, dtype=q.dtype)
    for b, a in itertools.product(*map(range, anchors.shape)):
        t = anchors[b, a].item()
        seen = [j for j in range(t + 1) if document[b, j] == document[b, t] >= 0]
        if seen:
            scores = scale * k[b, :, seen] @ q[b, :, a, :, None]
            lse[b, :, a] = scores.logsumexp(1).squeeze(-1)
            o[b, :, a] = (scores.softmax(1) * v[b, :, seen]).sum(1)
    return o, lse


@pytest.mark.parametrize("backend", [attend, attend_dense])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_attend_equals_dense_with_rows_that_see_nothing(backend, dtype, tolerance):
    """Values, and gradients through output and log-sum-exp at once."""
    *qkv, document, anchors = attend_case(dtype)
    got = backend(*qkv, anchor_mask(anchors, document), 0.3)
    want = attend_expected(*(x.detach().double().requires_grad_() for x in qkv), document, anchors, 0.3)
    assert (got[0][1, :, 2:] == 0).all() and (got[1][1, :, 2:] == -math.inf).all()
    seen = want[1] > -math.inf
    close(got[0], want[0], tolerance)
    close(got[1][seen], want[1][seen], tolerance)
    weights = torch.randn(2, 2, 4, 4, dtype=torch.float64), torch.randn(int(seen.sum()), dtype=torch.float64)

    def total(o, lse):
        return (o * weights[0]).sum() + (lse[seen] * weights[1]).sum()

    double = [x.detach().double().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(total(*attend_expected(*double, document, anchors, 0.3)), double)
    for g, e in zip(torch.autograd.grad(total(*got), qkv), expected, strict=True):
        close(g, e, tolerance)


def test_attend_passes_gradcheck_through_output_and_log_sum_exp():
    *qkv, document, anchors = attend_case(T=7)
    mask = anchor_mask(anchors, document)

    def visible(q, k, v):
        o, lse = attend(q, k, v, mask, 0.3)
        return o, lse[lse > -math.inf]

    assert torch.autograd.gradcheck(visible, qkv)
    torch.library.opcheck(draft_deepseek.attend_cpu, (*qkv, mask.first, mask.last, 0.3))


def test_attend_over_many_blocks_of_anchors_equals_dense():
    T, gen = 300, torch.Generator().manual_seed(0)
    document = torch.tensor([[0] * 130 + [1] * 150 + [-1] * 20])
    anchors = torch.cat([torch.arange(0, 280), torch.tensor([-1, -1])])[None]
    q, k, v = (torch.randn(1, 2, m, w, generator=gen).requires_grad_() for m, w in ((282, 8), (T, 8), (T, 6)))
    outputs = [f(q, k, v, anchor_mask(anchors, document), 0.4) for f in (attend, attend_dense)]
    gradients = [torch.autograd.grad(o.square().sum() + lse[..., :280].sin().sum(), (q, k, v)) for o, lse in outputs]
    used = [(o[:, :, :280], lse[..., :280]) for o, lse in outputs]
    for got, want in (*zip(*used, strict=True), *zip(*gradients, strict=True)):
        close(got, want)


def test_block_index_covers_exactly_what_the_mask_shows():
    draw = torch.Generator().manual_seed(0)
    for T, lengths in ((300, [300]), (517, [100, 200, 17, 150]), (900, [3, 600, 1, 250])):
        document = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
        document = F.pad(document, (0, T - len(document)), value=-1)[None]
        chosen = (torch.rand(T, generator=draw) < 0.6) & (document[0] >= 0)
        anchors = F.pad(chosen.nonzero()[:, 0], (0, 9), value=-1)[None]
        mask, slot = anchor_mask(anchors, document), torch.arange(T)
        sees = (slot <= anchors[..., None]) & (document[:, None] == document[0, anchors.clamp(min=0)][..., None])
        sees = (sees & (anchors >= 0)[..., None])[0]
        shown = (slot >= mask.first[0, :, None]) & (slot <= mask.last[0, :, None])
        assert torch.equal(shown, sees)
        touched, full = block_any(sees), ~block_any(~sees) & block_any(sees)
        index = block_index(mask, T)
        part, whole = decoded(index.kv_num, index.kv), decoded(index.full_kv_num, index.full_kv)
        assert torch.equal(part | whole, touched) and not (part & whole).any()
        assert not (whole & ~full).any()  # a block called full skips the mask
        assert torch.equal(decoded(index.q_num, index.q), part.T)
        assert torch.equal(decoded(index.full_q_num, index.full_q), whole.T)


def block_any(table):
    """Which blocks of 128 x 128 hold a true entry; what lies past the edge is false."""
    table = F.pad(table, (0, -table.shape[1] % 128, 0, -table.shape[0] % 128))
    return table.unflatten(1, (-1, 128)).unflatten(0, (-1, 128)).any(3).any(1)


def decoded(count, order):
    table = torch.zeros(order.shape[-2:], dtype=torch.bool)
    for i, n in enumerate(count[0, 0].tolist()):
        table[i, order[0, 0, i, :n].long()] = True
    return table


@pytest.mark.parametrize("layout", [[[100]], [[300, 90, -10]], [[400], [100, 300]], [[7] * 40] * 3, [[-140, 500, 60]]])
def test_the_block_index_is_laid_out_as_new_tensors(layout):
    """FlexAttention's backward reads q_indices as if they were, whatever their strides: dk and dv were wrong."""
    document = make_batch(layout)["document"]
    for capacity in (document.shape[1], 128, 5):
        anchors = torch.arange(capacity).clamp(max=document.shape[1] - 1).expand(len(document), -1)
        index = block_index(anchor_mask(anchors, document), document.shape[1])
        for name, x in index._asdict().items():
            assert x.dtype == torch.int32 and x.stride() == torch.empty(x.shape).stride(), name


def test_a_block_index_of_another_layout_is_refused():
    mask = anchor_mask(torch.arange(300)[None], torch.zeros(1, 300, dtype=torch.long))
    index = block_index(mask, 300)
    q, v = torch.randn(1, 2, 300, 24), torch.randn(1, 2, 300, 16)
    for name in ("q", "full_kv"):
        transposed = index._replace(**{name: getattr(index, name).mT.contiguous().mT})
        with pytest.raises(ValueError, match=f"^{name} of the block index"):
            attend(q, q, v, mask._replace(blocks=transposed), 0.1)


def test_block_masks_of_long_rows_are_small():
    T = 131_072
    mask = anchor_mask(torch.arange(T)[None], torch.zeros(1, T, dtype=torch.long))
    assert allocated(lambda: block_index(mask, T))[1] < 500e6


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@torch.no_grad()
def test_flex_attention_shows_what_dense_shows():
    """Forward alone: FlexAttention has no backward on a CPU. Widths of DeepSeek-V3, T and A no multiples of 128."""
    T, gen = 300, torch.Generator().manual_seed(0)
    document = torch.tensor([[0] * 130 + [1] * 150 + [-1] * 20])
    anchors = F.pad(torch.arange(3, 280, 2), (0, 5), value=-1)[None]
    q, k, v = (torch.randn(1, 2, m, w, generator=gen) for m, w in ((anchors.shape[1], 192), (T, 192), (T, 128)))
    plain, mask = anchor_mask(anchors, document), block_mask(anchors, document)
    for got, want in zip(attend(q, k, v, mask, 0.1), attend(q, k, v, plain, 0.1), strict=True):
        assert (got[:, :, -5:] == want[:, :, -5:]).all()  # rows that see nothing: 0 and -inf
        close(got[:, :, :-5], want[:, :, :-5])
    with pytest.raises(ValueError, match="block mask"):
        attend(q, F.pad(k, (0, 0, 0, 200)), F.pad(v, (0, 0, 0, 200)), mask, 0.1)


@pytest.mark.parametrize("kind", ["ce", "alpha", "lambda"])
def test_the_fused_loss_passes_gradcheck(kind):
    gen = torch.Generator().manual_seed(0)
    N, H, V = 9, 5, 7
    x = torch.randn(N, H, generator=gen, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(V, H, generator=gen, dtype=torch.float64, requires_grad=True)
    teacher = (2 * torch.randn(4, V, generator=gen, dtype=torch.float64)).softmax(-1)
    index = torch.tensor([0, 1, 2, 3, 0, 0, 2, 1, 3])
    scale = torch.tensor([0.2, 0.3, 0.0, 0.1, 0.5, 0.0, 0.7, 0.4, 0.1]).double()
    w = torch.full((N,), 0.35 if kind == "lambda" else 1.0).double()

    def loss(x, weight):
        per_row, _, dx, dw = loss_and_gradients(x, weight, teacher, index, scale, w, kind, 4, True)
        return MadeInForward.apply(x, weight, (scale * per_row).sum(), dx, dw)

    assert torch.autograd.gradcheck(loss, (x, weight))
    log_q = (x @ weight.T).log_softmax(-1)
    p = teacher[index]
    ce, alpha = -(p * log_q).sum(-1), torch.minimum(p, log_q.exp()).sum(-1)
    want = {"ce": ce, "alpha": -alpha.log(), "lambda": w * ce + (1 - w) * (1 - alpha)}[kind]
    close(loss(x, weight).detach(), (scale * want).sum().detach(), 1e-12)


def test_a_slot_of_no_overlap_at_all_adds_nothing_to_the_alpha_loss():
    draft, _ = make_draft("deepseek")
    with torch.no_grad():
        draft.lm_head.weight.mul_(1e5)  # q is one-hot to the last bit
    batch = make_batch([[12]], share=1.0)
    batch["last_hidden"] = batch["target_logits"] = 1e5 * F.one_hot(DRAFT_IDS[torch.arange(12)], 64)[None].float()
    batch["head"] = lambda hidden: hidden
    fast = run_fast(draft, batch, loss="alpha")
    misses = fast.metrics.step_supervised - fast.metrics.step_hits
    assert misses.sum() > 30 and fast.loss == 0
    assert all((g == 0).all() for g in fast.gradients.values())


def test_the_latent_diagonal_passes_gradcheck():
    draft, _ = make_draft("deepseek")
    attention = draft.double().model.layers[0].self_attn
    q = torch.randn(1, 3, 2, 14, dtype=torch.float64, requires_grad=True)
    own = torch.randn(3, 1, 2, 20, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(attention.latent_attention, (q, own))
