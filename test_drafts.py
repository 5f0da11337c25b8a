"""Claims about the two drafts, each against an expectation that does not come from their code.

The oracle below is DESIGN.md's recurrence written once more, dense, slow and in float64: a whole T x (T+S) score matrix
per step and autograd behind it. Hidden states and every gradient are compared with it, not only losses.
The golden numbers are replayed through `build_draft` and `build_trainer` (see `unshift`).

Legend: B rows, T slots, A anchors, S TTT steps, H hidden, n heads, V target and Vd draft vocabulary.
"""

import contextlib
import math
import os
import random
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from draft_deepseek import DeepseekV3Eagle3DraftModel, RowChunks, TTTLoss, build_rows
from draft_kimi_k3 import KimiK3Eagle3DraftModel

os.environ["HF_HUB_OFFLINE"] = "1"
GOLDEN = Path(__file__).parent.parent / "shared" / "golden"
LAYER, ATTENTION, MLP = "model.layers.0.", "model.layers.0.self_attn.", "model.layers.0.mlp."

YARN = {"rope_type": "yarn", "type": "yarn", "factor": 40.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
YARN |= {"mscale_all_dim": 1.0, "original_max_position_embeddings": 64}
SIZES = {  # all different on purpose
    "hidden_size": 24, "target_hidden_size": 18, "num_aux_hidden_states": 3, "intermediate_size": 36,
    "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 10, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 8, "v_head_dim": 5, "vocab_size": 64, "draft_vocab_size": 16,
    "rms_norm_eps": 1e-3, "max_position_embeddings": 4096, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
K3 = {
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
}
VARIANTS = {
    "deepseek": {"rope_theta": 10000.0},
    "deepseek-yarn": {"rope_theta": 50000.0, "rope_scaling": YARN},
    "deepseek-no-q-lora": {"rope_theta": 10000.0, "q_lora_rank": None},
    "deepseek-3.1": {"rope_theta": 10000.0, "fc_norm": True, "norm_output": True},
    "deepseek-norm-output": {"rope_theta": 10000.0, "norm_output": True},
    "kimi": K3,
    "kimi-no-q-lora": K3 | {"q_lora_rank": None, "activation_situ_linear_beta": None},
    "kimi-3.1": K3 | {"fc_norm": True, "norm_output": True},
    "deepseek-full-vocabulary": {"rope_theta": 10000.0, "draft_vocab_size": 64},
    "kimi-no-gate": K3 | {"mla_use_output_gate": False, "fc_norm": True},
}
DRAFT_IDS = torch.tensor([5, 0, 61, 17, 2, 33, 40, 8, 9, 63, 22, 51, 3, 46, 12, 28])  # no order: d2t goes negative


# ------------------------------------------------------------------------------------------------------ the oracle


def rms(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def yarn_m(factor, mscale):
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def oracle_rope(cfg):
    """Frequencies [Dr/2], amplitude of cos and sin, softmax scale; from the flat keys of a config.json."""
    d = cfg["qk_rope_head_dim"]
    scale = (cfg["qk_nope_head_dim"] + d) ** -0.5
    if cfg.get("mla_use_nope"):
        return torch.zeros(d // 2, dtype=torch.float64), 1.0, scale
    theta, yarn = cfg["rope_theta"], cfg.get("rope_scaling")
    freqs = torch.tensor([theta ** (-2 * i / d) for i in range(d // 2)], dtype=torch.float64)
    if not yarn:
        return freqs, 1.0, scale

    def channel(turns):  # the channel that makes so many turns over the original context
        return d * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(channel(yarn["beta_fast"])), 0)
    high = min(math.ceil(channel(yarn["beta_slow"])), d - 1)
    slow = [min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0) for i in range(d // 2)]
    slow = torch.tensor(slow, dtype=torch.float64)
    m_all = yarn_m(yarn["factor"], yarn["mscale_all_dim"])
    return (
        freqs * (1 - slow) + freqs / yarn["factor"] * slow,
        yarn_m(yarn["factor"], yarn["mscale"]) / m_all,
        scale * m_all**2,
    )


def rotate(x, angle, amplitude):
    """x [B,T,n,Dr], pairs 0-1, 2-3, ... turned by angle [B,T,Dr/2]."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = amplitude * angle.cos()[:, :, None], amplitude * angle.sin()[:, :, None]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)


def oracle_hidden(w, cfg, ids, g, document, position):
    """a [S,B,T,H] of every slot and step, from the ids [S,B,T] fed and the projected features g [B,T,H]."""
    (S, B, T), eps = ids.shape, cfg["rms_norm_eps"]
    n, dn, dr, dv = (cfg[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    freqs, amplitude, scale = oracle_rope(cfg)
    slot = torch.arange(T)
    sees = (slot[:, None] >= slot) & (document[:, :, None] == document[:, None]) & (document >= 0)[:, None]
    a, keys, values, out = g, [], [], []
    for s in range(S):
        e = F.embedding(ids[s], w["model.embed_tokens.weight"], padding_idx=cfg["pad_token_id"])
        x = torch.cat(
            [rms(e, w[LAYER + "input_layernorm.weight"], eps), rms(a, w[LAYER + "hidden_norm.weight"], eps)], -1
        )
        if cfg["q_lora_rank"] is None:
            q = x @ w[ATTENTION + "q_proj.weight"].T
        else:
            q = rms(x @ w[ATTENTION + "q_a_proj.weight"].T, w[ATTENTION + "q_a_layernorm.weight"], eps)
            q = q @ w[ATTENTION + "q_b_proj.weight"].T
        q_c, q_r = q.view(B, T, n, dn + dr).split([dn, dr], -1)
        c, k_r = (x @ w[ATTENTION + "kv_a_proj_with_mqa.weight"].T).split([cfg["kv_lora_rank"], dr], -1)
        kv = rms(c, w[ATTENTION + "kv_a_layernorm.weight"], eps) @ w[ATTENTION + "kv_b_proj.weight"].T
        k_c, v = kv.view(B, T, n, dn + dv).split([dn, dv], -1)
        angle = (position + s)[..., None] * freqs
        k_r = rotate(k_r[:, :, None], angle, amplitude).expand(B, T, n, dr)
        q = torch.cat([q_c, rotate(q_r, angle, amplitude)], -1)
        keys.append(torch.cat([k_c, k_r], -1))
        values.append(v)
        block = torch.einsum("btnd,bjnd->btnj", q, keys[0]).masked_fill(~sees[:, :, None], -math.inf)
        scores = torch.cat([block] + [(q * k).sum(-1, keepdim=True) for k in keys[1:]], -1) * scale  # T x (T+s)
        blind = (scores == -math.inf).all(-1, keepdim=True)  # attends to nothing: zeros, never NaN
        p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
        o = torch.einsum("btnj,bjnv->btnv", p[..., :T], values[0])
        for u in range(1, s + 1):
            o = o + p[..., T + u - 1, None] * values[u]
        o = o.flatten(2)
        if cfg.get("mla_use_output_gate"):
            o = o * torch.sigmoid(x @ w[ATTENTION + "g_proj.weight"].T)
        h = a + o @ w[ATTENTION + "o_proj.weight"].T
        y = rms(h, w[LAYER + "post_attention_layernorm.weight"], eps)
        gate, up = y @ w[MLP + "gate_proj.weight"].T, y @ w[MLP + "up_proj.weight"].T
        if beta := cfg.get("activation_situ_beta"):
            inner = beta * torch.tanh(gate / beta) * torch.sigmoid(gate)
            linear = cfg.get("activation_situ_linear_beta")
            inner = inner * (linear * torch.tanh(up / linear) if linear else up)
        else:
            inner = gate * torch.sigmoid(gate) * up
        a = h + inner @ w[MLP + "down_proj.weight"].T
        if cfg.get("norm_output"):
            a = rms(a, w["model.norm.weight"], eps)
        out.append(a)
    return torch.stack(out)


def oracle_project(w, cfg, features):
    if cfg.get("fc_norm"):
        parts = features.chunk(3, -1)
        parts = [rms(f, w[f"model.fc_norm.{i}.weight"], cfg["rms_norm_eps"]) for i, f in enumerate(parts)]
        features = torch.cat(parts, -1)
    return features @ w["model.fc.weight"].T


def oracle_logits(w, cfg, a):
    if not cfg.get("norm_output"):
        a = rms(a, w["model.norm.weight"], cfg["rms_norm_eps"])
    return a @ w["lm_head.weight"].T


def oracle_masks(batch, draft_ids, steps):
    """valid and supervised [S,B,T], by the words of DESIGN.md 1."""
    B, T = batch["tokens"].shape
    valid, supervised = torch.zeros(2, steps, B, T, dtype=torch.bool)
    top, ids = batch["target_logits"].argmax(-1), set(draft_ids.tolist())
    for s in range(steps):
        for b in range(B):
            for t in range(T - 1 - s):
                u, doc = t + 1 + s, batch["document"][b]
                valid[s, b, t] = bool(batch["loss_mask"][b, u]) and doc[t] >= 0 and doc[u] == doc[t]
                supervised[s, b, t] = valid[s, b, t] and top[b, u].item() in ids
    return valid, supervised


def left(x, by):
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


def oracle(state, cfg, batch, draft_ids, steps=7, loss="ce", lk_scale=1.0, lk_decay=3.0, denominators=None):
    """Hidden states, loss, metrics and gradients of a batch of unshifted rows (a dict, all [B,T,...])."""
    w = {k: v.detach().double().requires_grad_() for k, v in state.items() if v.is_floating_point()}
    g = oracle_project(w, cfg, batch["features"].double())
    ids = torch.stack([left(batch["tokens"], 1 + s) for s in range(steps)])
    hidden = oracle_hidden(w, cfg, ids, g, batch["document"], batch["position"])
    log_q = oracle_logits(w, cfg, hidden).log_softmax(-1)
    valid, supervised = oracle_masks(batch, draft_ids, steps)
    step_losses, hit = [], torch.zeros_like(valid)
    for s in range(steps):
        p = left(batch["target_logits"].double()[..., draft_ids].softmax(-1), 1 + s)
        ce, alpha = -(p * log_q[s]).sum(-1), torch.minimum(p, log_q[s].exp()).sum(-1)
        on, count = supervised[s], supervised[s].sum()
        hit[s] = on & (log_q[s].argmax(-1) == p.argmax(-1))
        total = count.clamp(min=1) if denominators is None else denominators[s]
        if loss == "ce":
            step = ce[on].sum() / total
        elif loss == "alpha":
            step = -alpha[on & (alpha > 0)].log().sum() / total
        else:
            mean = alpha[on].sum().detach() / count.clamp(min=1)
            weight = lk_scale * torch.exp(-lk_decay * mean)
            step = (weight * ce[on].sum() + (1 - weight) * (1 - alpha[on]).sum()) / total
        step_losses.append(step)
    weights = [0.8**s for s in range(steps)]
    value = sum(x * y for x, y in zip(weights, step_losses, strict=True)) / sum(weights)
    gradients = torch.autograd.grad(value, list(w.values()), allow_unused=True, materialize_grads=True)
    return SimpleNamespace(
        hidden=hidden.detach(),
        logits=log_q.detach(),
        loss=value.detach(),
        gradients=dict(zip(w, gradients, strict=True)),
        valid=valid,
        supervised=supervised,
        hit=hit,
        step_loss=torch.stack(step_losses).detach(),
        step_valid=valid.cumprod(0).sum((1, 2)),
        step_prefix_hits=hit.cumprod(0).sum((1, 2)),
        accuracy=hit.sum() / supervised.sum().clamp(min=1),
    )


# ------------------------------------------------------------------------------------------- the golden numbers

NO_LOGITS_CAPTURE = True  # for check_golden.py: the fused loss never makes the logits of a step


def build_draft(kind, config):
    return {"deepseek": DeepseekV3Eagle3DraftModel, "kimi": KimiK3Eagle3DraftModel}[kind](config)


def build_trainer(draft, selected_token_ids, selected_token_mask, ttt_steps, **lk):
    assert torch.equal(draft.draft_ids, selected_token_ids) and selected_token_mask.sum() == len(selected_token_ids)
    return GoldenTrainer(draft, ttt_steps, **lk)


class GoldenTrainer(torch.nn.Module):
    def __init__(self, draft, steps, lk_loss_type="ce", lk_kl_scale=1.0, lk_kl_decay=3.0):
        super().__init__()
        self.ttt = TTTLoss(draft, steps=steps, loss=lk_loss_type, lk_scale=lk_kl_scale, lk_decay=lk_kl_decay)

    def forward(self, **shifted):
        loss, metrics = self.ttt(make_rows(self.ttt.draft, unshift(**shifted), self.ttt.steps))
        names = ("accuracy", "valid_tokens", "step_prefix_hits", "step_valid")
        return SimpleNamespace(loss=loss, **{name: getattr(metrics, name) for name in names})


def unshift(
    input_ids, attention_mask, loss_mask, aux_hidden_states, target_logits, position_ids=None, seq_lens=None,
    doc_remaining=None,
):  # fmt: skip
    """What an EAGLE-3 trainer receives, moved left once, as unshifted rows of one slot more."""
    one = torch.zeros_like(input_ids[:, :1])
    if doc_remaining is None:
        document = torch.where(torch.cat([attention_mask, attention_mask[:, -1:]], 1) > 0, 0, -1)
    else:  # a document ends where nothing remains after it; a slot that starts and ends one is padding
        remaining = torch.cat([doc_remaining, (doc_remaining[:, -1:] - 1).clamp(min=0)], 1)
        starts = torch.cat([one == 0, remaining[:, :-1] == 0], 1)
        document = torch.where(starts & (remaining == 0), -1, starts.cumsum(1) - 1)
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    target_logits = F.pad(target_logits, (0, 0, 1, 0))
    return {
        "tokens": torch.cat([one, input_ids], 1),
        "document": document,
        "position": torch.cat([position_ids, position_ids[:, -1:] + 1], 1),
        "features": F.pad(aux_hidden_states, (0, 0, 0, 1)),
        "loss_mask": torch.cat([one, loss_mask], 1),
        "last_hidden": target_logits,  # under a head that is the identity
        "head": lambda hidden: hidden,
        "target_logits": target_logits,
    }


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden numbers are not beside this checkout")
def test_every_golden_case_passes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check_golden.py", "--impl", "test_drafts"])
    monkeypatch.setattr(sys, "path", [str(GOLDEN), *sys.path])
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)  # it would hold for all tests behind this one
    with contextlib.suppress(SystemExit):  # its code says no more than its last words
        runpy.run_path(str(GOLDEN / "check_golden.py"), run_name="__main__")
    assert "all cases pass" in capsys.readouterr().out


# --------------------------------------------------------------------------------- drafts, rows and the comparison


def config_of(variant, **changes):
    return SIZES | VARIANTS[variant] | changes


def make_draft(variant, seed=0, **changes):
    """A draft with weights large enough that masks, angles and scales all show, and the oracle's config of it."""
    cfg = config_of(variant, **changes)
    draft = build_draft(variant.split("-")[0], cfg)
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in draft.named_parameters():
            noise = torch.randn(p.shape, generator=gen)
            p.copy_(1 + 0.3 * noise if p.dim() == 1 else noise * (1.5 if "embed" in name else 1 / p.shape[1] ** 0.5))
    if cfg["draft_vocab_size"] < cfg["vocab_size"]:
        draft.set_vocab_mapping(DRAFT_IDS)
    return draft, cfg


def make_batch(layout, seed=0, share=0.5, start=0):
    """Unshifted random rows. A row of the layout lists its documents' lengths; a negative one is padding."""
    gen = torch.Generator().manual_seed(seed)
    document = torch.tensor([[i if n > 0 else -1 for i, n in enumerate(row) for _ in range(abs(n))] for row in layout])
    position = torch.tensor([[start + j for n in row for j in range(abs(n))] for row in layout])
    real, (B, T), V = document >= 0, document.shape, SIZES["vocab_size"]
    features = torch.randn(B, T, 3 * SIZES["target_hidden_size"], generator=gen)
    last_hidden = torch.randn(B, T, SIZES["target_hidden_size"], generator=gen)
    weight = torch.randn(V, SIZES["target_hidden_size"], generator=gen)
    bias = torch.zeros(V).index_fill(0, DRAFT_IDS, 3.0)  # half of the target's choices are in the draft vocabulary
    return {
        "tokens": torch.randint(0, V, (B, T), generator=gen) * real,
        "document": document,
        "position": position * real,
        "features": torch.where(real[..., None], features, 100 * features),
        "loss_mask": ((torch.rand(B, T, generator=gen) < share) & real).long(),
        "last_hidden": last_hidden,
        "head": lambda hidden: F.linear(hidden, weight, bias),
        "target_logits": F.linear(last_hidden, weight, bias),
    }


def with_tensors(change, *batches):
    """A batch whose tensors are `change` of the given batches' tensors of that name."""
    first = batches[0]
    return {k: change(*(batch[k] for batch in batches)) if torch.is_tensor(v) else v for k, v in first.items()}


def make_rows(draft, batch, steps=7, **options):
    inputs = {k: v for k, v in batch.items() if k != "target_logits"}
    return build_rows(draft.draft_ids, **inputs, steps=steps, **options)


def run_fast(draft, batch, steps=7, anchors=None, denominators=None, mean_alpha=None, **loss):
    """The fast path's rows, hidden states, loss, metrics and gradients of every parameter."""
    rows = make_rows(draft, batch, steps, anchors=anchors, denominators=denominators)._replace(mean_alpha=mean_alpha)
    draft.zero_grad(set_to_none=True)
    ttt = TTTLoss(draft, steps=steps, **loss)
    value, metrics = ttt(rows)
    value.backward()
    gradients = {k: p.grad.clone() for k, p in draft.named_parameters()}  # each has one, whatever was supervised
    with torch.no_grad():
        hidden = unroll(ttt, rows)
    return SimpleNamespace(rows=rows, hidden=hidden, loss=value.detach(), metrics=metrics, gradients=gradients)


def make_chunks(draft, batch, **options):
    inputs = {k: v for k, v in batch.items() if k != "target_logits"}
    return RowChunks(draft.draft_ids, **inputs, **options)


def unroll(ttt, rows):
    return ttt.unroll(ttt.keys(F.pad(rows.tokens, (0, 1)), rows.position, rows.features), rows)


def at_anchors(x, anchors):
    """x [S,B,T,...] at the slots anchors [B,A]."""
    return torch.stack([x[:, b, slots.clamp(min=0)] for b, slots in enumerate(anchors)], 1)


def close(got, want, tolerance=1e-5, scale=0.0):
    error = (got.double() - want.double()).abs().max().item()
    bound = tolerance * max(want.abs().max().item(), scale)
    assert error <= bound, f"{error:.2e} > {bound:.2e}"


def close_gradients(got, want, tolerance=1e-5):
    """Each relative to its own largest entry, which counts as at least 1% of the largest of all."""
    assert got.keys() == want.keys()
    scale = 1e-2 * max(g.abs().max().item() for g in want.values())
    for name in want:
        try:
            close(got[name], want[name], tolerance, scale)
        except AssertionError as error:
            raise AssertionError(f"gradient of {name}: {error}") from None


def agree(draft, cfg, batch, steps=7, tolerance=1e-5, **options):
    """Everything of the fast path equals the oracle."""
    fast = run_fast(draft, batch, steps, **options)
    options.pop("anchors", None)
    ids = DRAFT_IDS if cfg["draft_vocab_size"] < cfg["vocab_size"] else torch.arange(cfg["vocab_size"])
    want = oracle(draft.state_dict(), cfg, batch, ids, steps, **options)
    anchors, document = fast.rows.anchors, batch["document"]
    used = anchors >= 0
    for name, got in (
        ("valid", fast.rows.valid),
        ("supervised", fast.rows.teacher_index >= 0),
        ("hit", fast.metrics.hit),
    ):
        mask = getattr(want, name)
        assert torch.equal(got, at_anchors(mask, anchors) & used), name
        assert got.sum() == mask.sum() or name == "valid", f"{name}: slots that are no anchors"
    ends = torch.stack([left(document + 1, 1 + s) == document + 1 for s in range(steps)])  # later ids are arbitrary
    compared = at_anchors(ends, anchors) & used
    close((fast.hidden * compared[..., None]), at_anchors(want.hidden, anchors) * compared[..., None], tolerance)
    close(fast.loss, want.loss, tolerance)
    close(fast.metrics.step_loss, want.step_loss, tolerance)
    close(fast.metrics.accuracy, want.accuracy, 1e-6)
    counts = {"step_hits": want.hit.sum((1, 2)), "step_supervised": want.supervised.sum((1, 2))}
    counts |= {"step_valid": want.step_valid, "step_prefix_hits": want.step_prefix_hits}
    for name, count in counts.items():
        assert getattr(fast.metrics, name).tolist() == count.tolist(), name
    assert fast.metrics.valid_tokens == want.supervised.sum()
    close_gradients(fast.gradients, want.gradients, 2 * tolerance)
    return fast, want


# ------------------------------------------------------------------------------ the fast path is the recurrence

LAYOUTS = {
    "T1": [[1]], "T2": [[2], [-2]], "T7": [[3, 4], [-2, 5], [6, -1]], "T7-one-document": [[7]],
    "T96": [[40, 56], [96]], "T129": [[-9, 50, 1, 59, -10], [129]],
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_loss_metrics_and_every_gradient_equal_the_oracle(variant):
    batch, (draft, cfg) = make_batch([[9, 13, -2], [-5, 19], [24]], start=3), make_draft(variant)
    agree(draft, cfg, batch)
    batch["features"] = batch["features"].double()
    agree(draft.double(), cfg, batch, tolerance=1e-6)  # what is left: teacher and angles are float32


@pytest.mark.parametrize("share", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_odd_shapes_equal_the_oracle(variant, layout, share):
    agree(*make_draft(variant), make_batch(LAYOUTS[layout], share=share))


def test_one_anchor_equals_the_oracle():
    batch = make_batch([[11, 12]])
    batch["loss_mask"] = F.one_hot(torch.tensor([12]), 23)  # the second token of the second document: one slot
    batch["target_logits"][0, 12, DRAFT_IDS[3]] = 99.0
    batch["last_hidden"], batch["head"] = batch["target_logits"], lambda hidden: hidden
    fast, _ = agree(*make_draft("deepseek"), batch)
    assert fast.rows.anchors.tolist() == [[11]]


@pytest.mark.parametrize("loss", ["alpha", "lambda"])
@pytest.mark.parametrize("variant", ["deepseek-3.1", "kimi"])
def test_lk_losses_equal_the_oracle(variant, loss):
    agree(*make_draft(variant), make_batch([[20, 21], [-3, 38]]), loss=loss, lk_scale=0.7, lk_decay=2.0)


def test_random_shapes_equal_the_oracle():
    draw = random.Random(0)
    for seed in range(25):
        T, variant = draw.randint(1, 40), draw.choice(list(VARIANTS))
        layout = [cut(draw, T) for _ in range(draw.randint(1, 3))]
        batch = make_batch(layout, seed, share=draw.choice([0.0, 0.05, 0.3, 0.7, 1.0]), start=draw.randint(0, 9))
        options = {"steps": draw.randint(1, 7), "loss": draw.choice(["ce", "alpha", "lambda"])}
        print(seed, variant, layout, options)
        agree(*make_draft(variant, seed), batch, **options)


def cut(draw, T):
    """T slots as documents and paddings of random lengths."""
    row = []
    while (rest := T - sum(map(abs, row))) > 0:
        row.append(draw.randint(1, rest) * draw.choice([1, 1, 1, -1]))
    return row


def test_more_capacity_than_anchors_changes_nothing():
    draft, cfg = make_draft("deepseek")
    batch = make_batch([[9, 13], [-5, 17]], share=0.4)
    close_gradients(agree(draft, cfg, batch, anchors=22)[0].gradients, run_fast(draft, batch).gradients, 1e-6)


def test_autograd_finds_no_anomaly():
    with torch.autograd.set_detect_anomaly(True):
        for variant in ("deepseek-3.1", "kimi"):
            agree(*make_draft(variant), make_batch([[-4, 7, 1, 2], [-14], [14]], share=0.4))


def test_given_denominators_make_micro_batches_add_up():
    """Ranks or micro-batches with few and many supervised slots give the gradient of one that holds them all."""
    draft, cfg = make_draft("deepseek")
    batch = make_batch([[15], [15]], share=1.0)
    batch["loss_mask"][0, 3:] = 0
    whole, want = agree(draft, cfg, batch)
    denominators = want.supervised.sum((1, 2)).clamp(min=1).float()
    halves = [with_tensors(lambda x, i=i: x[i : i + 1], batch) for i in range(2)]
    parts = [agree(draft, cfg, half, denominators=denominators)[0] for half in halves]
    close(parts[0].loss + parts[1].loss, whole.loss, 1e-6)
    total = {k: parts[0].gradients[k] + parts[1].gradients[k] for k in whole.gradients}
    close_gradients(total, whole.gradients, 2e-6)


def test_given_mean_alpha_makes_the_lambda_loss_of_micro_batches_add_up():
    """Its weight is of the whole optimizer step: however rows are grouped, the gradient is that of all together."""
    draft, _ = make_draft("deepseek")
    batch = make_batch([[15], [15]], share=1.0)
    batch["loss_mask"][0, 5:] = 0
    whole = run_fast(draft, batch, loss="lambda")
    given = {"denominators": whole.metrics.step_supervised.clamp(min=1).float()}
    halves = [with_tensors(lambda x, i=i: x[i : i + 1], batch) for i in range(2)]
    with torch.no_grad():
        sums = [TTTLoss(draft, loss="lambda")(make_rows(draft, half))[1].step_alpha for half in halves]
    given["mean_alpha"] = sum(sums) / given["denominators"]
    total, loss = {k: torch.zeros_like(x) for k, x in whole.gradients.items()}, 0.0
    for half in halves:
        part = run_fast(draft, half, loss="lambda", **given)
        total, loss = {k: x + part.gradients[k] for k, x in total.items()}, loss + part.loss
    close(loss, whole.loss, 1e-6)
    close_gradients(total, whole.gradients, 2e-6)
    apart = [run_fast(draft, half, loss="lambda", denominators=given["denominators"]) for half in halves]
    assert abs(sum(x.loss for x in apart) - whole.loss) > 1e-3 * whole.loss  # what it is without


def test_rows_of_another_number_of_steps_are_refused():
    draft, _ = make_draft("deepseek")
    rows = make_rows(draft, make_batch([[9]]), steps=3)
    assert len(TTTLoss(draft)(rows)[1].step_loss) == 3
    with pytest.raises(ValueError, match="built for 3 steps, this loss is for 7"):
        TTTLoss(draft, steps=7)(rows)
