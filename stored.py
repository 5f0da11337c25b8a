"""Tensors in files that others write, read and never mapped: whoever touches a map of a file that was cut is killed.

    with open_safetensors(path) as file:
        file.held["hidden_states"]                      # Stored(dtype, shape, ...), of the header alone
        file.read("hidden_states", slice(0, 100))       # these bytes and no others

ValueError for what does not hold together, a file that became shorter meanwhile included.
"""

import gzip
import io
import json
import math
import mmap
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

MAX_HEADER = 100_000_000  # bytes of a safetensors header, the format's own bound
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8}
DTYPES |= {"BOOL": torch.bool}
LARGE = 4 << 20  # bytes that are worth pages of their own
PACKED, LEAST = 64, 64 << 20  # numbers pack 4-fold, a file of 64 MiB may hold many zeros
one_at_a_time = threading.Lock()  # a fake mode sets flags of the process


class Stored(NamedTuple):
    """A tensor in a file: where its first element lies and, if it is not contiguous, the storage it is a view of."""

    dtype: torch.dtype
    shape: list[int]
    begin: int  # bytes
    view: tuple | None = None  # begin and bytes of the storage; strides, offset


class Tensors(NamedTuple):
    held: dict[str, Stored]
    bytes_at: Callable[[int, int], Tensor]

    @property
    def shapes(self) -> dict[str, list[int]]:
        return {name: x.shape for name, x in self.held.items()}

    def read(self, name: str, *at: int | slice) -> Tensor:
        """The tensor, or its part `at`: indices of the first dimensions, then a slice. Bools come as bytes: other
        numbers than 0 and 1 are still seen."""
        x = self.held[name]
        dtype = torch.uint8 if x.dtype is torch.bool else x.dtype
        if x.view is not None:
            begin, count, strides, offset = x.view
            return self.bytes_at(begin, count).view(dtype).as_strided(x.shape, strides, offset)[at]
        *indices, part = at or (slice(None),)
        shape, first = x.shape, 0
        for i in (*indices, None):
            size, *inner = shape
            some = part if i is None else slice(i, i + 1)
            start, stop, _ = some.indices(size)
            first += start * math.prod(inner)
            shape = [max(stop - start, 0), *inner] if i is None else inner
        begin, count = x.begin + first * dtype.itemsize, math.prod(shape) * dtype.itemsize
        return self.bytes_at(begin, count).view(dtype).view(shape)


def open_regular(path: Path) -> BinaryIO:
    """For reading; ValueError for what is no file: a FIFO would wait for its writer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is no regular file")
    return open(descriptor, "rb")


def read_bytes(file: BinaryIO, begin: int, count: int) -> Tensor:
    """[count] bytes of the file; ValueError where it has fewer."""
    if begin + count <= (size := os.fstat(file.fileno()).st_size):  # before memory is taken for them
        out, done = memory(count), 0
        into = memoryview(out.numpy())
        while done < count and (n := os.preadv(file.fileno(), [into[done:]], begin + done)):
            done += n
        if done == count:
            return out
        size = begin + done
    raise ValueError(f"it ends at byte {size:,}, its tensors at {begin + count:,} or later; it was cut off")


def memory(count: int) -> Tensor:
    """[count] bytes. Much goes back to the system at once when nobody needs it: a heap into which documents of many
    sizes come and go was seen to keep ten times what is in use."""
    if count < LARGE:
        return torch.empty(count, dtype=torch.uint8)
    pages = mmap.mmap(-1, count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)  # new pages cost more than what is read into them
    return torch.frombuffer(pages, dtype=torch.uint8)


# --------------------------------------------------------------------------------------------------------- safetensors


@contextmanager
def open_safetensors(path: Path) -> Iterator[Tensors]:
    with open_regular(path) as file:
        yield Tensors(read_header(file), partial(read_bytes, file))


def read_header(file: BinaryIO) -> dict[str, Stored]:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(bytes(read_bytes(file, 0, 8).numpy()), "little")
    if length > min(size - 8, MAX_HEADER):
        raise ValueError(f"its header would take {length:,} bytes; the file has {size:,}, and {MAX_HEADER:,} are read")
    header = json.loads(bytes(read_bytes(file, 8, length).numpy()), object_pairs_hook=without_repeats)
    header.pop("__metadata__", None)
    held, last = {}, 0
    for name, entry in header.items():
        (begin, end), shape, dtype = entry["data_offsets"], entry["shape"], DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ValueError(f"its {name} is of type {entry['dtype']!r}; {', '.join(DTYPES)} are read")
        if not all(type(n) is int and n >= 0 for n in (*shape, begin)):
            raise ValueError(f"its header says {name} is {shape} from byte {begin!r}")
        if end != begin + math.prod(shape) * dtype.itemsize:
            raise ValueError(f"its header gives {name}, {entry['dtype']} {shape}, the bytes {begin} to {end}")
        held[name] = Stored(dtype, shape, 8 + length + begin)
        last = max(last, end)
    if 8 + length + last != size:
        raise ValueError(f"it is {size:,} bytes long, by its header {8 + length + last:,}; it was cut off or added to")
    return held


def without_repeats(pairs: list[tuple]) -> dict:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header names a tensor twice")
    return found


# ---------------------------------------------------------------------------------------------------------- torch.save


@contextmanager
def open_checkpoint(path: Path, names: tuple[str, ...]) -> Iterator[Tensors]:
    """The named tensors of a dict in a file of torch.save, or in a .gz of one, which is unpacked into memory once."""
    with open_regular(path) as file:
        if path.suffix != ".gz":
            yield Tensors(stored_tensors(file, names), partial(read_bytes, file))
            return
        unpacked = unpack(file)
    yield Tensors(stored_tensors(unpacked, names), partial(bytes_in, unpacked))


def stored_tensors(file: BinaryIO, names: tuple[str, ...]) -> dict[str, Stored]:
    if file.read(4) != b"PK\x03\x04":
        raise ValueError("it is no zip as torch.save writes it")
    file.seek(0)
    with one_at_a_time, FakeTensorMode():  # shapes, and where the numbers lie in the file; reads none of them
        held = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(held, dict):
        raise ValueError(f"it holds a {type(held).__name__}, not a dict")
    if missing := [name for name in names if name not in held]:
        raise ValueError(f"it lacks {missing} and holds {sorted(map(str, held))}")
    return {name: stored(name, held[name]) for name in names}


def stored(name: str, x) -> Stored:
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.device.type != "cpu":
        what = f"{x.layout} on {x.device}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"its {name} is no tensor of stored numbers, but {what}")
    storage, n = x.untyped_storage(), x.element_size()
    if x.numel() * n > storage.nbytes():
        raise ValueError(f"its {name} is {list(x.shape)}, of which {storage.nbytes():,} bytes are stored")
    begin = storage._checkpoint_offset
    view = None if x.is_contiguous() else (begin, storage.nbytes(), x.stride(), x.storage_offset())
    return Stored(x.dtype, list(x.shape), begin + x.storage_offset() * n, view)


def unpack(file: BinaryIO) -> io.BytesIO:
    limit = max(LEAST, PACKED * os.fstat(file.fileno()).st_size)
    unpacked = io.BytesIO()
    with gzip.open(file) as packed:
        while chunk := packed.read(1 << 20):
            unpacked.write(chunk)
            if unpacked.tell() > limit:
                raise ValueError(f"it unpacks to more than {limit:,} bytes, {PACKED} times its size: no states do that")
    unpacked.seek(0)
    return unpacked


def bytes_in(unpacked: io.BytesIO, begin: int, count: int) -> Tensor:
    if begin + count > (size := unpacked.getbuffer().nbytes):
        raise ValueError(f"it ends at byte {size:,}, its tensors at {begin + count:,} or later; it was cut off")
    view = unpacked.getbuffer()
    return torch.frombuffer(view, dtype=torch.uint8, count=count, offset=begin) if count else torch.empty(0).byte()
