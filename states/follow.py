"""Reading states while training: ahead of the step that needs them, and as a running vLLM writes them."""

import hashlib
import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from data.documents import Document, Skipped
from data.files import Damaged, being_written, naming
from states.captured import check_states, check_tokens
from states.index import token_key
from states.layer_files import layer_file_length, read_layers


def prefetched(iterable: Iterable, depth: int = 2) -> Iterator:
    """The items of `iterable` in order, made by a thread up to `depth` ahead of the consumer.

    What it raises is raised here. The thread ends with the consumer: when that stops early, an `iterable.stop()` is
    called if there is one, so that a source that waits for files wakes up.
    """
    ready, stopped, end = queue.Queue(depth), threading.Event(), object()

    def put(item, error=None) -> bool:
        while not stopped.is_set():
            with suppress(queue.Full):
                ready.put((item, error), timeout=0.1)
                return True
        return False

    def fill():
        try:
            for item in iterable:
                if not put(item):
                    return
            put(end)
        except BaseException as error:
            put(end, error)

    thread = threading.Thread(target=fill, name="prefetched", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is end:
                return
            yield item
    finally:
        stopped.set()
        if hasattr(iterable, "stop"):
            iterable.stop()
        thread.join()


UNUSED = 10  # files that are damaged or whose text is not known, before a stream is given up that brought no other


class Follower:
    """(document, features [S,3H], last [S,H]) of the files that a running vLLM (extract_hidden_states) leaves in a
    directory: oldest first, each deleted once `done(document)` says that it was used.

    Takes files that no writer holds locked and that read whole. One that stays damaged and unchanged for `patience`
    looks is renamed .bad, one whose tokens have no mask in `masks` (`masks_of` the conversations sent) .unknown; both
    are counted and named in `skipped`. ValueError when the first ones all were. Ends once the file `stop_name` exists
    and none of its files is left; ranks share the files by name. Above `max_bytes` in all rank 0 says so once and makes
    a file PAUSE, which whoever sends requests must heed, and removes it below half.
    """

    def __init__(
        self,
        directory,
        ends,
        masks: dict,
        *,
        stop_name="STOP",
        poll_s=1.0,
        rank=0,
        world=1,
        max_bytes=None,
        patience=10,
    ):
        self.directory, self.ends, self.masks = Path(directory), ends, masks
        if not self.directory.is_dir():
            raise ValueError(f"{directory} is no directory; make it before vLLM writes there")
        self.stop_name, self.poll_s, self.rank, self.world = stop_name, poll_s, rank, world
        self.max_bytes, self.patience = max_bytes, patience
        self.skipped, self.damaged = Skipped(), {}  # path: (looks, time and size it had)
        self.taken, self.waiting = set(), []
        self.warned, self.stopped = False, threading.Event()

    def __iter__(self) -> "Follower":
        return self

    def __next__(self) -> tuple[Document, Tensor, Tensor]:
        while not self.stopped.is_set():
            while self.waiting:
                if (item := self.take(self.waiting.pop(0))) is not None:
                    return item
            at_end = (self.directory / self.stop_name).exists()  # before the look: a file may come between
            self.waiting = self.look()
            if at_end and not self.waiting:
                break
            if not any(not being_written(path) and path not in self.damaged for path in self.waiting):
                self.stopped.wait(self.poll_s)
        raise StopIteration

    def done(self, document: Document) -> None:
        """Deletes the document's file."""
        path = Path(document.source)
        self.remove(path)
        self.taken.discard(path)

    def stop(self) -> None:
        """Ends the iteration, from any thread; files that are left stay."""
        self.stopped.set()

    def look(self) -> list[Path]:
        """This rank's files that were not taken yet, the oldest first."""
        files, used = [], 0
        for path in self.directory.glob("*.safetensors"):
            with suppress(FileNotFoundError):  # another rank was done with it
                stat = path.stat()
                used += stat.st_size
                if self.is_mine(path) and path not in self.taken:
                    files.append((stat.st_mtime_ns, path.name, path))
        if self.max_bytes is not None and self.rank == 0:
            self.bound(used)
        return [path for *_, path in sorted(files)]

    def is_mine(self, path: Path) -> bool:
        return int(hashlib.sha256(path.name.encode()).hexdigest(), 16) % self.world == self.rank

    def bound(self, used: int) -> None:
        pause = self.directory / "PAUSE"
        if used > self.max_bytes:
            if not self.warned:
                print(f"warning: {used / 1e9:,.2f} GB wait in {self.directory}, more than {self.max_bytes / 1e9:,.2f}")
            self.warned = True
            pause.touch()
        elif used < self.max_bytes / 2:
            pause.unlink(missing_ok=True)

    def take(self, path: Path) -> tuple[Document, Tensor, Tensor] | None:
        if being_written(path) or not path.exists():
            return None
        try:
            with naming(path):
                layer_file_length(path, self.ends.hidden_size)
                features, last, tokens = read_layers(path)
                check_tokens(tokens, self.ends.vocab_size)
                last = self.ends.norm(last)
                check_states(features, last)
        except Damaged as error:
            self.doubt(path, error)
            return None
        self.damaged.pop(path, None)
        mask = self.masks.get(token_key(tokens))
        if mask is None:
            self.set_aside(path, "unknown", path.name)
            return None
        self.skipped.kept += 1
        self.taken.add(path)
        return Document(tokens, torch.as_tensor(mask).bool(), str(path)), features, last

    def set_aside(self, path: Path, reason: str, name: str) -> None:
        suffix = {"damaged": "bad"}.get(reason, reason)
        path.rename(f"{path}.{suffix}")
        self.skipped.add(reason, [name])
        if self.skipped.total() == UNUSED and not self.skipped.kept:
            said = "; ".join(line.strip() for line in self.skipped.lines())
            raise ValueError(
                f"none of the first {UNUSED} files in {self.directory} is a whole one with a conversation of --data "
                f"({said}; they are kept as .bad or .unknown); were others sent, or with another template or "
                "--row-tokens?"
            )

    def doubt(self, path: Path, error: Damaged) -> None:
        with suppress(FileNotFoundError):
            stat = path.stat()
            stamp = stat.st_mtime_ns, stat.st_size
            looks, before = self.damaged.get(path, (0, stamp))
            self.damaged[path] = (looks + 1 if stamp == before else 1, stamp)
            if self.damaged[path][0] >= self.patience:
                del self.damaged[path]
                self.set_aside(path, "damaged", str(error).rpartition("; ")[0])

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        Path(f"{path}.lock").unlink(missing_ok=True)
