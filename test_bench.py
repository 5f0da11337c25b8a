"""Claims about bench.py: what it compares is the same mathematics, and its formulas count what autograd really does."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import bench
import bench_decode
from bench import Baseline, Cell, Ours, make_batch, make_config
from costs import key_numbers, model_flops, saved_by_baseline, saved_by_ours, workload
from draft_deepseek import valid_slots

TINY = Cell(size="tiny", slots=96, share=0.5)


def sharp_draft(cell):
    """Weights large enough that masks, angles and the order of steps show in every gradient."""
    draft = bench.make_draft(cell)
    with torch.no_grad():
        for p in draft.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.dim() > 1 else 1 + 0.3 * torch.randn_like(p))
    return draft


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", bench.DRAFTS)
def test_the_baseline_has_our_loss_and_gradients(name, packed):
    cell = replace(TINY, draft=name, packed=packed)
    draft = sharp_draft(cell)
    batch = make_batch(cell, draft)
    want, got = (bench.gradients(cell, draft, batch, one) for one in (Baseline(draft), Ours(draft, chunk=20)))
    assert want.keys() == got.keys() and len(want) > 15
    for key, gradient in want.items():
        assert gradient.abs().max() > 0, key
        assert (gradient - got[key]).abs().max() <= 2e-5 * gradient.abs().max(), key


@pytest.mark.parametrize(
    "defect", [lambda b: b._replace(position=b.position * 2), lambda b: b._replace(document=b.document * 0)]
)
def test_a_disagreement_is_found_before_anything_is_timed(defect):
    draft = sharp_draft(TINY)
    batch, ours = make_batch(TINY, draft), Ours(draft, chunk=20)
    impls = {"baseline": Baseline(draft), "ours eager": ours}
    bench.check(TINY, draft, batch, impls)
    prepare = ours.prepare
    ours.prepare = lambda batch: prepare(defect(batch))
    with pytest.raises(bench.Disagreement, match=r"ours eager differs from baseline: .*q_b_proj"):
        bench.check(TINY, draft, batch, impls)


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
    cell = replace(TINY, draft=name, slots=slots, share=1.0, dtype="bfloat16" if c == 2 else "float32")
    draft = bench.make_draft(cell)
    batch, ours, baseline = make_batch(cell, draft), Ours(draft, chunk=chunk), Baseline(draft)
    with bench.autocast(cell):
        if part == "baseline":
            given, function = baseline.prepare(batch), baseline
        else:
            (rows,), loss = ours.prepare(batch), ours.ttt_loss
            given, function = (rows.tokens, rows.position, rows.features), loss.keys
        if part == "chunk":
            given = loss.read(rows).keys, next(iter(rows))
            function = lambda keys, rows: loss.chunk(keys, rows)[0]  # noqa: E731
        flat = [x for x in torch.utils._pytree.tree_leaves(given) if torch.is_tensor(x)]
        return saved_bytes(lambda: function(*given), [*draft.parameters(), *flat])


@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("name", bench.DRAFTS)
def test_saved_bytes_by_formula_are_what_autograd_saves(name, c):
    cfg = make_config(name, "tiny")
    ours, dense = (formula(cfg, c, bench.STEPS) for formula in (saved_by_ours, saved_by_baseline))
    base = saved_at(name, c, "chunk", 128)
    assert saved_at(name, c, "chunk", 128, 110) - base == 30 * ours.anchor
    assert saved_at(name, c, "chunk", 192) == base  # nothing that grows with the row
    assert saved_at(name, c, "keys", 192) - saved_at(name, c, "keys", 128) == 64 * ours.slot
    first, second, third = (saved_at(name, c, "baseline", slots) for slots in (64, 128, 192))
    assert third - 2 * second + first == 2 * 64**2 * dense.pair
    assert second - first == 64 * dense.slot + (128**2 - 64**2) * dense.pair


@pytest.mark.parametrize("c", [4, 2])
@pytest.mark.parametrize("name", bench.DRAFTS)
def test_numbers_of_the_keys_by_formula_are_those_that_chunks_read(name, c):
    cell = replace(TINY, draft=name, dtype="bfloat16" if c == 2 else "float32")
    draft = bench.make_draft(cell)
    ours = Ours(draft)
    with bench.autocast(cell):
        leaves = ours.ttt_loss.read(*ours.prepare(make_batch(cell, draft)))
    for keys, width in ((leaves.keys, c), (leaves.gradients, 4)):
        assert sum(x.nbytes for x in keys if x is not None) == cell.slots * key_numbers(draft.config) * width


@pytest.mark.parametrize("name", bench.DRAFTS)
def test_model_flops_are_those_of_the_products_that_run(name):
    """The baseline's products counted by PyTorch: full T x T scores, own keys pointwise, the token half every step."""
    cell = replace(TINY, draft=name, share=1.0, packed=False)
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


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_answers_end_their_documents_and_make_up_the_share(share):
    cell = replace(TINY, slots=1024, share=share)
    batch = make_batch(cell, bench.make_draft(cell))
    assert batch.document.unique().numel() > 3
    assert abs(batch.loss_mask.float().mean() - share) < 0.02
    for number in batch.document.unique():
        mask = batch.loss_mask[batch.document == number]
        assert (mask.diff() >= 0).all() and mask[-1] == 1
    assert valid_slots(batch.document, batch.loss_mask, 1).sum() <= batch.loss_mask.sum()


def test_the_last_line_of_the_train_suite_is_json(tmp_path, capsys):
    out = tmp_path / "full.json"
    flags = ["--size", "tiny", "--row-tokens", "64", "--share", "0.5", "--rounds", "1", "--threads", "1", "--out"]
    bench.main([*flags, str(out)])
    result, full = json.loads(capsys.readouterr().out.splitlines()[-1]), json.loads(out.read_text())
    baseline, ours = result["rows"]
    assert (baseline["implementation"], ours["implementation"]) == ("baseline", "ours eager")
    assert baseline["faster"] == 1.0 and ours["faster"] > 0 and 0 < ours["mfu"] < 1
    if sys.platform == "linux":
        assert 0 < ours["memory_share"] < 2 and len(result["peak_of_2t_over_t"]) == 1
    assert full["rows"] == result["rows"]
    assert {"step 0", "later steps", "attention", "loss", "backward", "keys", "optimizer"} < full["cells"][0][
        "breakdown"
    ].keys()


def test_the_shapes_suite_ends_in_json(capsys, tmp_path):
    bench.main(["--suite", "shapes", "--out", str(tmp_path / "out")])
    drafts = json.loads(capsys.readouterr().out.splitlines()[-1])["drafts"]
    v3 = drafts[0]
    assert v3["cache_bytes"] == [2 * 576, 2 * 40960]  # DESIGN.md's 576 and 40,960 numbers
    assert {row["draft"] for row in drafts} == {"deepseek-v3", "kimi-k2.5", "kimi-k3"}
    v3 = json.loads((tmp_path / "out").read_text())["cells"][0]["memory"]
    assert {"weights", "keys", "saved"} < v3["T 4096 100%"]["ours"].keys()
    assert sum(v3["T 131072 100%"]["ours"].values()) < sum(v3["T 131072 100%"]["dense"].values()) / 500


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rounds", "0"],
        ["--share", "1.5"],
        ["--row-tokens", "0"],
        ["--suite", "h200"],
        ["--row-tokens", "1000000"],
        ["--row-tokens", "1000000000000"],
        ["--threads", "1000000"],
        ["--k", "1000"],
        ["--temperature", "nan"],
        ["--new-tokens", "1000000000"],
        ["--prompts", ""],
        ["--model", ""],
        ["--run", ""],
        ["--out", ""],
    ],
)
def test_bad_input_is_named_with_exit_code_2(arguments, capsys):
    assert bench.cli(arguments) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said and said.count("\n") == 1


def test_out_is_tried_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "there").write_text("mine")
    monkeypatch.setattr(bench, "SUITES", dict.fromkeys(bench.SUITES))  # whatever would measure fails
    for out, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "there", "exists already"),
        (tmp_path / "a" / "b", "no such"),
    ):
        assert bench.cli(["--out", str(out)]) == 2
        assert said in capsys.readouterr().err and (tmp_path / "there").read_text() == "mine"

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.tempfile, "TemporaryFile", full)
    assert bench.cli(["--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "--out" in said and "No space left" in said and said.count("\n") == 1


def test_caches_that_cannot_fit_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(bench_decode, "memory_bandwidth", lambda *_: 1e9)
    flags = ["--suite", "decode", "--size", "tiny", "--batch", "4096", "--context", str(1 << 20)]
    assert bench.cli(flags) == 2
    assert "error: --batch 4096 rows of --context 1048576 need about" in capsys.readouterr().err


def test_a_prompt_file_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    args = bench.parse(["--suite", "decode", "--prompts", str(tmp_path / "fifo")])
    with pytest.raises(ValueError, match="--prompts .* is a FIFO"):
        bench_decode.load_prompts(args, None)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("reset", [True, False])
def test_peak_memory_sees_what_was_freed_again(monkeypatch, reset):
    if not reset:  # where the kernel's mark may not be reset, a thread samples

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(Path, "write_text", refuse)
    with bench.PeakMemory("cpu") as peak:
        x = torch.ones(16 << 20)
        x.add_(1)
        del x
    assert 60e6 < peak.growth < 120e6
