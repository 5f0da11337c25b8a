"""Files that others wrote: what goes wrong with them is named, and what is written is whole or absent."""

import fcntl
import json
import math
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

# -------------------------------------------------------------------------------------------------------------- reading


class Damaged(ValueError):
    """A file that cannot be used; the message names it."""


@contextmanager
def naming(path: Path, todo: str = "capture it again, or skip damaged files"):
    """Whatever goes wrong within is a Damaged that names the file and says what to do, in one line."""
    try:
        yield
    except Damaged:  # another file's, named already
        raise
    except Exception as error:  # what broken bytes provoke in the readers of several formats
        raise Damaged(f"{path} cannot be used ({reason_of(error)}); {todo}") from error


def reason_of(error: Exception) -> str:
    kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
    return " ".join(f"{kind}{error}".split())[:300]


def check_regular(path: Path, role: str) -> None:
    """ValueError where reading would wait for others or never end. role: what names it, as in "--data"."""
    mode = path.stat().st_mode
    kinds = {stat.S_ISFIFO: "a FIFO", stat.S_ISSOCK: "a socket", stat.S_ISCHR: "a device", stat.S_ISBLK: "a device"}
    for test, kind in kinds.items():
        if test(mode):
            raise ValueError(f"{role} {path} is {kind}; a file is wanted")


def open_regular(path: Path) -> BinaryIO:
    """For reading; ValueError for what is no file: a FIFO would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return open(descriptor, "rb")


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


INDEX = "model.safetensors.index.json"


def weight_map(directory: Path) -> dict[str, Path] | None:
    """The file of each tensor by the index of a sharded checkpoint; None without one. ValueError: it names others than
    those beside it."""
    path = directory / INDEX
    if not path.is_file():
        return None
    files = read_json(path, ["weight_map"])["weight_map"]
    with naming(path, "copy it again, with all files of that directory"):
        if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
            raise ValueError("its weight_map is no table of file names")
        for name in dict.fromkeys(files.values()):
            if Path(name).name != name or not name.endswith(".safetensors"):
                raise ValueError(f"it names {name!r}, which is no .safetensors file beside it")
            if not (directory / name).is_file():
                raise ValueError(f"it names {name}, which is not there")
    return {tensor: directory / name for tensor, name in files.items()}


def is_finite(x: Tensor) -> bool:
    """No NaN and no Inf in x, in one pass and without a copy: extremes carry both, 20 times faster than isfinite()."""
    if not x.is_floating_point() or x.element_size() < 2 or x.is_meta or x.numel() == 0:  # 8 bits: nothing computes
        return True
    return bool(torch.stack(torch.aminmax(x.detach())).isfinite().all())


def check_finite(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """ValueError naming those of the weights that hold NaN or Inf: read or written, they are of no use."""
    if bad := [name for name, x in tensors if not is_finite(x)]:
        raise ValueError(f"NaN or Inf in {len(bad)} of its tensors ({', '.join(bad[:3])})")


def being_written(path: Path) -> bool:
    """Does a writer hold path.lock? vLLM leaves that file behind and holds a lock on it (flock) while it writes."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDONLY | os.O_NONBLOCK)  # a FIFO would wait for its writer
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(lock)


# -------------------------------------------------------------------------------------------------------------- writing


def replace_with(path: Path, write, todo: str = "") -> None:
    """write(a temporary name beside path), a file or a folder, then rename: whole or absent, whoever else writes there.

    A file replaces what `path` was, a folder only an empty one. OSError: the disk does not take it; what was there
    stays, nothing else is left.
    """
    half = part_of(path)
    try:
        write(half)
        for each in [*(half.rglob("*") if half.is_dir() else ()), half]:
            synchronise(each)
        os.replace(half, path)
        synchronise(path.parent)
    except (OSError, RuntimeError, SafetensorError) as error:  # of a full disk, by who met it
        kind = type(error) if isinstance(error, OSError) else OSError
        raise kind(f"{path} cannot be written ({reason_of(error)}){todo}") from error
    finally:
        discard(half)


def part_of(path: Path) -> Path:
    """A temporary name beside path that is nobody else's."""
    return path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}.part")


PART = re.compile(r"\..+-\d+-[0-9a-f]{8}\.part")


def is_part(path: Path) -> bool:
    return PART.fullmatch(path.name) is not None


def remove_parts(folder: Path) -> None:
    """What killed writers left in a folder that nobody else writes into now."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if is_part(path):
            discard(path)


def remove(path: Path) -> None:
    """A file or a folder, so that no half of it is ever met under its name."""
    half = part_of(path)
    os.replace(path, half)
    discard(half)


def discard(half: Path) -> None:
    if half.is_dir():
        shutil.rmtree(half, ignore_errors=True)
    else:
        with suppress(OSError):
            half.unlink()


def synchronise(path: Path) -> None:
    """Wait until a file, or the names in a folder, lie on the disk: a rename may get there sooner."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():  # not all file systems do it for folders
            os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def opened_alone(path: Path, named: Path | None = None) -> Iterator[BinaryIO]:
    """`path` to append to, unbuffered, which no other process has open so. ValueError: one has, or it is no file.

    named: what the user named, None for the folder that `path` lies in.
    """
    if path.exists() and not path.is_file():  # a FIFO would wait for its reader
        raise ValueError(f"{path} is no regular file; remove it")
    with open(path, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"another process writes into {named or path.parent}; wait for it, or name another"
            ) from None
        yield file


def append(file: BinaryIO, row) -> None:
    """A line of JSON behind the others, at once."""
    line = (json.dumps(row) + "\n").encode()
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:  # of a full disk, and it names no file
        raise OSError(error.errno, error.strerror, file.name) from error


def to_json(values, **how) -> str:
    """JSON as the standard has it: a number that is not finite is null."""

    def plain(x):
        if isinstance(x, dict):
            return {key: plain(value) for key, value in x.items()}
        if isinstance(x, list | tuple):
            return [plain(value) for value in x]
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(values), allow_nan=False, **how)
