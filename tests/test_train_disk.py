"""Claims about what a run leaves on disk: whole or absent whatever fails, and nothing that is the user's is touched."""

import os
import resource
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from data import files
from tests.helpers import assert_same_run, command, finish, log, start
from training import drafts
from training.ranks import Ranks


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
        with train.open_run(given, Ranks()) as run:
            assert sorted(path.name for path in run.iterdir()) == ["lock", "settings.json"]
        shutil.rmtree(runs / "unborn")
    (runs / "unborn").mkdir()
    (runs / "unborn" / "notes.txt").write_text("the user's")
    with pytest.raises(ValueError, match="has no settings.json"), train.open_run(given, Ranks()):
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
    bad += [{k: x for k, x in good.items() if k != key} for key in good.keys() - {"packing"}]
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
