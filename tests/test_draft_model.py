"""Claims about the drafts' other parts: K3's own, vocabularies, embeddings, dtypes, round trips, caches and memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import distributed

from draft_deepseek import TTTCache, TTTLoss
from draft_kimi_k3 import KimiK3Eagle3DraftModel, KimiK3Eagle3MLAAttention
from test_drafts import (
    DRAFT_IDS,
    SIZES,
    at_anchors,
    build_draft,
    close,
    config_of,
    make_batch,
    make_draft,
    make_rows,
    oracle,
    run_fast,
)
from tests.helpers import allocated, attention_of

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
