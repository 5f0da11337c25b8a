"""Claims about --track: every logged number, once a step, under a stable name; and a tracker that never ends a run."""

import json
import math
import sys

import pytest

import train
from tests.helpers import command, error_line, log
from training import tracking
from training.tracking import Track, numbers


def scalars(folder) -> dict[str, list[tuple[int, float]]]:
    """Steps and values by name, as TensorBoard itself reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


@pytest.mark.parametrize("package", tracking.MODULES)
def test_an_absent_tracker_is_one_line_before_anything_is_made(package, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, tracking.MODULES[package], None)
    line = error_line(["--runs", tmp_path, "--name", "run", "--track", package], capsys)
    assert f"pip install {package}" in line and not list(tmp_path.iterdir())


def test_numbers_are_named_by_their_path():
    line = {"loss": 2.5, "accuracy": [0.5, 0.25], "by": {"0-2K": {"slots": 3}}, "skipped": ["a.jsonl"], "ok": True}
    named = {"x/loss": 2.5, "x/accuracy/1": 0.5, "x/accuracy/2": 0.25, "x/by/0-2K/slots": 3}
    assert numbers("x", line | {"nothing": None}) == named


def test_a_tracker_that_fails_is_left_after_one_warning(tmp_path, capsys, monkeypatch):
    class Full:
        def __init__(self, *anything):
            self.wrote = 0

        def write(self, values, step):
            self.wrote += 1
            if self.wrote > 1:
                raise OSError(28, "No space left on device")

    monkeypatch.setattr(tracking, "TensorBoard", Full)
    with Track("tensorboard", tmp_path, 0, {}) as track:
        for step in (1, 2, 3):
            track.write("train", {"loss": 1.0}, step)
    said = capsys.readouterr().out
    assert said.count("warning: --track tensorboard failed") == 1 and "No space left" in said


def test_a_tracker_that_cannot_begin_is_left_as_well(tmp_path, capsys):
    pytest.importorskip("tensorboard")
    (tmp_path / "tensorboard").write_text("a file where its folder belongs")
    with Track("tensorboard", tmp_path, 0, {}) as track:
        track.write("train", {"loss": 1.0}, 1)
    assert capsys.readouterr().out.count("warning") == 1


def test_tensorboard_reads_what_the_run_logged(runs):
    pytest.importorskip("tensorboard")
    train.main(command(runs, "tracked", "--steps", 4, "--eval-every", 2, "--track", "tensorboard"))
    run = runs / "tracked"
    found, lines = scalars(run / "tensorboard"), log(runs, "tracked")
    names = {key for key, x in lines[0].items() if isinstance(x, int | float)} - {"step"}
    assert {name.removeprefix("train/") for name in found if name.startswith("train/")} == names
    for name in names:
        assert [step for step, _ in found[f"train/{name}"]] == [1, 2, 3, 4]
        assert [x for _, x in found[f"train/{name}"]] == pytest.approx([line[name] for line in lines], rel=1e-6)
    (evaluation,) = map(json.loads, (run / "eval.jsonl").read_text().splitlines())
    result = json.loads((run / "result.json").read_text())
    expected = [(2, pytest.approx(evaluation["walked"])), (4, pytest.approx(result["walked"]))]
    assert found["held_out/walked"] == expected


def test_what_is_made_again_after_an_interruption_stands_there_once(tmp_path):
    pytest.importorskip("tensorboard")
    for done, last, value in ((0, 5, 1.0), (3, 6, 2.0)):  # killed at step 5, of which 3 were in a checkpoint
        with Track("tensorboard", tmp_path, done, {}) as track:
            for step in range(done + 1, last + 1):
                track.write("train", {"loss": value}, step)
    assert scalars(tmp_path / "tensorboard")["train/loss"] == [*zip(range(1, 7), [1.0] * 3 + [2.0] * 3, strict=True)]


def test_numbers_that_are_not_finite_are_shown_as_such(tmp_path):
    pytest.importorskip("tensorboard")
    with Track("tensorboard", tmp_path, 0, {}) as track:
        track.write("train", {"loss": math.nan}, 1)
    ((step, value),) = scalars(tmp_path / "tensorboard")["train/loss"]
    assert step == 1 and math.isnan(value)


def test_wandb_is_one_run_that_goes_on(tmp_path, monkeypatch):
    begun = []

    class Run:
        logged, ended = [], []

        def finish(self, exit_code):
            self.ended.append(exit_code)

        def log(self, values, step):
            self.logged.append((step, values))

    class Package:
        Settings = dict
        init = staticmethod(lambda **how: begun.append(how) or Run())

    monkeypatch.setitem(sys.modules, "wandb", Package)
    run = tmp_path / "a run"
    for done in (0, 2):
        with Track("wandb", run, done, {"lr": 1.0}) as track:
            track.write("train", {"loss": float(done), "grad_norm": math.inf}, done + 1)
    assert [(x["id"], x["name"], x["resume"], x["dir"]) for x in begun] == [("a-run", "a run", "allow", run)] * 2
    assert Run.logged == [(1, {"train/loss": 0.0}), (3, {"train/loss": 2.0})]
    with pytest.raises(ValueError), Track("wandb", run, 0, {}):
        raise ValueError
    assert Run.ended == [0, 0, 1]
