"""Claims about unrolling (PITFALLS 2, 8): training equals serving, the dense `forward` the fast path and the oracle."""

import math

import pytest
import torch
from transformers import DynamicCache

from draft_deepseek import TTTCache
from test_drafts import (
    DRAFT_IDS,
    at_anchors,
    close,
    close_gradients,
    left,
    make_batch,
    make_draft,
    make_rows,
    oracle,
    oracle_masks,
    run_fast,
)
from tests.helpers import hf_attention


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


class Unrolled(torch.nn.Module):
    """Three steps of the dense forward and the logits behind them."""

    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    def forward(self, tokens, state, mask):
        cache = [[], []]
        for _ in range(3):
            state = self.draft(tokens, state, mask, cache_hidden=cache)
        return self.draft.compute_logits(state)


@pytest.mark.parametrize("variant", ["deepseek-yarn", pytest.param("kimi", marks=pytest.mark.slow)])
def test_an_exported_forward_takes_rows_of_any_length(variant):
    unrolled = Unrolled(make_draft(variant)[0])

    def row(t):
        return torch.randint(0, 64, (2, t)), torch.randn(2, t, 24), torch.ones(2, t)

    any_length = ({1: torch.export.Dim("T", min=2, max=1 << 20)},) * 3
    program = torch.export.export(unrolled, row(9), dynamic_shapes=any_length).module()
    for t in (2, 5, 23):
        given = row(t)
        close(program(*given), unrolled(*given), 1e-6)


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
