"""Claims about runs: interrupted, killed, out of disk, on several ranks; they resume exactly or end with one line."""

import json
import multiprocessing
import os
import queue
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import drafts
import files
import target
import train
from conversations import answered
from data import Document, anchors_of, cut_to, pack, python_documents
from sources import teacher_check
from target import byte_tokenizer
from test_decode import toy_batch, toy_draft, toy_rows

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent
FORK = multiprocessing.get_context("fork")  # a child has all that is imported and parsed: a run starts in a second


SHORT = ["--row-tokens", "256", "--ttt-steps", "3", "--eval-rows", "1", "--decode-prompts", "1", "--decode-tokens", "9"]
SHORT += ["--save-every", "3", "--device", "cpu", "--documents", "100"]


def command(runs, name, *flags):
    return ["--runs", str(runs), "--name", name, *SHORT, *map(str, flags)]


def start(argv, output, patch=lambda: None):
    """`train.py argv` as a process of its own, its output in a file; `patch()` is called in it first."""

    def child():
        with output.open("w") as sys.stdout:
            sys.stderr = sys.stdout
            patch()
            code = train.cli(argv)
        os._exit(code)  # not through the parent's own clean-up

    process = FORK.Process(target=child)
    process.start()
    return process


def finish(process, output, code):
    process.join(200)
    assert process.exitcode == code, f"exit code {process.exitcode}: {output.read_text()[-3000:]}"
    return output.read_text()


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start_ranks(argv, folder):
    """`train.py argv` as torchrun starts it on two ranks: its processes, each with the file of its output."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    outputs = [folder / f"output-{rank}" for rank in range(2)]
    return [
        (start(argv, output, lambda rank=rank: os.environ.update(rank)), output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


def weights(runs, name, step):
    return load_file(runs / name / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def log(runs, name):
    return [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]


def assert_same_run(runs, one, two, step):
    """Bit for bit: the weights, and what every step logged but its speed."""
    a, b = weights(runs, one, step), weights(runs, two, step)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logs = [[{k: x for k, x in line.items() if k != "tokens_per_second"} for line in log(runs, n)] for n in (one, two)]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == list(range(1, step + 1))


@pytest.mark.parametrize("preset", ["deepseek-v3", "kimi-k3"])
def test_a_run_trains_evaluates_and_exports(runs, preset, capsys):
    train.main(
        command(runs, f"run-{preset}", "--target", preset, "--steps", 4, "--ttt-steps", 7, "--export-dtype", "float32")
    )
    output = capsys.readouterr().out
    assert "simulated" in output and "1 of 1 identical" in output
    run = runs / f"run-{preset}"
    assert [line["step"] for line in log(runs, run.name)] == [1, 2, 3, 4]
    state, trained = load_file(run / "draft" / "model.safetensors"), weights(runs, run.name, 4)
    target = load_file(runs / f"tiny-{preset}" / "model.safetensors")
    embedding = next(x for name, x in target.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(state["embed_tokens.weight"], embedding)  # engines share it: never trained
    assert torch.equal(state["layers.0.mlp.up_proj.weight"], trained["model.layers.0.mlp.up_proj.weight"])
    norms = torch.cat([x for name, x in state.items() if x.ndim == 1 and x.is_floating_point()])
    assert (norms == 1).float().mean() < 0.01  # float32 masters: norms move
    with pytest.raises(ValueError, match="is complete"):
        train.main(command(runs, run.name, "--resume"))


# -------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.fixture(scope="module")
def whole(runs):
    """The undisturbed run that others are compared with."""
    python_documents(True), python_documents(False)  # parsed here, once
    train.main(command(runs, "whole", *WHOLE))
    return "whole"


WHOLE = ["--steps", 7, "--accumulate", 2]


@pytest.mark.parametrize("cut", [1, 4, pytest.param(57, marks=pytest.mark.slow)])
def test_resumed_equals_undisturbed_bit_for_bit(runs, cut, monkeypatch):
    steps = 100 if cut == 57 else 7
    flags = ["--steps", steps]
    if not (runs / f"plain-{steps}").exists():
        train.main(command(runs, f"plain-{steps}", *flags))
    save = train.save_checkpoint

    def stop_after(run, draft, optimizer, step, *rest):
        save(run, draft, optimizer, step, *rest)
        if step == cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "save_checkpoint", stop_after)
    with pytest.raises(KeyboardInterrupt):
        train.main(command(runs, f"cut-{cut}", *flags, "--save-every", cut))
    monkeypatch.undo()
    train.main(command(runs, f"cut-{cut}", *flags, "--resume"))
    assert_same_run(runs, f"plain-{steps}", f"cut-{cut}", steps)


PHASES = [
    (train, "open_source"),
    (train, "optimizer_step"),
    (torch, "save"),
    (train, "evaluate"),
    (drafts, "save_file"),
]
QUICK = [(train, "make_draft"), (train, "make_rows"), (train, "decode_for_real")]


@pytest.mark.parametrize(("module", "name"), [*PHASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in QUICK)])
def test_sigterm_in_any_phase_leaves_a_run_that_resumes(runs, whole, module, name, tmp_path):
    original = getattr(module, name)

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    run = f"term-{name}"
    output = tmp_path / "output"
    stopped = start(command(runs, run, *WHOLE), output, lambda: setattr(module, name, signalled))
    assert "interrupted" in finish(stopped, output, 130)
    finish(start(command(runs, run, "--resume"), output), output, 0)
    assert_same_run(runs, whole, run, 7)
    assert (runs / run / "draft" / "model.safetensors").exists()
    assert not list((runs / run).rglob("*.part"))


def test_sigterm_while_the_target_is_made_leaves_no_target_and_a_run_that_resumes(tmp_path, short_training):
    def quick():
        target.TINY_STEPS = {"deepseek-v3": 3}
        if stopping:
            target.next_token_loss = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)

    output, stopping = tmp_path / "output", True
    finish(start(command(tmp_path, "made", "--steps", 2), output, quick), output, 130)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "output"]
    stopping = False
    finish(start(command(tmp_path, "made", "--resume"), output, quick), output, 0)
    assert len(log(tmp_path, "made")) == 2


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_ends_as_if_undisturbed(runs, kills, tmp_path):
    rng, name, output = random.Random(kills), f"killed-{kills}", tmp_path / "output"
    steps = 3 * kills
    flags = ["--steps", steps, "--save-every", 1, "--ttt-steps", 7]  # so slow that no run ends before it is killed
    train.main(command(runs, f"calm-{kills}", *flags))
    for _ in range(kills):
        before = newest(runs / name)
        process = start(command(runs, name, *flags, "--resume"), output)
        while process.exitcode is None and newest(runs / name) == before:  # until it has gone one step on
            time.sleep(0.01)
        process.join(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"{process.exitcode}: {output.read_text()[-2000:]}"
    finish(start(command(runs, name, *flags, "--resume"), output), output, 0)
    assert_same_run(runs, f"calm-{kills}", name, steps)


def newest(run):
    return max((run / "checkpoints").glob("step-????????"), default=None)


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_checkpoint(runs, whole, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    output, name = tmp_path / "output", "full"
    save = train.save_checkpoint

    def full_at_6():
        def save_(run, draft, optimizer, step, *rest):
            if step == 6:
                small_files()
            save(run, draft, optimizer, step, *rest)

        train.save_checkpoint = save_

    said = finish(start(command(runs, name, *WHOLE), output, full_at_6), output, 1)
    assert "step-00000006 cannot be written" in said.splitlines()[-1]
    assert [path.name for path in (runs / name / "checkpoints").iterdir()] == ["step-00000003"]
    finish(start(command(runs, name, "--resume"), output), output, 0)
    assert_same_run(runs, whole, name, 7)


@pytest.mark.parametrize("flags", [["--documents", 30], ["--seed", 1, "--held-out", 0.3]])
def test_a_run_keeps_its_draft_vocabulary_whatever_its_data_become(runs, whole, flags, monkeypatch):
    name = f"moved-{len(flags)}"
    shutil.copytree(runs / whole, runs / name, ignore=shutil.ignore_patterns("draft"))
    seen, make_rows = [], train.make_rows
    monkeypatch.setattr(
        train, "make_rows", lambda args, source, ids, mask: seen.append(ids) or make_rows(args, source, ids, mask)
    )
    train.main(command(runs, name, "--resume", "--steps", 8, *flags))
    d2t = weights(runs, name, 8)["d2t"]
    assert torch.equal(seen[0], d2t + torch.arange(len(d2t))) and torch.equal(d2t, weights(runs, whole, 7)["d2t"])
    assert log(runs, name)[-1]["loss"] < 1.2 * log(runs, name)[0]["loss"]


def test_a_resume_that_fails_leaves_the_settings_as_they_were(runs, whole):
    shutil.copytree(runs / whole, runs / "typo", ignore=shutil.ignore_patterns("draft"))
    before = (runs / "typo" / "settings.json").read_text()
    for flags, said in ((["--data", "nowhere"], "nowhere"), (["--draft-vocab", 50], "bound to one of 96")):
        with pytest.raises(ValueError, match=said):
            train.main(command(runs, "typo", "--resume", *flags))
        assert (runs / "typo" / "settings.json").read_text() == before
    newest = max((runs / "typo" / "checkpoints").iterdir())
    (newest / "training.pt").write_bytes((newest / "training.pt").read_bytes()[:-9])
    with pytest.raises(ValueError, match="training.pt cannot be used.*remove .*step-00000007"):
        train.main(command(runs, "typo", "--resume"))
    (runs / "typo" / "settings.json").write_text("[]")
    with pytest.raises(SystemExit):
        train.main(command(runs, "typo", "--resume"))


# ----------------------------------------------------------------------------------- whole or absent, and nobody else's


class Killed(BaseException):
    """Stands for kill -9: nothing is cleaned up after it."""


def failing(monkeypatch, name, how):
    """The next rename to `name` does not come about: the disk is full, or the process is killed before or after it."""
    rename = os.replace

    def replace(source, to):
        if Path(to).name != name:
            return rename(source, to)
        if how == "full":
            raise OSError(28, "No space left on device")
        monkeypatch.setattr(files, "discard", lambda half: None)
        if how == "after":
            rename(source, to)
        raise Killed

    monkeypatch.setattr(files.os, "replace", replace)


BRIEF = ["--steps", 2, "--save-every", 1, "--row-tokens", 256, "--documents", 30, "--decode-prompts", 0]
WINDOWS = ["settings.json", "step-00000001", "log.jsonl", "step-00000002", "draft", "result.json"]
WINDOWS = {"full": WINDOWS, "before": WINDOWS, "after": [w for w in WINDOWS if w != "log.jsonl"]}  # no line to cut then


@pytest.fixture(scope="module")
def brief(runs):
    train.main(command(runs, "brief", *BRIEF))
    return "brief"


@pytest.mark.parametrize("how", ["full", "before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_failure_in_every_rename_loses_nothing(runs, brief, how, monkeypatch, capsys):
    name = f"windows-{how}"
    for window in WINDOWS[how]:
        with monkeypatch.context() as patch:
            failing(patch, window, how)
            if how == "full":
                assert train.cli(command(runs, name, *BRIEF, "--resume")) == 1
                error = capsys.readouterr().err.splitlines()[-1]
                assert f"{window} cannot be written" in error and "No space left" in error
            else:
                with pytest.raises(Killed):
                    train.main(command(runs, name, *BRIEF, "--resume"))
                assert how == "after" or any(files.is_part(path) for path in (runs / name).rglob("*"))
        if window == "log.jsonl":  # it is to be cut, and nothing of it was lost
            assert len(log(runs, name)) == 1
    if how == "after":
        with pytest.raises(ValueError, match="is complete"):
            train.main(command(runs, name, *BRIEF, "--resume"))
    else:
        train.main(command(runs, name, *BRIEF, "--resume"))
    assert_same_run(runs, brief, name, 2)
    assert (runs / name / "result.json").read_bytes() == (runs / brief / "result.json").read_bytes()
    assert {x.name for x in (runs / name).iterdir()} == {x.name for x in (runs / brief).iterdir()}
    assert not any(files.is_part(path) for path in (runs / name).rglob("*"))


@pytest.mark.slow  # some twenty processes
@pytest.mark.parametrize("how", ["before", "after"])
def test_kill_9_in_every_rename_window_loses_nothing(runs, brief, how, tmp_path):
    name, output = f"kill-9-{how}", tmp_path / "output"
    for window in WINDOWS[how]:

        def deadly(window=window):
            rename = os.replace

            def replace(source, to):
                if Path(to).name == window and how == "before":
                    os.kill(os.getpid(), signal.SIGKILL)
                rename(source, to)
                if Path(to).name == window:
                    os.kill(os.getpid(), signal.SIGKILL)

            files.os.replace = replace

        finish(start(command(runs, name, *BRIEF, "--resume"), output, deadly), output, -signal.SIGKILL)
    finish(start(command(runs, name, *BRIEF, "--resume"), output), output, 0 if how == "before" else 2)
    assert_same_run(runs, brief, name, 2)
    assert (runs / name / "result.json").read_bytes() == (runs / brief / "result.json").read_bytes()


def test_a_full_disk_under_the_log_is_one_line_and_the_run_resumes(runs, brief, monkeypatch, capsys):
    class Full:
        """A file that takes one line."""

        def __init__(self, file):
            self.file, self.name, self.room = file, file.name, 2  # print writes the line and its end apart

        def write(self, text):
            self.room -= 1
            if self.room < 0:
                raise OSError(28, "No space left on device")
            return self.file.write(text)

        def flush(self):
            self.file.flush()

        def close(self):
            self.file.close()

    with monkeypatch.context() as patch:
        patch.setattr(train, "trimmed", lambda path, done: Full(drafts.trimmed(path, done)))
        assert train.cli(command(runs, "full-log", *BRIEF)) == 1
    assert "log.jsonl cannot be written (No space left on device)" in capsys.readouterr().err.splitlines()[-1]
    train.main(command(runs, "full-log", *BRIEF, "--resume"))
    assert_same_run(runs, brief, "full-log", 2)


def test_a_run_stopped_before_its_settings_begins_on_resume(runs):
    given = train.Settings(runs=str(runs), name="unborn", resume=True)
    for left in ((), ("lock",), ("lock", ".settings.json-77-0123abcd.part")):
        (runs / "unborn").mkdir()
        for name in left:
            (runs / "unborn" / name).touch()
        with train.open_run(given, train.Ranks()) as run:
            assert sorted(path.name for path in run.iterdir()) == ["lock", "settings.json"]
        shutil.rmtree(runs / "unborn")
    (runs / "unborn").mkdir()
    (runs / "unborn" / "notes.txt").write_text("the user's")
    with pytest.raises(ValueError, match="has no settings.json"), train.open_run(given, train.Ranks()):
        pass
    assert [path.name for path in (runs / "unborn").iterdir()] == ["notes.txt"]


def test_what_lies_beside_checkpoints_is_the_users(runs, brief):
    name = "guests"
    shutil.copytree(runs / brief, runs / name, ignore=shutil.ignore_patterns("draft"))
    folder = runs / name / "checkpoints"
    guests = ["step-original", "step-zzzzzzzz", "step-00000002.bak", "step-00000009.part", ".old.part", "step-1"]
    for guest in guests:
        (folder / guest).mkdir()
        (folder / guest / "kept").touch()
    (folder / "step-00000077").touch()  # no folder
    (folder / ".step-00000003-12-0a0b0c0d.part").mkdir()  # a killed writer's
    train.main(command(runs, name, *BRIEF, "--resume", "--steps", 4, "--keep", 1))
    assert {path.name for path in folder.iterdir()} == {*guests, "step-00000077", "step-00000004"}
    assert all((folder / guest / "kept").exists() for guest in guests)


def test_an_export_leaves_what_is_the_users_and_only_one_of_two_writes(runs, brief, tmp_path, monkeypatch):
    checkpoint, out = runs / brief / "checkpoints" / "step-00000002", tmp_path / "foo"
    (tmp_path / "foo.part").mkdir()
    (tmp_path / "foo.part" / "notes.txt").write_text("the user's")
    save_file = drafts.save_file

    def save_as_another_does(state, path, metadata):
        with monkeypatch.context() as patch:
            patch.setattr(drafts, "save_file", save_file)
            train.main(["--export", str(checkpoint), str(out)])
        (out / "whose").write_text("the faster one's")
        save_file(state, path, metadata)

    monkeypatch.setattr(drafts, "save_file", save_as_another_does)
    with pytest.raises(ValueError, match="exists already"):
        train.main(["--export", str(checkpoint), str(out)])
    assert (out / "whose").exists() and (tmp_path / "foo.part" / "notes.txt").read_text() == "the user's"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foo", "foo.part"]


def test_a_full_disk_in_export_is_one_line_and_exit_code_1(runs, brief, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))

    checkpoint, output = runs / brief / "checkpoints" / "step-00000002", tmp_path / "output"
    argv = ["--export", str(checkpoint), str(tmp_path / "new" / "draft")]
    said = finish(start(argv, output, small_files), output, 1)
    assert said.count("\n") == 1 and "draft cannot be written (SafetensorError" in said
    assert not list((tmp_path / "new").iterdir())


def test_writing_is_whole_or_absent(tmp_path):
    (tmp_path / "foo.part").write_text("the user's")
    halves = []

    def write(text):
        return lambda half: halves.append(half) or half.write_text(text)

    def broken(error):
        def write(half):
            half.mkdir()
            (half / "weights").write_text("some")
            raise error

        return write

    files.replace_with(tmp_path / "foo", write("one"))
    files.replace_with(tmp_path / "foo", write("two"))
    assert (tmp_path / "foo").read_text() == "two" and halves[0] != halves[1] and all(map(files.is_part, halves))
    for error in (OSError(28, "No space left on device"), RuntimeError("file write failed\n at 3")):
        with pytest.raises(OSError, match="bar cannot be written .*(No space left|file write failed at 3)"):
            files.replace_with(tmp_path / "bar", broken(error))
    for error in (KeyboardInterrupt(), TypeError("ours")):
        with pytest.raises(type(error)):
            files.replace_with(tmp_path / "bar", broken(error))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foo", "foo.part"]
    for name in ("foo.part", ".foo.part", "step-00000001.part", ".foo-1-2.part", "foo-1-0123abcd.part"):
        assert not files.is_part(tmp_path / name)


def test_json_has_no_numbers_that_are_none():
    x = {"a": float("nan"), "b": [1.5, float("-inf"), (float("inf"), 2)], "c": {"d": True, "e": None}}
    assert json.loads(files.to_json(x)) == {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": True, "e": None}}


@pytest.mark.parametrize("where", ["model.safetensors", "training.pt"])
def test_a_newest_checkpoint_that_is_not_finite_is_refused_and_the_one_before_stays(runs, brief, where):
    name = f"spoilt-{where}"
    shutil.copytree(runs / brief, runs / name, ignore=shutil.ignore_patterns("draft"))
    file = runs / name / "checkpoints" / "step-00000002" / where
    if where == "training.pt":
        state = torch.load(file)
        state["optimizer"]["state"][0]["exp_avg"][0, 0] = float("nan")
        torch.save(state, file)
    else:
        state = load_file(file)
        state["lm_head.weight"][0, 0] = float("nan")
        save_file(state, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"step-00000002/{where} cannot be used .NaN or Inf in 1 .* remove ") as error:
        train.main(command(runs, name, *BRIEF, "--resume", "--steps", 3))
    assert "\n" not in str(error.value)
    shutil.rmtree(file.parent)
    train.main(command(runs, name, *BRIEF, "--resume"))
    assert_same_run(runs, brief, name, 2)


def test_no_content_of_training_pt_is_a_traceback(runs, brief, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(runs / brief / "checkpoints", run / "checkpoints")
    file = run / "checkpoints" / "step-00000002" / "training.pt"
    draft = drafts.load_draft(file.parent)
    draft.freeze_embeddings()
    given = train.resolve(train.Settings(device="cpu", weight_decay=0.5))
    optimizer = train.make_optimizer(given, [p for p in draft.parameters() if p.requires_grad])
    assert drafts.load_checkpoint(run, draft, optimizer, "cpu") == (2, 2)
    assert optimizer.param_groups[0]["weight_decay"] == 0.5  # the setting's, not the stored one
    good = torch.load(file)
    kept = good["optimizer"]["state"]
    moments = [{**kept, 0: {**kept[0], key: x}} for key, x in (("exp_avg", torch.zeros(3)), ("exp_avg", "x"))]
    moments += [{**kept, 0: {}}, {**kept, 0: 3}, {**kept, 99: kept[0]}, {**kept, "x": kept[0]}, [], 3, None]
    bad = [good | {"optimizer": {**good["optimizer"], "state": x}} for x in moments]
    bad += [good | {key: x} for key in ("step", "consumed") for x in (-1, 1.5, "2", None, True, 10**15, 7 * 10**30)]
    bad += [good | {"rng": x} for x in (None, 3, torch.zeros(3), torch.zeros(3, dtype=torch.uint8))]
    bad += [{k: x for k, x in good.items() if k != key} for key in good]
    bad += [good | {"optimizer": x} for x in ({}, None, [])] + [{}, [], 3, None, "x", good["rng"]]
    for state in bad:
        torch.save(state, file)
        with pytest.raises(ValueError, match="training.pt cannot be used .* remove .*step-00000002") as error:
            drafts.load_checkpoint(run, draft, optimizer, "cpu")
        assert "\n" not in str(error.value)
    for garbage in (b"", b"PK", b"\x80\x02garbage", b"\0" * 99):
        file.write_bytes(garbage)
        with pytest.raises(ValueError, match="training.pt cannot be used"):
            drafts.load_checkpoint(run, draft, optimizer, "cpu")


def test_two_runs_in_one_directory_are_refused(runs, whole):
    (runs / "held").mkdir()
    given = train.Settings(runs=str(runs), name="held", resume=True)
    train.write_settings(train.Ranks(), runs / "held", given)
    with train.open_run(given, train.Ranks()), pytest.raises(ValueError, match="another process trains in"):
        train.main(command(runs, "held", "--resume"))


def test_a_loss_that_stays_not_finite_names_its_data(runs, monkeypatch):
    capture = target.Target.capture
    nan = lambda *args: [(f * float("nan"), last) for f, last in capture(*args)]  # noqa: E731
    monkeypatch.setattr(target.Target, "capture", nan)
    with pytest.raises(ValueError, match=rf"for {train.BAD_STEPS} steps in a row, up to step 10, .* corpus:\d+"):
        train.main(command(runs, "nan", "--steps", 20))
    lines = log(runs, "nan")
    assert "NaN" not in (runs / "nan" / "log.jsonl").read_text() and lines[0]["loss"] is None
    assert len(lines) == 10 and all(name.startswith("corpus:") for line in lines for name in line["skipped"])


# ---------------------------------------------------------------------------------------------- the teacher of the data


def teacher_of(documents: int, length: int, right: float, seed: int = 0) -> str:
    """What is said of documents whose states name the next token in a share of the places, and noise in the others."""
    rng, vocab = torch.Generator().manual_seed(seed), 50
    sample = []
    for _ in range(documents):
        tokens = torch.randint(vocab, (length,), generator=rng)
        noise = torch.randint(vocab, (length,), generator=rng)
        named = torch.where(torch.rand(length, generator=rng) < right, tokens.roll(-1), noise)
        document = Document(tokens, torch.arange(length) >= length // 2, "x")
        sample.append((document, (None, torch.eye(vocab)[named])))
    return teacher_check(SimpleNamespace(head=lambda x: x, embed_tokens=nn.Embedding(vocab, 1)), sample)


@pytest.mark.parametrize(("documents", "length"), [(1, 60), (2, 20), (3, 200), (16, 60)])
def test_a_teacher_that_knows_its_text_is_told_from_noise(documents, length):
    good = teacher_of(documents, length, 0.8)
    assert "WARNING" not in good and f"learned tokens of {documents} documents" in good
    bad = [teacher_of(documents, length, 0.0, seed) for seed in range(20)]
    assert sum("WARNING: the teacher is no better" in text for text in bad) == 20


def test_a_teacher_is_compared_place_by_place():
    """Two documents whose answers are a b c and a d: of two pairs of places the own states are right in both, those of
    the other document in the first."""
    answers = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 4])
    sample = [(Document(x, torch.arange(len(x)) < 3, "x"), (None, torch.eye(5)[x.roll(-1)])) for x in answers]
    said = teacher_check(SimpleNamespace(head=lambda x: x, embed_tokens=nn.Embedding(5, 1)), sample)
    assert "its own choice is 100.0% of 4 learned tokens of 2 documents, 50.0% by another document's states" in said
    assert "0.0% of 0 learned tokens of 0 documents" in teacher_check(
        SimpleNamespace(embed_tokens=nn.Embedding(5, 1)), []
    )


@pytest.fixture(scope="module")
def states(runs, tmp_path_factory):
    """Captured states of some conversations, and a copy in which they are random ones of the same scale."""
    folder = tmp_path_factory.mktemp("states")
    pairs = python_documents(True)[:20]
    rows = [
        {"messages": [{"role": "user", "content": p[:60]}, {"role": "assistant", "content": a[:90]}]} for p, a in pairs
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", runs / "tiny-deepseek-v3", "--data", folder / "chats.jsonl", "--capture", folder / "good"]
    train.main(command(runs, "captures", *flags))
    head = load_file(runs / "tiny-deepseek-v3" / "model.safetensors")["lm_head.weight"]
    head = head / head.square().sum(-1, keepdim=True)
    shutil.copytree(folder / "good", folder / "random")
    for name in ("good", "random"):
        for path in (folder / name / "hidden_states").iterdir():
            held = load_file(path)
            last = held["hidden_states"][:, 3]
            last.copy_(head[held["token_ids"].roll(-1)] if name == "good" else torch.randn(last.shape))
            save_file(held, path, metadata={"last_hidden": "after_norm"})
    return folder


@pytest.mark.parametrize("flags", [["--dry-run"], ["--steps", 1]])
def test_captured_states_that_say_nothing_of_the_text_are_warned_of(runs, states, flags, capsys):
    model = ["--model", runs / "tiny-deepseek-v3"]
    for name in ("good", "random"):
        train.main(command(runs, f"taught-{name}-{len(flags)}", "--data", states / name, *model, *flags))
        said = capsys.readouterr().out
        assert said.count("teacher: its own choice is") == 1
        assert ("WARNING: the teacher is no better" in said) == (name == "random")


def test_states_that_arrive_are_compared_before_the_first_step(runs, states, tmp_path, capsys):
    for name in ("good", "random"):
        shutil.copytree(states / name / "hidden_states", tmp_path / name)
        (tmp_path / name / "STOP").touch()
        flags = ["--model", runs / "tiny-deepseek-v3", "--data", states / "chats.jsonl", "--follow", tmp_path / name]
        train.main(command(runs, f"followed-{name}", *flags))
        said = capsys.readouterr().out
        assert said.count("teacher: its own choice is") == 1
        assert ("WARNING: the teacher is no better" in said) == (name == "random")


# ---------------------------------------------------------------------------------------------------------------- ranks


def documents_for(batches: int, row_tokens: int, steps: int = 3) -> int:
    """How many corpus documents make `batches` rows in the first epoch of seed 0."""
    tokenizer = byte_tokenizer()
    documents = [cut_to(d, row_tokens) for d in answered(tokenizer, python_documents(False)[:300])]
    for n in range(4, 300):
        kept = [d for d in documents[:n] if anchors_of(d.loss_mask, steps)]
        if len(pack([len(d.tokens) for d in kept], row_tokens, random.Random("0/0"))) == batches:
            return n
    raise AssertionError(f"no number of documents makes {batches} rows")


def test_a_checkpoint_that_counts_in_another_packing_is_refused(runs):
    train.main(command(runs, "packed", "--steps", 2))
    (state,) = (runs / "packed" / "checkpoints").glob("step-*/training.pt")
    shutil.rmtree(runs / "packed" / "draft")
    torch.save({k: x for k, x in torch.load(state).items() if k != "packing"}, state)
    with pytest.raises(ValueError, match="older version packed them.*--init"):
        train.main(command(runs, "packed", "--steps", 3, "--resume"))


def test_ten_micro_batches_at_accumulation_4_are_three_steps(runs):
    flags = ["--documents", documents_for(10, 512), "--epochs", 1, "--row-tokens", 512]
    train.main(command(runs, "ten-1", *flags, "--accumulate", 1))
    train.main(command(runs, "ten-4", *flags, "--accumulate", 4))
    single = [line["supervised"] for line in log(runs, "ten-1")]
    assert len(single) == 10
    assert [line["supervised"] for line in log(runs, "ten-4")] == [sum(single[i : i + 4]) for i in (0, 4, 8)]


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process_and_resume_on_one(runs, steps, tmp_path):
    """At accumulation 4; in the last window the second rank has no rows."""
    documents, half = documents_for(8 * (steps - 1) + 1, 256), steps // 2
    flags = ["--documents", documents, "--epochs", 1, "--save-every", half]
    names = single, double, resumed = [f"ranks-{kind}-{steps}" for kind in ("1", "2", "21")]
    ranks = start_ranks(command(runs, double, *flags, "--accumulate", 4), tmp_path)
    train.main(command(runs, single, *flags, "--accumulate", 8))
    for process, output in ranks:
        finish(process, output, 0)
    for part in ("settings.json", f"checkpoints/step-{half:08d}"):
        source = runs / double / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, make_parent(runs / resumed / part))
    train.main(command(runs, resumed, *flags, "--resume", "--accumulate", 8))
    one, lines = weights(runs, single, steps), log(runs, single)
    assert len(lines) == steps and lines[-1]["supervised"] < lines[-2]["supervised"] / 4
    for name in names[1:]:
        for a, b in zip(lines[-len(log(runs, name)) :], log(runs, name), strict=True):
            assert a["supervised"] == b["supervised"] and abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"], (a, b)
            assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]
        for key, x in weights(runs, name, steps).items():
            assert (x.double() - one[key].double()).abs().max() <= 1e-4 * one[key].double().abs().max(), (name, key)


def make_parent(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def windows(empty: bool):
    """Four micro-batches for each of two ranks, 3 supervised tokens on the first, 1 or none on the second; and all rows
    as one batch."""
    draft = toy_draft("deepseek", 1)
    text = torch.randint(32, (8, 1, 20), generator=torch.Generator().manual_seed(1))
    counts = [2, 0, 1, 0, 0, 0, 0 if empty else 1, 0]
    masks = [((torch.arange(20) >= 9) & (torch.arange(20) < 9 + n))[None] for n in counts]
    rows = [toy_batch(draft, x, mask) for x, mask in zip(text, masks, strict=True)]
    return draft, rows, toy_rows(draft, text[:, 0], torch.cat(masks))


def one_window(rank, world, port, found):
    """Gradients of one optimizer step on `world` ranks, of either kind of windows."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world)
    args = train.resolve(train.Settings(device="cpu", clip=1e9))
    for empty in (False, True):
        draft, rows, _ = windows(empty)
        parameters = [p for p in draft.parameters() if p.requires_grad]
        optimizer, loss, gradients = train.make_optimizer(args, parameters), train.TTTLoss(draft), []
        optimizer.step = lambda gradients=gradients, parameters=parameters: gradients.extend(
            p.grad.clone().numpy() for p in parameters
        )
        ours = rows if world == 1 else rows[4 * rank : 4 * rank + 4]
        train.optimizer_step(args, train.Ranks(rank, world), loss, ours, optimizer, parameters)
        found.put(((rank, empty), gradients))
    if world > 1:
        dist.destroy_process_group()


def test_gradients_agree_over_ranks_and_with_one_process():
    spawn = multiprocessing.get_context("spawn")
    found, alone, port = spawn.Queue(), queue.Queue(), free_port()
    processes = [spawn.Process(target=one_window, args=(r, 2, port, found)) for r in range(2)]
    for process in processes:
        process.start()
    one_window(0, 1, None, alone)
    got = dict(found.get(timeout=120) for _ in range(4))
    for process in processes:
        process.join()
    for (_, empty), single in (alone.get() for _ in range(2)):
        draft, _, whole = windows(empty)
        draft.zero_grad()
        train.TTTLoss(draft)(whole)[0].backward()  # each supervised token counts the same, in whatever micro-batch
        trained = [p.grad.numpy() for p in draft.parameters() if p.requires_grad]
        assert single and any(g.any() for g in single)
        for want, a, b, once in zip(single, got[0, empty], got[1, empty], trained, strict=True):
            assert (a == b).all() and abs(a - want).max() <= 1e-5 * abs(want).max()
            assert abs(want - once).max() <= 1e-5 * abs(once).max()


def test_a_killed_rank_ends_the_job_with_an_error(runs):
    """By torchrun itself. On data of its own, so that neither rank cuts the corpus."""
    rows = [{"input_ids": list(range(i, i + 50)), "loss_mask": [0] * 9 + [1] * 41} for i in range(40)]
    (runs / "lost.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "train.py"]
    job = subprocess.Popen(
        [*launcher, *command(runs, "lost", "--steps", 1000, "--data", runs / "lost.jsonl")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (runs / "lost" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (runs / "lost" / "log.jsonl").exists()
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    job.wait(100)  # raises if it hangs
    assert job.returncode != 0


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "gpt-5"], "gpt-5"),
        (["--row-tokens", "0"], "--row-tokens is 0"),
        (["--steps", "x"], "--steps"),
        (["--draft-vocab", "100000"], "--draft-vocab is 100000; it must be an integer in 1..262"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--aux-layers", "1,2"], "three"),
        (["--aux-layers", "a,b,c"], "a,b,c"),
        (["--device", "banana"], "banana"),
        (["--lr", "nan"], "--lr is nan"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--resume"], "--name"),
        (["--device", "meta"], "--device meta"),
        (["--warmup", "3"], "--warmup is 3.0"),
        (["--name", "../x"], "--name is '../x'"),
        (["--follow-gb", "3"], "--follow-gb"),
        (["--dry-run", "--export", "a", "b"], "not allowed with"),
        (["--export", "nothing", "out"], "nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, flags, said, capsys):
    before = sorted(runs.rglob("*"))
    assert said in complaint(["--runs", str(runs), *flags], capsys)
    assert sorted(runs.rglob("*")) == before


def complaint(argv, capsys) -> str:
    """The one line that train.py ends with, by exit code 2 or a ValueError."""
    with pytest.raises((SystemExit, ValueError)) as stopped:
        train.main(argv)
    message = capsys.readouterr().err if isinstance(stopped.value, SystemExit) else str(stopped.value)
    assert message.strip().count("\n") == 0
    assert not isinstance(stopped.value, SystemExit) or stopped.value.code == 2
    return message


def test_an_existing_run_is_not_overwritten(runs):
    (runs / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        train.main(["--runs", str(runs), "--name", "taken"])
    assert not list((runs / "taken").iterdir())
