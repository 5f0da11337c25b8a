"""Claims about --plot: what is drawn is what was logged, whatever state the runs are in."""

import json
import math
import sys

import numpy as np
import pytest

import train
from tests.helpers import error_line
from training.plotting import column, draw, labels, outputs, read, smoothed

LINE = {"loss": 2.0, "accept_length": 1.5, "tokens_per_second": 900.0}


def make_run(folder, steps=30, evaluations=(), result=None, tail=""):
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step} | LINE | {"loss": 3 - step / 50}) for step in range(1, steps + 1)]
    (folder / "log.jsonl").write_text("".join(line + "\n" for line in lines) + tail)
    if evaluations:
        text = "".join(json.dumps({"step": s, "simulated": 2.0 + s, "walked": 1.0 + s}) + "\n" for s in evaluations)
        (folder / "eval.jsonl").write_text(text)
    if result:
        (folder / "result.json").write_text(json.dumps(result) + "\n")
    return folder


def test_without_matplotlib_there_is_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "out.png"
    assert "pip install matplotlib" in error_line(["--plot", make_run(tmp_path / "a"), out], capsys)
    assert not out.exists()


def test_the_last_png_is_the_picture_and_each_run_counts_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    a, b = make_run(tmp_path / "a"), make_run(tmp_path / "b.png")
    assert outputs([a, b, a]) == ([a, b], type(a)("runs.png"))
    assert outputs([a, b]) == ([a, b], type(a)("runs.png"))  # a folder is a run, whatever its name
    assert outputs([a, tmp_path / "c.png"]) == ([a], tmp_path / "c.png")
    (tmp_path / "runs.png").touch()
    with pytest.raises(ValueError, match="nothing is overwritten"):
        outputs([a, b])
    for wrong in ([tmp_path / "c.png"], [tmp_path / str(i) for i in range(9)]):
        with pytest.raises(ValueError, match="1 to 8 are wanted"):
            outputs(wrong)


def test_what_is_read_is_what_was_logged(tmp_path):
    run = make_run(tmp_path / "a", 3, (2,), {"simulated": 9.0, "walked": 7.0}, tail='{"step": 4, "loss": 1.')
    curves = read(run)
    x, y = column(curves.steps, "loss")
    assert x.tolist() == [1, 2, 3] and y.tolist() == [3 - 1 / 50, 3 - 2 / 50, 3 - 3 / 50]
    x, y = column(curves.evaluations, "walked")
    assert x.tolist() == [2, 3] and y.tolist() == [3.0, 7.0]


def test_a_number_that_was_not_finite_is_a_gap():
    rows = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": None}, {"step": 3, "loss": math.nan}, {"step": 4}]
    _, y = column(rows, "loss")
    assert y[0] == 1.0 and np.isnan(y[1:]).all()


def test_smoothing_is_a_mean_over_what_is_finite_around_a_step():
    y = np.arange(100.0) ** 2
    y[50] = math.nan
    got = smoothed(y)
    for i in range(100):
        around = y[max(0, i - 2) : i + 3]
        assert math.isnan(got[i]) if i == 50 else got[i] == pytest.approx(np.nanmean(around))
    assert smoothed(np.array([3.0])).tolist() == [3.0] and smoothed(np.array([])).size == 0


def test_runs_of_one_name_are_told_apart_by_folder(tmp_path):
    runs = [make_run(tmp_path / "x" / "a"), make_run(tmp_path / "y" / "a"), make_run(tmp_path / "y" / "b", 0)]
    assert labels([read(run) for run in runs]) == [str(runs[0]), str(runs[1]), "b (no step yet)"]


def test_runs_without_steps_and_folders_that_are_no_runs_are_one_line(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    out, empty = tmp_path / "out.png", make_run(tmp_path / "empty", 0)
    assert "no step is logged yet" in error_line(["--plot", empty, out], capsys)
    assert "no log.jsonl, so it is no run" in error_line(["--plot", empty, tmp_path, out], capsys)
    assert not out.exists()


def test_runs_in_any_state_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    lost = json.dumps({"step": 31} | LINE | {"loss": None}) + "\n"
    runs = [make_run(tmp_path / "done", 30, (10, 20), {"simulated": 3.0, "walked": 2.0})]
    runs += [make_run(tmp_path / "nan $x_1$", tail=lost), make_run(tmp_path / "one", 1), make_run(tmp_path / "no", 0)]
    runs += [make_run(tmp_path / ("long" * 40))]
    out = tmp_path / "out.png"
    assert train.cli(["--plot", *map(str, runs), str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG") and [*tmp_path.glob("*.part*")] == []


def test_each_run_has_its_lines_in_every_panel(tmp_path):
    Figure = pytest.importorskip("matplotlib.figure").Figure
    found = [read(make_run(tmp_path / name, 30, (10,))) for name in "ab"]
    figure = Figure()
    draw(figure, found, labels(found))
    loss, accept, speed = figure.axes
    assert [len(axis.lines) for axis in (loss, accept, speed)] == [4, 8, 4]
    assert loss.lines[0].get_ydata().tolist() == column(found[0].steps, "loss")[1].tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["a", "b"]
    assert all(axis.get_ylabel() for axis in figure.axes) and speed.get_xlabel() == "optimizer step"
