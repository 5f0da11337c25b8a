"""Files that others wrote: what goes wrong with them is named, and what is written is whole or absent."""

import json
import os
import stat
from contextlib import contextmanager
from pathlib import Path

from safetensors import safe_open


class Damaged(ValueError):
    """A file that cannot be used; the message names it."""


@contextmanager
def naming(path: Path, todo: str = "capture it again, or skip damaged files"):
    """Whatever goes wrong within is a Damaged that names the file and says what to do, in one line."""
    try:
        yield
    except Exception as error:  # what broken bytes provoke in the readers of several formats
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        reason = " ".join(f"{kind}{error}".split())[:300]
        raise Damaged(f"{path} cannot be used ({reason}); {todo}") from error


def check_regular(path: Path, role: str) -> None:
    """ValueError where reading would wait for others or never end. role: what names it, as in "--data"."""
    mode = path.stat().st_mode
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    for test, kind in kinds.items():
        if test(mode):
            raise ValueError(f"{role} {path} is {kind}; a file is wanted")


def read_json(path: Path, keys) -> dict:
    with naming(path, "copy it again"):
        values = json.loads(path.read_text())
        if not isinstance(values, dict):
            raise ValueError(f"it holds a {type(values).__name__}, not an object")
        if missing := [key for key in keys if key not in values]:
            raise ValueError(f"it lacks {missing}")
        return values


def shapes_in(file) -> dict[str, list[int]]:
    return {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 (it is no dict)


def holds(path: Path, name: str) -> bool:
    with naming(path, "copy it again"), safe_open(path, "pt") as file:
        return name in shapes_in(file)


def replace_with(path: Path, write) -> None:
    """write(a temporary name beside path), then rename: whole or absent."""
    half = path.with_name(path.name + ".part")
    write(half)
    os.replace(half, path)
