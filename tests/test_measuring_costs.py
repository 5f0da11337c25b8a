"""Claims about costs by formula: they count what autograd saves and what the products that run take."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from draft_deepseek import RowChunks
from measuring import step
from measuring.costs import cgroup_memory, key_numbers, model_flops, saved_by_baseline, saved_by_ours, workload
from measuring.step import Baseline, Ours, make_batch, make_config
from tests.helpers import TINY_CELL


def saved_bytes(fn, exclude) -> int:
    """Bytes of the distinct storages that autograd keeps for the backward of fn, but for those of `exclude`."""
    known, found = {x.untyped_storage().data_ptr() for x in exclude}, {}

    def pack(x):
        found[x.untyped_storage().data_ptr()] = x  # kept alive, so that no address is used twice
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = fn()
    assert any(x.requires_grad for x in torch.utils._pytree.tree_leaves(result) if torch.is_tensor(x))
    return sum(x.untyped_storage().nbytes() for address, x in found.items() if address not in known)


def saved_at(name: str, c: int, part: str, slots: int, chunk: int = 80) -> int:
    """What the baseline, or the keys or a chunk of ours, keeps at the tiny size with c bytes per number."""
    cell = replace(TINY_CELL, draft=name, slots=slots, share=1.0, dtype="bfloat16" if c == 2 else "float32")
    draft = step.make_draft(cell)
    batch, ours, baseline = make_batch(cell, draft), Ours(draft, chunk=chunk), Baseline(draft)
    with step.autocast(cell):
        if part == "baseline":
            given, function = baseline.prepare(batch), baseline
        else:
            (*row, head), loss = batch, ours.ttt_loss
            rows = RowChunks(draft.draft_ids, *row, lambda x: F.linear(x, head), steps=step.STEPS, chunk=chunk)
            given, function = (F.pad(rows.tokens, (0, 1)), rows.position, rows.features), loss.keys
        if part == "chunk":
            given = loss.read(rows).keys, next(iter(rows))
            function = lambda keys, rows: loss.chunk(keys, rows)[0]  # noqa: E731
        flat = [x for x in torch.utils._pytree.tree_leaves(given) if torch.is_tensor(x)]
        return saved_bytes(lambda: function(*given), [*draft.parameters(), *flat])


@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("name", step.DRAFTS)
def test_saved_bytes_by_formula_are_what_autograd_saves(name, c):
    cfg = make_config(name, "tiny")
    ours, dense = (formula(cfg, c, step.STEPS) for formula in (saved_by_ours, saved_by_baseline))
    base = saved_at(name, c, "chunk", 128)
    assert saved_at(name, c, "chunk", 128, 110) - base == 30 * ours.anchor
    assert saved_at(name, c, "chunk", 192) == base  # nothing that grows with the row
    assert saved_at(name, c, "keys", 192) - saved_at(name, c, "keys", 128) == 64 * ours.slot
    first, second, third = (saved_at(name, c, "baseline", slots) for slots in (64, 128, 192))
    assert third - 2 * second + first == 2 * 64**2 * dense.pair
    assert second - first == 64 * dense.slot + (128**2 - 64**2) * dense.pair


@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("name", step.DRAFTS)
def test_numbers_of_the_keys_by_formula_are_those_that_chunks_read(name, c):
    cell = replace(TINY_CELL, draft=name, dtype="bfloat16" if c == 2 else "float32")
    draft = step.make_draft(cell)
    ours = Ours(draft)
    with step.autocast(cell):
        leaves = ours.ttt_loss.read(*ours.prepare(make_batch(cell, draft)))
    for keys, width in ((leaves.keys, c), (leaves.gradients, 4)):
        assert sum(x.nbytes for x in keys if x is not None) == cell.slots * key_numbers(draft.config) * width


@pytest.mark.parametrize("name", step.DRAFTS)
def test_model_flops_are_those_of_the_products_that_run(name):
    """The baseline's products counted by PyTorch: full T x T scores, own keys pointwise, the token half every step."""
    cell = replace(TINY_CELL, draft=name, share=1.0, packed=False)
    draft = step.make_draft(cell)
    batch, one, t, steps = make_batch(cell, draft), Baseline(draft), cell.slots, step.STEPS
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
    batch = step.Batch(document, document, position, None, torch.ones_like(document), None, None)
    got = workload(batch.document, batch.loss_mask, batch.position, step.STEPS)
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


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "max\n"}, 4096),
        ("0::/job/step\n", {"job/memory.max": "4096\n", "job/step/memory.max": "512\n"}, 512),
        ("0::/host/name/of/a/container\n", {"memory.max": "2048\n"}, 2048),
        ("5:cpu:/x\n4:memory:/x\n0::/\n", {"memory/x/memory.limit_in_bytes": "1024\n", "cpu/x/memory.max": "1"}, 1024),
        ("0::/\n", {}, float("inf")),
        (None, {}, float("inf")),
    ],
)
def test_the_memory_of_a_container_is_its_own(tmp_path, own, files, limit):
    for name, text in files.items():
        (tmp_path / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "groups" / name).write_text(text)
    if own is not None:
        (tmp_path / "own").write_text(own)
    assert cgroup_memory(tmp_path / "own", tmp_path / "groups") == limit
