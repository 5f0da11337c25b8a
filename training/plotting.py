"""--plot: what runs logged, over one another in one picture: loss, accept lengths, speed."""

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.files import replace_with

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito's
HELD_OUT = {"simulated": {"ls": ":", "marker": "o", "mfc": "white"}, "walked": {"ls": "--", "marker": "s"}}


class Curves(NamedTuple):
    """What a run logged so far, each value with its step; a result counts as the last evaluation."""

    run: Path
    steps: list[dict]
    evaluations: list[dict]


def outputs(paths: list[Path]) -> tuple[list[Path], Path]:
    """The runs, each once, and the picture to write: the last path where it ends in .png, else runs.png.

    ValueError: it exists, or there is no run, or there are more than colours.
    """
    *runs, last = paths
    is_picture = last.suffix.lower() == ".png" and not last.is_dir()
    runs, out = (runs, last) if is_picture else (paths, Path("runs.png"))
    runs = list({run.resolve(): run for run in runs}.values())
    if not 1 <= len(runs) <= len(COLOURS):
        raise ValueError(f"--plot has {len(runs)} runs; 1 to {len(COLOURS)} are wanted, as in --plot runs/A runs/B")
    if out.exists():
        raise ValueError(f"{out} exists already and nothing is overwritten; end --plot by another name, as in new.png")
    return runs, out


def plot(runs: list[Path], out: Path) -> None:
    """Writes the picture. ValueError: matplotlib is absent, a folder is no run, or none has a step yet."""
    try:
        from matplotlib.figure import Figure  # without pyplot it draws into files alone, whatever screen there is
    except ImportError as error:
        raise ValueError(f"--plot needs a package that is not here ({error}); pip install matplotlib") from None
    found = [read(run) for run in runs]
    if not any(curves.steps for curves in found):
        raise ValueError(f"no step is logged yet in {', '.join(map(str, runs))}; plot again when there is one")
    figure = Figure(figsize=(9, 9), dpi=150, layout="constrained")
    draw(figure, found, labels(found))
    replace_with(out, lambda half: figure.savefig(half, format="png"))
    print(f"plotted: {out}")


def read(run: Path) -> Curves:
    """ValueError: it is no run. One that trains still may be read, its last line half written."""
    if not (run / "log.jsonl").is_file():
        raise ValueError(f"{run} has no log.jsonl, so it is no run; name folders of runs, as in --plot runs/A runs/B")
    steps, evaluations = lines(run / "log.jsonl"), lines(run / "eval.jsonl")
    if steps and (result := lines(run / "result.json")):
        evaluations.append(result[0] | {"step": steps[-1]["step"]})
    return Curves(run, steps, evaluations)


def lines(path: Path) -> list[dict]:
    """Those that are whole; none of a file that does not exist."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict) and (path.suffix == ".json" or isinstance(value.get("step"), int)):
            found.append(value)
    return found


def labels(found: list[Curves]) -> list[str]:
    names = [curves.run.resolve().name for curves in found]
    unique = [name if names.count(name) == 1 else str(curves.run) for name, curves in zip(names, found, strict=True)]
    return [label if curves.steps else f"{label} (no step yet)" for label, curves in zip(unique, found, strict=True)]


def column(rows: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of one kind of number; NaN where it is absent or was not finite."""
    values = [row.get(name) for row in rows]
    numbers = [x if isinstance(x, int | float) and math.isfinite(x) else math.nan for x in values]
    return np.array([row["step"] for row in rows], dtype=float), np.array(numbers, dtype=float)


def smoothed(y: np.ndarray) -> np.ndarray:
    """The mean over a 20th of the run around each step, at least five; what is NaN stays so and counts nowhere."""
    if not len(y):
        return y
    window = np.ones(2 * min(max(2, len(y) // 40), len(y) // 4) + 1)
    finite = np.isfinite(y)
    sums, counts = (np.convolve(x, window, "same") for x in (np.where(finite, y, 0.0), finite.astype(float)))
    return np.where(finite, sums / np.maximum(counts, 1), math.nan)


def draw(figure, found: list[Curves], names: list[str]) -> None:
    loss, accept, speed = axes = figure.subplots(3, sharex=True, height_ratios=(3, 4, 2))
    fastest = 0.0
    for curves, colour in zip(found, COLOURS, strict=False):
        for axis, name in ((loss, "loss"), (accept, "accept_length"), (speed, "tokens_per_second")):
            x, y = column(curves.steps, name)
            axis.plot(x, y, ".", color=colour, alpha=0.35, ms=5, mew=0)
            axis.plot(x, smoothed(y), color=colour, lw=1.8, marker="o" if len(x) == 1 else None)
        fastest = max(fastest, np.nanmax(smoothed(y), initial=0))  # of the last, the speed
        for name, style in HELD_OUT.items():
            accept.plot(*column(curves.evaluations, name), color=colour, lw=1.2, ms=5, **style)
    loss.set_ylabel("training loss")
    accept.set_ylabel("accept length (tokens a round)")
    speed.set_ylabel("supervised tokens/s")
    speed.set_xlabel("optimizer step")
    speed.set_ylim(0, 1.15 * fastest or 1)  # a step that compiles or resumes says nothing
    speed.yaxis.set_major_formatter("{x:,.0f}")
    speed.xaxis.get_major_locator().set_params(integer=True)
    figure.align_ylabels(axes)
    for axis in axes:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    add_legends(figure, accept, names)


def add_legends(figure, accept, names: list[str]) -> None:
    """Runs by colour above all panels, kinds of accept length by line in their own."""
    from matplotlib.lines import Line2D

    runs = [Line2D([], [], color=colour, lw=3) for colour in COLOURS[: len(names)]]
    short = [name if len(name) <= 60 else f"{name[:28]}...{name[-28:]}" for name in names]
    short = [name.replace("$", r"\$") for name in short]  # no formula
    columns = max(1, min(4, 100 // (8 + max(map(len, short)))))
    figure.legend(runs, short, loc="outside upper center", ncols=columns, frameon=False)
    kinds = {"training (points: single steps)": {"lw": 1.8}} | {
        f"held out, greedy {name}": style for name, style in HELD_OUT.items()
    }
    handles = [Line2D([], [], color="0.3", **style) for style in kinds.values()]
    accept.legend(
        handles, kinds, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3, frameon=False, handlelength=3.5
    )
