"""Claims about runs that are stopped or killed: they resume exactly."""

import os
import random
import resource
import shutil
import signal
import time

import pytest
import torch
from tqdm import tqdm

import train
from data.corpus import python_documents
from target import model, tiny
from tests.helpers import assert_same_run, command, finish, log, start, weights
from training import drafts
from training.ranks import Ranks


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
        tiny.TINY_STEPS = {"deepseek-v3": 3}
        if stopping:
            tiny.next_token_loss = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)

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
        late = time.monotonic() + 200
        while process.exitcode is None and newest(runs / name) == before:  # until it has gone one step on
            assert time.monotonic() < late, output.read_text()[-2000:]
            time.sleep(0.01)
        process.join(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"{process.exitcode}: {output.read_text()[-2000:]}"
    finish(start(command(runs, name, *flags, "--resume"), output), output, 0)
    assert_same_run(runs, f"calm-{kills}", name, steps)


def test_a_run_killed_while_it_draws_leaves_others_their_bars(runs, tmp_path):
    output = tmp_path / "output"
    tqdm.get_lock()  # made in the parent

    def drawing():
        tqdm.get_lock().acquire()
        os.kill(os.getpid(), signal.SIGKILL)

    finish(start([], output, drawing), output, -signal.SIGKILL)
    for lock in tqdm.get_lock().locks:  # those of threads and of processes
        assert lock.acquire(timeout=5), "the killed run holds it"
        lock.release()


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


def test_two_runs_in_one_directory_are_refused(runs, whole):
    (runs / "held").mkdir()
    given = train.Settings(runs=str(runs), name="held", resume=True)
    train.write_settings(Ranks(), runs / "held", given)
    with train.open_run(given, Ranks()), pytest.raises(ValueError, match="another process trains in"):
        train.main(command(runs, "held", "--resume"))


def test_a_loss_that_stays_not_finite_names_its_data(runs, monkeypatch):
    capture = model.Target.capture
    nan = lambda *args: [(f * float("nan"), last) for f, last in capture(*args)]  # noqa: E731
    monkeypatch.setattr(model.Target, "capture", nan)
    with pytest.raises(ValueError, match=rf"for {train.BAD_STEPS} steps in a row, up to step 10, .* corpus:\d+"):
        train.main(command(runs, "nan", "--steps", 20))
    lines = log(runs, "nan")
    assert "NaN" not in (runs / "nan" / "log.jsonl").read_text() and lines[0]["loss"] is None
    assert len(lines) == 10 and all(name.startswith("corpus:") for line in lines for name in line["skipped"])
