"""Claims about training and runs: what the loop does with batches, ranks, interruptions and bad input."""

import errno
import io
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import settings
import train
from data import Document, anchors_of, best_fit, draft_vocabulary, lay_out, pack
from draft_deepseek import DeepseekV3Eagle3DraftModel, TTTLoss, export_config, export_state, import_state
from test_decode import TOY, toy_batch, toy_draft

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent


# ------------------------------------------------------------------------------------------------------------- packing


def test_rows_hold_every_document_once_and_are_full():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(3000, generator=generator).mul(0.8).add(5.5).exp().clamp(8, 2048).int().tolist()
    rows = pack(lengths, 2048, random.Random(0))
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert rows == pack(lengths, 2048, random.Random(0)) != pack(lengths, 2048, random.Random(1))
    tokens = [sum(lengths[i] for i in row) for row in rows]
    assert max(tokens) <= 2048 and sum(tokens) >= 0.99 * 2048 * len(rows)
    assert best_fit([0, 1, 2], [6, 5, 4], 10) == [[0, 2], [1]]


def test_anchors_are_the_slots_within_reach_of_a_learned_token():
    mask = torch.zeros(20, dtype=torch.bool)
    mask[9:12] = True
    assert anchors_of(mask, 7) == 9  # slots 2..10
    assert anchors_of(mask, 1) == 3 and anchors_of(mask[:1], 7) == 0 and anchors_of(~mask[:2], 3) == 1


def test_draft_vocabulary_counts_learned_tokens_and_keeps_special_ones():
    documents = [Document(torch.tensor([1, 2, 2, 3, 5, 5]), torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.bool), "")]
    assert draft_vocabulary(documents, 3, [9], 12).tolist() == [2, 3, 9]
    assert draft_vocabulary(documents, 6, [9], 12).tolist() == [0, 1, 2, 3, 4, 9]  # too few: the lowest ids fill up
    for size in (0, -1, 13, 2.5, True):
        with pytest.raises(ValueError, match="draft-vocab"):
            draft_vocabulary(documents, size, [9], 12)


def test_a_row_without_documents_is_padding():
    out = lay_out([[]], 8, (torch.zeros(0, 12), torch.zeros(0, 4)))
    assert (out["document"] == -1).all() and not out["loss_mask"].any() and out["features"].shape == (1, 8, 12)


def test_nothing_supervised_moves_nothing():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu"))
    optimizer = train.make_optimizer(args, parameters)
    text = torch.randint(32, (1, 20))
    learned, empty = (
        toy_batch(draft, text, mask.expand_as(text)) for mask in (torch.ones(20).bool(), torch.zeros(20).bool())
    )
    loss = TTTLoss(draft)
    train.optimizer_step(args, train.Ranks(), loss, [learned], optimizer, parameters)  # momentum that could move them
    before = [p.clone() for p in parameters]
    line = train.optimizer_step(args, train.Ranks(), loss, [empty], optimizer, parameters)
    assert line["supervised"] == 0 and line["loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_the_lambda_loss_does_not_depend_on_how_rows_are_grouped():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu", loss="lambda", clip=1e9))
    text = torch.randint(32, (3, 20), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(20) < torch.tensor([[5], [12], [20]])
    whole, found = toy_batch(draft, text, masks), []
    for window in ([whole], [toy_batch(draft, text[i : i + 1], masks[i : i + 1]) for i in range(3)]):
        optimizer = train.make_optimizer(args, parameters)
        optimizer.step = lambda: found.append([p.grad.clone() for p in parameters])  # noqa: B023
        line = train.optimizer_step(args, train.Ranks(), TTTLoss(draft, loss="lambda"), window, optimizer, parameters)
        found[-1].append(torch.tensor(line["loss"]))
    for one, many in zip(*found, strict=True):
        assert (one - many).abs().max() <= 1e-5 * one.abs().max()


# ---------------------------------------------------------------------------------------------------- export and import


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 32}, {"fc_norm": True, "norm_output": True}])
def test_export_import_export_is_identical_and_says_what_engines_read(changes):
    torch.manual_seed(0)
    config = TOY | {"draft_vocab_size": 20, "rope_theta": 1e4} | changes
    draft = DeepseekV3Eagle3DraftModel(config)
    if draft.config.draft_vocab_size == 20:
        draft.set_vocab_mapping(torch.arange(20) + 5)
    exported, state = export_config(draft), export_state(draft, torch.float32)
    assert exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and exported["model_type"] == "deepseek_v2"
    assert (
        exported["rope_theta"] == 1e4 and "rope_parameters" not in exported and exported["tie_word_embeddings"] is False
    )
    assert ("d2t" in state) == (draft.config.draft_vocab_size == 20) and not any(k.startswith("model.") for k in state)
    other = DeepseekV3Eagle3DraftModel(exported)
    published = {f"model.{k}".replace("layers.0.", "midlayer.") if "layers" in k else k: x for k, x in state.items()}
    import_state(other, published)
    again = export_state(other, torch.float32)
    assert again.keys() == state.keys() and all(torch.equal(again[k], state[k]) for k in state)
    assert export_config(other) == exported
    del published["fc.weight"]
    with pytest.raises(ValueError, match=r"missing \['model.fc.weight'\], unexpected \['model.odd'\]"):
        import_state(other, published | {"odd": torch.zeros(1)})


def test_the_readmes_code_runs():
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(code, names)
    assert names["loss"].isfinite() and names["draft"].lm_head.weight.grad.abs().sum() > 0


# ---------------------------------------------------------------------------------- one line instead of a traceback


def complaint(argv, capsys, code=2) -> str:
    """The one line that train.py ends with."""
    assert train.cli(["--device", "cpu", *map(str, argv)]) == code
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and ": error: " in said
    return said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"steps": "7"}', "steps is '7'; a whole number is wanted"),
        ('{"steps": 7.0}', "steps is 7.0; a whole number"),
        ('{"steps": true}', "steps is True; a whole number"),
        ('{"lr": "fast"}', "lr is 'fast'; a number"),
        ('{"lr": NaN}', "lr is nan"),
        ('{"clip": Infinity}', "clip is inf; it must be a positive number"),
        ('{"seed": null}', "seed is null; a whole number"),
        ('{"seed": 1%s}' % ("0" * 400), "seed is 10000"),
        ('{"seed": 1%s}' % ("0" * 5000), "settings.json cannot be used"),
        ('{"loss": "mse"}', "loss is 'mse'; one of ce, alpha, lambda"),
        ('{"loss": ["ce"]}', "loss is ['ce']; text is wanted"),
        ('{"target": {"a": {}}}', "target is {'a': {}}"),
        ('{"data": "chats.jsonl"}', "data is 'chats.jsonl'; a list of paths"),
        ('{"data": ["chats.jsonl", 3]}', "data holds 3"),
        ('{"data": []}', "data is ''; it must not be empty"),
        ('{"model": ""}', "model is ''; it must not be empty"),
        ('{"model": "a\\u0000b"}', "zero byte"),
        ('{"resume": "yes"}', "resume is 'yes'; true or false"),
        ('{"learning_rate": 1}', "says 'learning_rate', which is no setting"),
        ("[" * 3000, "settings.json cannot be used (RecursionError"),
        ('{"row_tokens": 1000000000}', "row_tokens is 1000000000; it must be at most 1,048,576"),
        ('{"steps": 3', "settings.json cannot be used"),
        ("", "settings.json cannot be used"),
    ],
)
def test_stored_settings_go_through_the_checks_of_the_flags(tmp_path, text, said, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(text)
    line = complaint(["--runs", tmp_path, "--name", "run", "--resume"], capsys)
    assert said in line and "settings.json" in line


def test_what_a_run_stores_is_read_again_as_it_was(tmp_path, monkeypatch):
    given = settings.Settings(data=["a", "b"], lr=1.0, steps=3, name="run", runs=str(tmp_path), seed=2**64 - 1, clip=3)
    (tmp_path / "run").mkdir()
    train.write_settings(train.Ranks(), tmp_path / "run", given)
    again, _ = train.parse(["--runs", str(tmp_path), "--name", "run", "--resume", "--steps", "4"])
    assert vars(again) == vars(given) | {"steps": 4, "resume": True}


@pytest.mark.parametrize("name", [f for f, x in settings.FIELDS.items() if settings.kind_of(x)[0] in (str, list)])
def test_no_path_or_name_is_empty(name, capsys):
    for text in ("", " "):
        assert settings.flag(name) in complaint([settings.flag(name), text], capsys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--capture", ""], "--capture"),
        (["--export", "", "x"], "--export"),
        (["--send", "http://localhost", ""], "--send"),
        (["--ttt-steps", 10**9], "--ttt-steps is 1000000000; it must be at most 64"),
        (["--row-tokens", 10**12], "--row-tokens"),
        (["--batch-rows", 10**12], "--batch-rows"),
        (["--accumulate", 10**12], "--accumulate"),
        (["--decode-tokens", 10**12], "--decode-tokens"),
        (["--epochs", 10**6], "--epochs"),
        (["--documents", 10**30], "--documents"),
        (["--steps", 10**30], "--steps"),
        (["--keep", 10**30], "--keep"),
        (["--seed", -1], "--seed is -1; it must be at least 0"),
        (["--seed", 2**64], "--seed"),
        (["--lr", 1e300], "--lr is 1e+300"),
        (["--draft-vocab", "9" * 5000], "--draft-vocab"),
        (["--follow", "x", "--follow-gb", 1e300], "--follow-gb"),
        (["--name", "x" * 300], "--name is 300 bytes long"),
        (["--device", "cuda:99"], "--device is cuda:99"),
        *(
            (["--device", name], f"--device is {name}, which this")
            for name in ("xpu", "vulkan", "privateuseone", "ipu")
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_made(tmp_path, flags, said, capsys):
    assert said in complaint(["--runs", tmp_path / "runs", *flags], capsys)
    assert not (tmp_path / "runs").exists()


def test_memory_is_asked_for_before_it_is_taken(runs, capsys, monkeypatch):
    flags = ["--runs", runs, "--name", "giant", "--documents", 20, "--row-tokens", 256, "--accumulate", 60_000]
    assert train.cli([*map(str, flags), "--device", "cpu", "--dry-run"]) == 0  # plans for another machine
    monkeypatch.setattr(train, "memory_of", lambda device: 1e9)
    assert train.cli([*map(str, flags), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "a step needs about" in said and "--accumulate 60000" in said and not (runs / "giant").exists()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 2),
        (OSError("disk"), 1),
        (OSError(errno.ENOSPC, "No space left"), 1),
        (OSError(errno.EIO, "I/O error"), 1),
        (OSError(errno.ENAMETOOLONG, "too long"), 2),
        (FileNotFoundError(errno.ENOENT, "absent"), 2),
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory."), 2),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 2),
    ],
)
def test_failures_have_one_line_and_their_exit_code(error, code, capsys, monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: (_ for _ in ()).throw(error))
    complaint([], capsys, code)


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: {}["x"])
    with pytest.raises(KeyError):
        train.cli([])


def test_help_begins_with_what_the_script_is(capsys):
    assert train.cli(["--help"]) == 0
    assert train.__doc__.splitlines()[0] in capsys.readouterr().out


def test_a_terminal_that_knows_ascii_alone_is_written_to(runs, tmp_path, monkeypatch):
    (tmp_path / "läufe").symlink_to(runs)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert train.cli(["--runs", str(tmp_path / "läufe"), "--device", "cpu", "--documents", "20", "--dry-run"]) == 0
    assert rb"l\xe4ufe" in ascii_only.buffer.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("script", "number"), [("train.py", signal.SIGINT), ("train.py", signal.SIGTERM), ("bench.py", signal.SIGINT)]
)
def test_a_signal_while_modules_load_is_one_line(script, number, tmp_path):
    said = (tmp_path / "said").open("w+")
    process = subprocess.Popen([sys.executable, ROOT / script, "--help"], stdout=said, stderr=said, cwd=tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait(60) == 130
    said.seek(0)
    assert said.read().split("\n") == ["", "interrupted before anything began", ""]
