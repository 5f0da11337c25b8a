"""--track: the numbers of log.jsonl, eval.jsonl and result.json in TensorBoard or Weights & Biases as well."""

import importlib
import math
import re
from pathlib import Path

from tqdm import tqdm

MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}  # a package's own name installs it


def load(package: str):
    """The module that --track asks for, None for "off". ValueError: it is not installed."""
    if package == "off":
        return None
    try:
        return importlib.import_module(MODULES[package])
    except ImportError as error:
        raise ValueError(
            f"--track {package} needs a package that is not here ({error}); pip install {package}, or take --track off"
        ) from None


class Track:
    """One run's numbers, by step. A tracker that fails is left after one warning; the run's own files hold them all.

    done: steps that were done before. What was tracked of later ones is made again, and stands there once.
    """

    def __init__(self, package: str, run: Path, done: int, settings: dict):
        self.writer, self.step = None, done
        if package != "off":
            self.package, start = package, {"tensorboard": TensorBoard, "wandb": Wandb}[package]
            self.attempt(lambda: setattr(self, "writer", start(run, done, settings)))

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        if self.writer:
            self.attempt(lambda: self.writer.close(failed=kind is not None))

    def write(self, group: str, line: dict, step: int | None = None) -> None:
        """Numbers named group/key, of the step last written where none is given."""
        self.step = self.step if step is None else step
        if self.writer:
            self.attempt(lambda: self.writer.write(numbers(group, line), self.step))

    def attempt(self, act) -> None:
        try:
            act()
        except Exception as error:  # whatever a disk, a network or an account may raise
            self.writer = None
            reason = " ".join(str(error).split())[:200]
            tqdm.write(f"warning: --track {self.package} failed and is left ({reason}); the run's own files go on")


def numbers(name: str, value) -> dict[str, float]:
    """What is a number below it, by path; lists are counted from 1, as TTT steps are."""
    if isinstance(value, bool) or not isinstance(value, dict | list | int | float):
        return {}
    if isinstance(value, int | float):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value, start=1)
    return {path: x for key, part in items for path, x in numbers(f"{name}/{key}", part).items()}


class TensorBoard:
    """runs/NAME/tensorboard, a file of events for each time the run was started."""

    def __init__(self, run: Path, done: int, settings: dict):
        self.writer = load("tensorboard").SummaryWriter(run / "tensorboard", purge_step=done + 1, flush_secs=10)

    def write(self, values: dict[str, float], step: int) -> None:
        for name, x in values.items():
            self.writer.add_scalar(name, x, step)

    def close(self, failed: bool) -> None:
        self.writer.close()


class Wandb:
    """The run of that name in the project WANDB_PROJECT. It takes no step twice: those made again are dropped there."""

    def __init__(self, run: Path, done: int, settings: dict):
        wandb, name = load("wandb"), re.sub(r"[^\w.-]", "-", run.name)[:64]  # of which an id may consist
        quiet = wandb.Settings(console="off")  # it would take the bar for thousands of lines
        self.run = wandb.init(id=name, name=run.name, resume="allow", dir=run, config=settings, settings=quiet)

    def write(self, values: dict[str, float], step: int) -> None:
        self.run.log({name: x for name, x in values.items() if math.isfinite(x)}, step=step)

    def close(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))
