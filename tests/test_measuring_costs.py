"""Claims about costs by formula: they count what autograd saves and what the products that run take."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench
from bench import Baseline, Ours, make_batch, make_config
from costs import model_flops, saved_by_baseline, saved_by_ours, workload
from draft_deepseek import build_rows
from tests.helpers import TINY_CELL


def saved_bytes(fn, exclude) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of fn, but for those of `exclude`."""
    known, found = {x.untyped_storage().data_ptr() for x in exclude}, {}

    def pack(x):
        found[x.untyped_storage().data_ptr()] = x  # kept alive, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = fn()
    assert result.requires_grad
    return sum(x.untyped_storage().nbytes() for address, x in found.items() if address not in known)


def saved_at(name: str, c: int, slots: int, anchors: int | None = None, recompute: str = "none") -> int:
    """What the baseline, or ours with `anchors`, keeps at the tiny size with c bytes per number."""
    cell = replace(TINY_CELL, draft=name, slots=slots, share=0.1, dtype="bfloat16" if c == 2 else "float32")
    draft = bench.make_draft(cell)
    batch = make_batch(cell, draft)
    if anchors is None:
        implementation = Baseline(draft)
        prepared = implementation.prepare(batch)
    else:
        implementation, (*row, head) = Ours(draft), batch
        implementation.ttt_loss.recompute = recompute
        prepared = (build_rows(draft.draft_ids, *row, lambda x: x @ head.T, steps=bench.STEPS, anchors=anchors),)
    flat = [x for part in prepared for x in (part if isinstance(part, tuple) else [part]) if torch.is_tensor(x)]
    with bench.autocast(cell):
        return saved_bytes(lambda: implementation(*prepared), [*draft.parameters(), *flat])


@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("name", bench.DRAFTS)
def test_saved_bytes_by_formula_are_what_autograd_saves(name, c):
    cfg = make_config(name, "tiny")
    base = saved_at(name, c, 128, 80)
    ours = saved_by_ours(cfg, c, bench.STEPS)
    assert saved_at(name, c, 128, 110) - base == 30 * ours.anchor
    assert saved_at(name, c, 192, 80) - base == 64 * ours.slot
    first, second, third = (saved_at(name, c, slots) for slots in (64, 128, 192))
    dense = saved_by_baseline(cfg, c, bench.STEPS)
    assert third - 2 * second + first == 2 * 64**2 * dense.pair
    assert second - first == 64 * dense.slot + (128**2 - 64**2) * dense.pair


@pytest.mark.parametrize("name", bench.DRAFTS)
def test_saved_bytes_with_recompute_step(name):
    """The checkpoint also holds the token half [T,..] and the mask's two bounds [A], in lists that no hook sees."""
    cfg = make_config(name, "tiny")
    base, ours = saved_at(name, 4, 128, 80, "step"), saved_by_ours(cfg, 4, bench.STEPS, "step")
    gate = cfg.num_attention_heads * cfg.v_head_dim if name == "kimi-k3" else 0
    token_half = 4 * (cfg.q_lora_rank + cfg.kv_lora_rank + cfg.qk_rope_head_dim + gate)
    assert saved_at(name, 4, 192, 80, "step") - base == 64 * (ours.slot - token_half)
    assert 0 <= 30 * ours.anchor - (saved_at(name, 4, 128, 110, "step") - base) <= 30 * 2 * 8
    assert ours.anchor + ours.remade < saved_by_ours(cfg, 4, bench.STEPS).anchor / 2


@pytest.mark.parametrize("name", bench.DRAFTS)
def test_model_flops_are_those_of_the_products_that_run(name):
    """The baseline's products counted by PyTorch: full T x T scores, own keys pointwise, the token half every step."""
    cell = replace(TINY_CELL, draft=name, share=1.0, packed=False)
    draft = bench.make_draft(cell)
    batch, one, t, steps = make_batch(cell, draft), Baseline(draft), cell.slots, bench.STEPS
    with FlopCounterMode(display=False) as counter:
        one(*one.prepare(batch)).backward()
    cfg = draft.config
    counts = dict(slots=t, pairs=steps * t, later_pairs=(steps - 1) * t, keys_read=steps * t * t, own_keys_read=0)
    formula = model_flops(cfg, **counts, supervised=steps * t, taught=t)
    gate = cfg.num_attention_heads * cfg.v_head_dim if name == "kimi-k3" else 0
    token_half = cfg.hidden_size * (cfg.q_lora_rank + cfg.kv_lora_rank + cfg.qk_rope_head_dim + gate)
    assert counter.get_total_flops() == sum(formula.values()) + 6 * (steps - 1) * t * token_half


def test_workload_counts_every_pair_by_hand():
    """Documents of 4 and 3 slots, all supervised: slot t of a document of n is needed at steps below n - 1 - t."""
    document = torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    position = torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    batch = bench.Batch(document, document, position, None, torch.ones_like(document), None, None)
    got = workload(batch.document, batch.loss_mask, batch.position, bench.STEPS)
    steps = {0: 3, 1: 2, 2: 1}, {0: 2, 1: 1}  # slot: steps
    pairs = [(t, s) for of in steps for t, n in of.items() for s in range(n)]
    assert got == {
        "slots": 7,
        "pairs": len(pairs),
        "later_pairs": sum(s > 0 for _, s in pairs),
        "keys_read": sum(t + 1 for t, _ in pairs),
        "own_keys_read": sum(s for _, s in pairs),
        "supervised": len(pairs),
        "taught": 5,
    }
