"""Claims about what the drafts are made of: RoPE, attention, losses, configs, vocabularies, caches, dtypes and memory.

Expectations are closed forms, transformers' own DeepSeek-V3, finite differences, or the oracle of test_drafts.py.
"""

import itertools
import math
import os
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import distributed
from transformers import DeepseekV3Config, DynamicCache
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

import draft_deepseek
from draft_deepseek import (
    DeepseekV3Eagle3DraftModel,
    Eagle3DeepseekMLAAttention,
    Eagle3MLAConfig,
    MadeInForward,
    TTTCache,
    TTTLoss,
    anchor_mask,
    attend,
    attend_dense,
    block_index,
    loss_and_gradients,
)
from draft_kimi_k3 import KimiK3Eagle3Config, KimiK3Eagle3DraftModel, KimiK3Eagle3MLAAttention
from test_drafts import (
    DRAFT_IDS,
    SIZES,
    YARN,
    at_anchors,
    build_draft,
    close,
    close_gradients,
    config_of,
    left,
    make_batch,
    make_draft,
    make_rows,
    oracle,
    oracle_masks,
    reachable,
    run_fast,
)

os.environ["HF_HUB_OFFLINE"] = "1"
DEEPSEEK_YARN = YARN | {"original_max_position_embeddings": 4096}


# -------------------------------------------------------------------------------------------- RoPE (PITFALLS 3, 4, 5)


def attention_of(cls=Eagle3DeepseekMLAAttention, fuse_input=True, **keys):
    config = (Eagle3MLAConfig if cls is Eagle3DeepseekMLAAttention else KimiK3Eagle3Config).from_any(SIZES | keys)
    return cls(config, fuse_input=fuse_input)


def turned(attention, position):
    """The complex number by which each pair (0,1), (2,3), ... of the rope slice is multiplied at a position."""
    x = torch.tensor([1.0, 0.0]).repeat(attention.config.qk_rope_head_dim // 2)[None, None]
    return torch.view_as_complex(attention.rotate(x, torch.tensor([[position]])).reshape(-1, 2).double())


FORMS = {
    "top level": {"rope_theta": 5e6},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "both": {"rope_theta": 5e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "top level yarn": {"rope_theta": 5e6, "rope_scaling": DEEPSEEK_YARN},
    "yarn of old": {"rope_theta": 5e6, "rope_scaling": {k: v for k, v in DEEPSEEK_YARN.items() if k != "rope_type"}},
    "nested yarn": {"rope_parameters": DEEPSEEK_YARN | {"rope_theta": 5e6}},
    "yarn in both": {
        "rope_theta": 5e6,
        "rope_scaling": DEEPSEEK_YARN,
        "rope_parameters": DEEPSEEK_YARN | {"rope_theta": 5e6},
    },
}


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_theta_and_yarn_arrive_from_every_form_of_config(form, as_object):
    keys = SIZES | FORMS[form] | {"qk_rope_head_dim": 64}
    yarn = "yarn" in form
    source = keys
    if as_object:
        own = ("target_hidden_size", "draft_vocab_size", "num_aux_hidden_states")
        source = DeepseekV3Config(**deepcopy({k: v for k, v in keys.items() if k not in own}))  # it writes into ours
    config = Eagle3MLAConfig.from_any(source)
    attention = Eagle3DeepseekMLAAttention(config)
    angle = turned(attention, 1).angle()
    want = torch.tensor([5e6 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    if yarn:  # the fastest pairs keep their pace, the slowest are 40 times slower
        close(angle[:2], want[:2], 1e-6)
        close(angle[-4:], want[-4:] / 40, 1e-6)
    else:
        close(angle[1], want[1], 1e-6)
        close(angle / want, torch.ones(32), 1e-5)
    close(
        torch.tensor(attention.scaling), torch.tensor(70**-0.5 * ((0.1 * math.log(40) + 1) ** 2 if yarn else 1)), 1e-6
    )
    again = Eagle3MLAConfig.from_any(config.to_dict())  # and from its own dict and JSON
    assert again.rope_parameters == config.rope_parameters


@pytest.mark.parametrize("nested", [{"rope_theta": 5e6}, {"rope_theta": 5e6, "rope_type": "default"}])
def test_yarn_beside_nested_parameters_is_used_or_refused_but_not_dropped(nested):
    keys = {"rope_parameters": nested, "rope_scaling": DEEPSEEK_YARN, "qk_rope_head_dim": 64}
    try:
        attention = attention_of(**keys)
    except ValueError:
        return
    close(turned(attention, 1).angle()[-4:], torch.tensor([5e6 ** (-2 * i / 64) / 40 for i in range(28, 32)]), 1e-6)


def test_the_text_part_of_a_nested_config_is_read():
    for cls, variant in ((Eagle3MLAConfig, "deepseek-yarn"), (KimiK3Eagle3Config, "kimi")):
        nested = cls.from_any({"model_type": "outer", "hidden_size": 1, "text_config": config_of(variant)})
        assert nested.to_dict() == cls.from_any(config_of(variant)).to_dict()


def test_an_unknown_rope_type_or_no_theta_raises():
    for keys in (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
    ):
        with pytest.raises(ValueError, match="rope"):
            Eagle3MLAConfig.from_any(SIZES | keys)


@pytest.mark.parametrize(("factor", "scale"), [(40, 0.1352338), (64, 0.1446796), (32, 0.1308592), (None, 192**-0.5)])
def test_softmax_scale_is_what_engines_serve(factor, scale):
    rope = {"rope_scaling": DEEPSEEK_YARN | {"factor": factor}} if factor else {}
    attention = attention_of(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000.0, **rope)
    assert attention.scaling == pytest.approx(scale, abs=5e-8 if factor != 32 else 3e-6)
    close(turned(attention, 3).abs(), torch.ones(32), 1e-6)  # amplitude of cos and sin


def test_amplitude_of_unequal_mscales():
    yarn = DEEPSEEK_YARN | {"mscale_all_dim": 0.707}
    amplitude = turned(attention_of(rope_theta=10000.0, rope_scaling=yarn), 3).abs()
    close(amplitude, torch.full((4,), 1.0857), 5e-5)
    close(amplitude, torch.full((4,), (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1)), 1e-6)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "meta", "from_pretrained", "from_pretrained bfloat16"])
def test_angles_stay_exact_whatever_happens_to_the_module(cast, tmp_path):
    draft, cfg = make_draft("deepseek", qk_rope_head_dim=64)
    if cast == "bfloat16":
        draft = draft.to(torch.bfloat16)
    elif cast == "half":
        draft = draft.half()
    elif cast == "meta":
        with torch.device("meta"):
            draft = build_draft("deepseek", cfg)
        draft = draft.to_empty(device="cpu")
    else:
        draft.save_pretrained(tmp_path)
        dtype = torch.bfloat16 if "bfloat16" in cast else torch.float32
        draft = DeepseekV3Eagle3DraftModel.from_pretrained(tmp_path, dtype=dtype)
        assert draft.model.fc.weight.dtype == dtype
    want = torch.polar(torch.ones(32).double(), 32767 * torch.tensor([1e4 ** (-i / 32) for i in range(32)]).double())
    assert (turned(draft.model.layers[0].self_attn, 32767) - want).abs().max() < 3e-3


def test_scores_depend_on_position_differences_only():
    draft, _ = make_draft("deepseek-yarn")
    draft, near, far = draft.double(), make_batch([[20]]), make_batch([[20]], start=37)
    near["features"] = far["features"] = near["features"].double()
    close(reachable(run_fast(draft, far)), reachable(run_fast(draft, near)), 1e-6)


# ------------------------------------------------------------------------ attention against transformers' (PITFALLS 4)


def hf_attention(width=None, **rope):
    """transformers' DeepSeek-V3 attention with random weights, its config and its cos and sin."""
    sizes = {
        k: v for k, v in SIZES.items() if k not in ("target_hidden_size", "num_aux_hidden_states", "draft_vocab_size")
    }
    sizes |= {"attn_implementation": "eager"} | rope | ({"hidden_size": width} if width else {})
    config = DeepseekV3Config(**deepcopy(sizes))
    theirs = DeepseekV3Attention(config, layer_idx=0)
    theirs.kv_a_layernorm.variance_epsilon = config.rms_norm_eps  # theirs is fixed at 1e-6
    if config.q_lora_rank:
        theirs.q_a_layernorm.variance_epsilon = config.rms_norm_eps
    return theirs, DeepseekV3RotaryEmbedding(config)


@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize("factor", [None, 40.0, 64.0])
def test_attention_equals_transformers(factor, q_lora_rank):
    rope = {"rope_theta": 50000.0, "q_lora_rank": q_lora_rank}
    rope |= {"rope_scaling": DEEPSEEK_YARN | {"factor": factor, "beta_fast": 1}} if factor else {}
    torch.manual_seed(0)
    theirs, rotary = hf_attention(**rope)
    ours = attention_of(fuse_input=False, **rope)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) / p.shape[1] ** 0.5)
    ours.load_state_dict(theirs.state_dict())
    x, position = torch.randn(2, 11, 24), torch.stack([torch.arange(11) + 5000, torch.arange(11) * 3 + 17])
    causal = torch.full((11, 11), -math.inf).triu(1).expand(2, 1, -1, -1)
    want = theirs(x, position_embeddings=rotary(x, position), attention_mask=causal)[0]
    close(ours(x, causal, position, [[], []]), want, 2e-5)


# ---------------------------------------------------------- training equals serving, dense equals fast (PITFALLS 2, 8)


def test_unrolled_training_equals_decoding_with_a_key_value_cache():
    """The cache and the attention over it are transformers'; the rest of the layer is the draft's modules."""
    draft, cfg = make_draft("deepseek-yarn")
    layer, attention = draft.model.layers[0], draft.model.layers[0].self_attn
    theirs, rotary = hf_attention(width=48, rope_theta=cfg["rope_theta"], rope_scaling=cfg["rope_scaling"])
    theirs.o_proj = torch.nn.Linear(15, 24, bias=False)
    theirs.load_state_dict(attention.state_dict())
    batch = make_batch([[14]], share=1.0, start=5)
    fast = run_fast(draft, batch)

    def decode(tokens, state, position, cache):
        fused = torch.cat([layer.input_layernorm(draft.embed_input_ids(tokens)), layer.hidden_norm(state)], -1)
        mask = torch.full((tokens.shape[1],) * 2, -math.inf).triu(1)[None, None] if tokens.shape[1] > 1 else None
        o = theirs(fused, rotary(fused, position), mask, cache)[0]
        return layer.finish(state, o)[:, -1:]

    with torch.no_grad():
        g = draft.project_hidden_states(batch["features"])
        for t in (0, 3, 6, 12):
            cache = DynamicCache()
            state = decode(batch["tokens"][:, 1 : t + 2], g[:, : t + 1], batch["position"][:, : t + 1], cache)
            for s in range(min(7, 13 - t)):
                if s:  # one drafted token after another, accepted ones, at the next position
                    state = decode(batch["tokens"][:, t + 1 + s, None], state, torch.tensor([[5 + t + s]]), cache)
                close(fast.hidden[s, :, t], state[:, 0], 1e-5)


@pytest.mark.parametrize("variant", ["deepseek-3.1", "deepseek-no-q-lora", "kimi", "kimi-no-q-lora"])
def test_unrolled_training_equals_running_the_grown_sequence(variant):
    """Serving again, every variant: each drafted token is one more slot of step 0, fed with the last state."""
    draft, _ = make_draft(variant)
    batch = make_batch([[14]], share=1.0, start=5)
    fast = run_fast(draft, batch)
    with torch.no_grad():
        for t in (0, 5, 12):
            state = draft.project_hidden_states(batch["features"])[:, : t + 1]
            for s in range(min(7, 13 - t)):
                tokens, position = batch["tokens"][:, 1 : t + 2 + s], batch["position"][:, : t + 1 + s]
                out = draft(tokens, state, torch.ones_like(tokens), position_ids=position)[:, -1:]
                close(fast.hidden[s, :, t], out[:, 0], 1e-5)
                state = torch.cat([state, out], 1)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("variant", ["deepseek-yarn", "deepseek-3.1", "kimi"])
def test_dense_forward_equals_the_fast_path_and_the_oracle(variant, packed):
    draft, cfg = make_draft(variant)
    batch = make_batch([[5, 9, 6], [20, 0, 0]] if packed else [[-3, 17], [14, -6]], share=1.0)
    fast = run_fast(draft, batch)
    extra = {"position_ids": batch["position"]} | (
        {"seq_lens": torch.tensor([[5, 9, 6], [20, 0, 0]])} if packed else {}
    )
    caches = ([[], []], TTTCache.allocate(7, 2, 20, cfg["kv_lora_rank"] + cfg["qk_rope_head_dim"]))
    with torch.no_grad():
        for cache in caches:
            state = draft.project_hidden_states(batch["features"])
            for s in range(7):
                tokens = left(batch["tokens"], 1 + s)
                mask = (batch["document"] >= 0).long()
                state = draft(tokens, state, mask, cache_hidden=cache, **extra)
                valid = fast.rows.valid[s]
                close(at_anchors(state[None], fast.rows.anchors)[0][valid], fast.hidden[s][valid], 1e-5)
    assert len(caches[0][0]) == len(caches[0][1]) == 7
    want = oracle(draft.state_dict(), cfg, batch, DRAFT_IDS).hidden[6]
    valid = fast.rows.valid[6]
    close(
        at_anchors(state[None], fast.rows.anchors)[0][valid], at_anchors(want[None], fast.rows.anchors)[0][valid], 1e-5
    )


def test_dense_forward_without_positions_or_cache_counts_from_zero():
    draft, _ = make_draft("deepseek")
    tokens, state = torch.randint(0, 64, (2, 9)), torch.randn(2, 9, 24)
    want = draft(tokens, state, torch.ones(2, 9), torch.arange(9).expand(2, 9), [[], []])
    assert torch.equal(draft(tokens, state, torch.ones(2, 9)), want)
    padded = draft(tokens, state, torch.tensor([[0] * 4 + [1] * 5, [0] * 9]), torch.arange(9).expand(2, 9))
    assert padded.isfinite().all()
    close(padded[:1, 4:], draft(tokens[:1, 4:], state[:1, 4:], torch.ones(1, 5), torch.arange(4, 9)[None]), 1e-6)


@pytest.mark.parametrize("garbage", [100.0, math.nan])
@pytest.mark.parametrize("seq_lens", [None, [[9, 11], [14, 6]]])
@pytest.mark.parametrize("variant", ["deepseek-3.1", "kimi"])
def test_unrolling_padded_rows_through_forward_trains_as_packed_rows_do(variant, seq_lens, garbage):
    """As other EAGLE-3 trainers do: logits of every slot of every step, their own loss. Padding may hold anything."""
    draft, _ = make_draft(variant)
    layout = [[-3, 17], [14, -6]] if seq_lens is None else [[-9, 11], [14, -6]]
    batch = make_batch(layout, share=0.7)
    want, real = run_fast(draft, batch, steps=3), batch["document"] >= 0
    features = batch["features"].masked_fill(~real[..., None], garbage)
    given = features.clone()
    extra = {} if seq_lens is None else {"seq_lens": torch.tensor(seq_lens)}
    draft.zero_grad(set_to_none=True)
    state, cache, losses = draft.project_hidden_states(features, real), [[], []], []
    valid, supervised = oracle_masks(batch, DRAFT_IDS, 3)
    for s in range(3):
        state = draft(left(batch["tokens"], 1 + s), state, real, batch["position"], cache, **extra)
        p = left(batch["target_logits"][..., DRAFT_IDS].softmax(-1), 1 + s)
        cross_entropy = -(p * draft.compute_logits(state).log_softmax(-1)).sum(-1)
        losses.append(0.8**s * cross_entropy[supervised[s]].sum() / supervised[s].sum())
    loss = sum(losses) / sum(0.8**s for s in range(3))
    loss.backward()
    close(loss.detach(), want.loss)
    close_gradients({k: p.grad for k, p in draft.named_parameters()}, want.gradients)
    assert torch.equal(features.nan_to_num(-7.0), given.nan_to_num(-7.0))  # the caller's stay as they are


def test_what_padding_holds_reaches_no_gradient_of_the_loss():
    draft, _ = make_draft("deepseek-3.1")
    batch = make_batch([[-5, 20, -4], [-29]], share=0.7)
    padding = (batch["document"] < 0)[..., None]
    clean = batch | {name: batch[name].masked_fill(padding, 0.0) for name in ("features", "last_hidden")}
    rows = make_rows(draft, clean)
    assert rows.features is clean["features"]  # what holds zeros already is not copied
    want = run_fast(draft, clean)
    for garbage in (math.nan, math.inf, 1e30):
        dirty = batch | {name: batch[name].masked_fill(padding, garbage) for name in ("features", "last_hidden")}
        given = dirty["features"].clone()
        got = run_fast(draft, dirty)
        assert torch.equal(got.loss, want.loss)
        assert all(torch.equal(got.gradients[name], x) for name, x in want.gradients.items())
        assert torch.equal(dirty["features"].nan_to_num(-7.0), given.nan_to_num(-7.0))


def test_packing_arguments_are_checked():
    draft, _ = make_draft("deepseek")
    tokens, state, mask = torch.zeros(2, 9, dtype=torch.long), torch.zeros(2, 9, 24), torch.ones(2, 9)
    position = torch.arange(9).expand(2, 9)
    with pytest.raises(ValueError, match="position_ids"):
        draft(tokens, state, mask, seq_lens=torch.tensor([[4, 5], [9, 0]]))
    with pytest.raises(ValueError, match=r"9.*\[9, 8\]"):
        draft(tokens, state, mask, position_ids=position, seq_lens=torch.tensor([[4, 5], [8, 0]]))
    with pytest.raises(ValueError, match="features are 53 wide"):
        draft.project_hidden_states(torch.zeros(1, 2, 53))


# ------------------------------------------------------------------------------------------- attend, gradcheck


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
    plain = anchor_mask(anchors, document)
    mask = plain._replace(blocks=block_index(plain, T))
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


# ------------------------------------------------------------------------------------------------ K3 (PITFALLS 18)


def test_kimi_output_is_unchanged_under_a_shift_of_positions():
    draft, _ = make_draft("kimi")
    near, far = (run_fast(draft, make_batch([[9, 11], [-4, 16]], start=start)) for start in (0, 1234))
    assert torch.equal(near.hidden, far.hidden) and near.loss == far.loss
    tokens, state = torch.randint(0, 64, (1, 9)), torch.randn(1, 9, 24)
    dense = [draft(tokens, state, torch.ones(1, 9), torch.arange(9)[None] + start) for start in (0, 1234)]
    assert torch.equal(*dense)


def test_kimi_refuses_rope_and_grouped_heads():
    with pytest.raises(ValueError, match="mla_use_nope"):
        KimiK3Eagle3DraftModel(config_of("kimi", mla_use_nope=False))
    with pytest.raises(ValueError, match="num_key_value_heads is 1"):
        KimiK3Eagle3DraftModel(config_of("kimi", num_key_value_heads=1))


def test_a_beta_of_null_is_one():
    """What published K3 code takes it for."""
    x = torch.randn(2, 5, 24)
    silent, one = (KimiK3Eagle3DraftModel(config_of("kimi", activation_situ_beta=beta)) for beta in (None, 1.0))
    one.load_state_dict(silent.state_dict())
    assert torch.equal(silent.model.layers[0].mlp(x), one.model.layers[0].mlp(x))


def test_zeroed_gate_weights_halve_the_attention_output_exactly():
    gated, plain = (
        attention_of(KimiK3Eagle3MLAAttention, mla_use_nope=True, mla_use_output_gate=gate) for gate in (True, False)
    )
    plain.load_state_dict(gated.state_dict(), strict=False)
    torch.nn.init.zeros_(gated.g_proj.weight)
    x, position = torch.randn(2, 7, 48), torch.arange(7).expand(2, 7)
    causal = torch.full((7, 7), -math.inf).triu(1).expand(2, 1, -1, -1)
    assert torch.equal(gated(x, causal, position, [[], []]), 0.5 * plain(x, causal, position, [[], []]))


# --------------------------------------------------------------- vocabularies and embeddings (PITFALLS 14, 15, 17)


@pytest.mark.parametrize("size", [0, -3, 65, 16.0, True])
def test_an_impossible_draft_vocabulary_size_raises(size):
    with pytest.raises(ValueError, match="draft_vocab_size"):
        build_draft("deepseek", config_of("deepseek", draft_vocab_size=size))


def test_vocabulary_mapping_takes_any_order_and_nothing_else():
    draft = build_draft("deepseek", config_of("deepseek"))
    with pytest.raises(ValueError, match="set_vocab_mapping"):
        make_rows(draft, make_batch([[9]]))
    draft.set_vocab_mapping(DRAFT_IDS)
    assert torch.equal(draft.d2t, DRAFT_IDS - torch.arange(16)) and draft.d2t.min() < 0
    assert draft.t2d.nonzero()[:, 0].tolist() == sorted(DRAFT_IDS.tolist())
    assert torch.equal(draft.draft_ids, DRAFT_IDS)
    for wrong in (DRAFT_IDS[:15], DRAFT_IDS[[0] + list(range(15))], DRAFT_IDS + 1, DRAFT_IDS - 1):
        with pytest.raises(ValueError, match="distinct|0..63"):
            draft.set_vocab_mapping(wrong)
    assert torch.equal(draft.draft_ids, DRAFT_IDS)  # a refused mapping changes nothing


def test_a_full_vocabulary_has_no_mapping():
    draft = build_draft("deepseek", config_of("deepseek", draft_vocab_size=64))
    assert not {"d2t", "t2d"} & draft.state_dict().keys()
    assert torch.equal(draft.draft_ids, torch.arange(64))


def test_a_target_choice_outside_the_draft_vocabulary_is_no_loss_and_a_miss():
    draft, cfg = make_draft("deepseek")
    batch = make_batch([[10]], share=1.0)
    proposed = DRAFT_IDS[oracle(draft.state_dict(), cfg, batch, DRAFT_IDS, steps=1).logits[0].argmax(-1)]
    choices = proposed.roll(1, 1)  # slot t's proposal is what the target says at t + 1
    choices[0, 5] = 1  # but here: not among the draft's ids
    batch["last_hidden"] = batch["target_logits"] = 50.0 * F.one_hot(choices, 64)
    batch["head"] = lambda hidden: hidden
    metrics = run_fast(draft, batch, steps=2).metrics
    assert metrics.step_valid.tolist() == [9, 8] and metrics.step_supervised.tolist() == [8, 7]
    assert metrics.step_prefix_hits[0] == 8
    assert metrics.hit[0, 0].tolist() == [t != 4 for t in range(9)] and not metrics.hit[1, 0, 3]


def test_embeddings_equal_the_targets_before_and_after_training():
    draft, _ = make_draft("deepseek")
    target = torch.nn.Embedding(64, 24)
    draft.copy_embeddings_from_target(target)
    draft.freeze_embeddings()
    trained = [p for p in draft.parameters() if p.requires_grad]
    assert not any(p is draft.model.embed_tokens.weight for p in trained)
    optimizer, before = torch.optim.AdamW(trained, lr=1e-2), draft.lm_head.weight.clone()
    for seed in range(3):
        optimizer.zero_grad()
        TTTLoss(draft)(make_rows(draft, make_batch([[20]], seed)))[0].backward()
        optimizer.step()
    assert torch.equal(draft.model.embed_tokens.weight, target.weight) and draft.model.embed_tokens.weight.grad is None
    assert (draft.lm_head.weight != before).all()
    with pytest.raises(ValueError, match="64, 25"):
        draft.copy_embeddings_from_target(torch.nn.Embedding(64, 25))


def test_embeddings_are_copied_from_a_sharded_table(tmp_path):
    from torch.distributed.tensor import Shard, distribute_tensor

    draft, target = build_draft("kimi", config_of("kimi")), torch.nn.Embedding(64, 24)
    table = target.weight.detach().clone()
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
        target.weight = torch.nn.Parameter(distribute_tensor(table, mesh, [Shard(0)]))
        draft.copy_embeddings_from_target(target)
    finally:
        distributed.destroy_process_group()
    assert type(draft.model.embed_tokens.weight) is torch.nn.Parameter
    assert torch.equal(draft.model.embed_tokens.weight, table)


# ------------------------------------------------------------------------------------------ dtypes and round trips


@pytest.mark.parametrize("variant", ["deepseek-yarn", "deepseek-3.1", "deepseek-full-vocabulary", "kimi-3.1"])
def test_saving_and_loading_give_the_same_bits(variant, tmp_path):
    draft, _ = make_draft(variant)
    batch = make_batch([[9, 11]])
    draft.save_pretrained(tmp_path)
    again = type(draft).from_pretrained(tmp_path)
    by_path = type(draft.config).from_any(tmp_path).to_dict()
    assert by_path.items() <= (draft.config.to_dict() | {"architectures": None, "dtype": None}).items()
    assert again.state_dict().keys() == draft.state_dict().keys()
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in draft.state_dict().items())
    assert torch.equal(run_fast(again, batch).hidden, run_fast(draft, batch).hidden)
    with torch.device("meta"):
        empty = type(draft)(draft.config)
    empty.to_empty(device="cpu").load_state_dict(draft.state_dict())
    assert torch.equal(run_fast(empty, batch).hidden, run_fast(draft, batch).hidden)


@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
@pytest.mark.parametrize("how", ["autocast", "bfloat16", "half"])
def test_low_precision_stays_near_the_oracle(variant, how):
    draft, cfg = make_draft(variant)
    batch = make_batch([[20, 20], [-7, 33]], share=1.0)
    exact = oracle(draft.state_dict(), cfg, batch, DRAFT_IDS)
    if how == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            fast = run_fast(draft, batch)
    else:
        fast = run_fast(draft.to(torch.bfloat16) if how == "bfloat16" else draft.half(), batch)
    valid = fast.rows.valid
    close(fast.hidden[valid], at_anchors(exact.hidden, fast.rows.anchors)[valid], 5e-2)
    assert fast.loss.dtype == torch.float32
    close(fast.loss, exact.loss, 1e-2)
    for name, gradient in fast.gradients.items():
        assert gradient.isfinite().all(), name
        close(gradient, exact.gradients[name], 0.1, scale=1.0)


def test_norm_weights_move():
    """float32 masters under bf16 compute: a bf16 weight of 1.0 would stay exactly 1.0 at this rate (PITFALLS 6)."""
    torch.manual_seed(0)
    draft = build_draft("deepseek", config_of("deepseek"))
    draft.set_vocab_mapping(DRAFT_IDS)
    optimizer, ttt = torch.optim.AdamW(draft.parameters(), lr=1e-4), TTTLoss(draft, steps=2)
    rows = make_rows(draft, make_batch([[8]], share=1.0), steps=2)
    for _ in range(200):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss, _ = ttt(rows)
        loss.backward()
        optimizer.step()
    norms = torch.cat([p.detach() for p in draft.parameters() if p.dim() == 1])
    assert (norms == 1).float().mean() < 0.01


# ----------------------------------------------------------------------- rows, caches, memory (PITFALLS 21, 22)


def test_bad_rows_are_refused():
    draft, _ = make_draft("deepseek")
    good = make_batch([[5, 9], [14]], share=1.0)
    make_rows(draft, good)
    for change, message in (
        ({"position": good["position"][:, 1:]}, r"position is \(2, 13\), tokens are \(2, 14\)"),
        ({"features": good["features"][:1]}, "features"),
        ({"document": torch.tensor([[0] * 5 + [1] * 4 + [0] * 5] * 2)}, "two pieces"),
        ({"tokens": good["tokens"] + 64}, "token id 127"),
        ({"tokens": good["tokens"] - 99}, "negative"),
    ):
        with pytest.raises(ValueError, match=message):
            make_rows(draft, good | change)
    with pytest.raises(ValueError, match="needs 13 anchors, the capacity is 12"):
        make_rows(draft, good, anchors=12)


def test_a_full_cache_is_refused():
    draft, _ = make_draft("deepseek")
    cache, state = TTTCache.allocate(2, 1, 4, 20), torch.randn(1, 4, 24)
    for _ in range(2):
        draft(torch.zeros(1, 4, dtype=torch.long), state, torch.ones(1, 4), cache_hidden=cache)
    with pytest.raises(ValueError, match="2 steps"):
        draft(torch.zeros(1, 4, dtype=torch.long), state, torch.ones(1, 4), cache_hidden=cache)


def allocated(work):
    """Bytes of the largest allocation and of the peak above the start; the profiler sees inside operators too."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        work()
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(sizes), max(itertools.accumulate(sizes))


def test_no_tensor_of_all_slots_by_all_logits_exists_and_memory_is_linear_in_the_slots():
    V, Vd, n, H_target = 512, 256, SIZES["num_attention_heads"], SIZES["target_hidden_size"]
    draft = build_draft("deepseek", config_of("deepseek", vocab_size=V, draft_vocab_size=Vd))
    draft.set_vocab_mapping(torch.arange(0, V, 2))
    head, peaks = torch.randn(V, H_target), []
    for T in (2048, 4096):
        batch = {
            "tokens": torch.randint(0, V, (1, T)),
            "document": torch.zeros(1, T, dtype=torch.long),
            "position": torch.arange(T)[None],
            "features": torch.randn(1, T, 3 * H_target),
            "loss_mask": torch.ones(1, T),
            "last_hidden": torch.randn(1, T, H_target),
            "head": lambda hidden: hidden @ head.T,
        }
        largest, peak = allocated(lambda batch=batch: TTTLoss(draft)(make_rows(draft, batch))[0].backward())
        assert largest / 4 <= (T + 6) * Vd < min(T * T * n, T * V, 7 * (T - 1) * Vd)  # the teacher table is the largest
        peaks.append(peak)
    assert peaks[1] <= 2.2 * peaks[0], peaks
