"""Capturing states: in a layout of our own, ahead of the training step, or as a running vLLM writes them."""

import errno
import fcntl
import hashlib
import http.client
import json
import os
import queue
import shutil
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import torch
from einops import rearrange
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from captured import (
    CAPTURE_KEYS,
    CAPTURE_VERSION,
    being_written,
    check_states,
    check_tokens,
    head_sample,
    layer_file_length,
    read_index,
    read_layers,
    token_key,
)
from data import Document, Skipped
from files import Damaged, naming, read_json, replace_with
from stored import open_regular
from target import Target

# ------------------------------------------------------------------------------------------------------------- writing

CHUNK_TOKENS = 16384  # captured together


def write_capture(out, target: Target, documents: list[Document], dtype=torch.bfloat16, note: str = "") -> None:
    """Capture all documents into the directory `out`, in float32 or bf16; goes on where a killed call stopped.

    hidden_states/hs_{i}.safetensors in the layout of speculators but for the last layer, which is stored as training
    reads it, after the final norm (capture.json says so); index.jsonl gets a conversation's line once its file is
    whole. Interrupted or not, the bytes are the same.
    ValueError: the disk is too small (before anything is written), `out` holds anything but the same capture.
    """
    out, meta = Path(out), describe(target, documents, dtype, note)
    lengths = [len(d.tokens) for d in documents]
    check_space(out, lengths, check_out(out, meta)[0], bytes_per_token(target.hidden_size, dtype))
    out.mkdir(parents=True, exist_ok=True)
    with opened_alone(out / "index.jsonl") as index:
        done, used = check_out(out, meta)  # as it is now that nobody else writes
        index.truncate(used)
        for half in (*out.glob("*capture.json*.part"), *out.glob("hidden_states/*hs_*.part")):
            half.unlink()  # of a killed call
        with writing(out / "capture.json"):
            replace_with(out / "capture.json", lambda half: half.write_text(json.dumps(meta, indent=1) + "\n"))
        (out / "hidden_states").mkdir(exist_ok=True)
        capture_rest(out, target, documents, dtype, index, done)


def capture_rest(out: Path, target: Target, documents: list[Document], dtype, index, done: int) -> None:
    lengths = [len(d.tokens) for d in documents]
    with tqdm(total=sum(lengths), desc="capturing", unit="token") as bar:
        bar.update(sum(lengths[:done]))
        for chunk in chunks(lengths):
            if chunk[-1] < done:
                continue
            # whole chunks, also after an interruption: the same batches give the same bits
            captured = target.capture([documents[i].tokens for i in chunk])
            for i, states in zip(chunk, captured, strict=True):
                if i >= done:
                    write_document(out, index, f"hidden_states/hs_{i}.safetensors", documents[i], states, dtype)
                    bar.update(lengths[i])


def write_document(out: Path, index, name: str, document: Document, states, dtype) -> None:
    features, last = (x.to("cpu", dtype) for x in states)
    hidden = torch.cat([rearrange(features, "s (l h) -> s l h", l=3), last[:, None]], dim=1)
    tensors = {"hidden_states": hidden, "token_ids": document.tokens.cpu()}
    with writing(out / name):
        replace_with(out / name, lambda half: save_file(tensors, half, metadata={"last_hidden": "after_norm"}))
    row = {"file": name, "input_ids": document.tokens.tolist(), "loss_mask": document.loss_mask.int().tolist()}
    append(index, row)


@contextmanager
def opened_alone(path: Path) -> Iterator[BinaryIO]:
    """`path` to append to, unbuffered, which no other process has open so. ValueError: one has, or it is no file."""
    if path.exists() and not path.is_file():  # a FIFO would wait for its reader
        raise ValueError(f"{path} is no regular file; remove it")
    with open(path, "ab", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another process writes into {path.parent}; wait for it, or name another") from None
        yield file


def append(file: BinaryIO, row) -> None:
    """A line of JSON behind the others, at once."""
    line = (json.dumps(row) + "\n").encode()
    with writing(Path(file.name)):
        while line:
            line = line[file.write(line) :]


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A full or failing disk is an OSError that names a file."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(errno.EIO, " ".join(str(error).split()), str(path)) from error
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def describe(target: Target, documents: list[Document], dtype, note: str) -> dict:
    """capture.json: what a directory holds, and by digests of what."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"states are stored in float32 or bfloat16, not in {dtype}")
    if not documents:
        raise ValueError("there are no documents to capture")
    texts, weights = hashlib.sha256(), hashlib.sha256()
    for d in documents:
        texts.update(f"{token_key(d.tokens)} {token_key(d.loss_mask)}\n".encode())
    for name, x in target.model.named_parameters():  # a few numbers of each tell fine-tuned weights apart
        weights.update(f"{name} {list(x.shape)} {x.detach().flatten()[:8].float().tolist()}\n".encode())
    return {
        "version": CAPTURE_VERSION,
        "note": note,
        "target": target.config.model_type,
        "target_digest": weights.hexdigest(),
        "documents": len(documents),
        "documents_digest": texts.hexdigest(),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "aux_layers": list(target.aux_layers),
        "dtype": str(dtype).removeprefix("torch."),
        "last_hidden": "after_norm",
        "head": head_sample(target.lm_head),
    }


def check_out(out: Path, meta: dict) -> tuple[int, int]:
    """How many documents of this very capture `out` holds already, and the bytes of their lines in its index: behind
    them stands what an interruption left half done."""
    index = out / "index.jsonl"
    if not (out / "capture.json").is_file():
        if out.exists() and any(not is_beginning(x) for x in out.iterdir()):
            raise ValueError(f"{out} exists and holds no capture; name another directory, or remove it")
        return 0, 0
    held = read_json(out / "capture.json", CAPTURE_KEYS)
    if other := [key for key in meta if key != "note" and held.get(key) != meta[key]]:
        said = ", ".join(f"{key} {held.get(key)!r}, not {meta[key]!r}"[:200] for key in other)
        raise ValueError(f"{out} holds another capture ({said}); name another directory, or remove it")
    rows, used = read_index(index, ("file", "input_ids", "loss_mask")) if index.exists() else ([], 0)
    for i, row in enumerate(rows):
        if i >= meta["documents"] or row["file"] != f"hidden_states/hs_{i}.safetensors":
            raise ValueError(f"line {i + 1} of {index} lists {row['file']!r}, which is not its place; remove {out}")
    return len(rows), used


def is_beginning(path: Path) -> bool:
    """What a call that was killed at once leaves."""
    return path.name == "index.jsonl" and path.stat().st_size == 0 or path.match("*capture.json*.part")


def check_space(out: Path, lengths: list[int], done: int, per_token: int) -> None:
    left = per_token * sum(lengths[done:])
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    print(
        f"capture: {sum(lengths):,} tokens of {per_token:,} bytes, {per_token * sum(lengths) / 1e9:,.2f} GB in {out}; "
        f"{left / 1e9:,.2f} GB to write, {free / 1e9:,.2f} GB free"
    )
    if left > free:
        raise ValueError(
            f"{left / 1e9:,.2f} GB do not fit into the {free / 1e9:,.2f} GB left at {parent}; free some first"
        )


def bytes_per_token(hidden: int, dtype) -> int:
    return 4 * hidden * dtype.itemsize + torch.long.itemsize


def chunks(lengths: list[int]) -> Iterator[list[int]]:
    """Consecutive indices of CHUNK_TOKENS at most, or of one document: they depend on the documents alone."""
    chunk = []
    for i, length in enumerate(lengths):
        if chunk and sum(lengths[j] for j in chunk) + length > CHUNK_TOKENS:
            yield chunk
            chunk = []
        chunk.append(i)
    yield chunk


# ------------------------------------------------------------------------------------- by a running vLLM, from its side

AT_ONCE = 64  # requests in flight


def send(url: str, out, documents: list[Document]) -> None:
    """Has a vLLM that serves the target with `extract_hidden_states` into the directory `out` run over all documents.

    Each is one completion request of its tokens for one more token. `out`/index.jsonl tells readers their loss masks,
    a file PAUSE there makes it wait (`Follower`), a file STOP says that all were sent, and `sent` how many, so that a
    second call goes on. ValueError: no server there, one that refuses, or `out` was made for other documents.
    """
    out, lines = Path(out), []
    for d in documents:
        lines.append(json.dumps({"input_ids": d.tokens.tolist(), "loss_mask": d.loss_mask.int().tolist()}) + "\n")
    model = served_model(url)
    out.mkdir(parents=True, exist_ok=True)
    with opened_alone(out / "sent") as count:
        check_listed(out / "index.jsonl", "".join(lines).encode())
        begin = sent_before(out / "sent", len(documents))
        with ThreadPoolExecutor(AT_ONCE) as pool, tqdm(total=len(documents), initial=begin, desc="sent") as bar:
            for first in range(begin, len(documents), 16 * AT_ONCE):
                some = documents[first : first + 16 * AT_ONCE]
                for _ in pool.map(lambda document: complete(url, model, out, document), some):
                    bar.update()
                append(count, first + len(some))
    (out / "STOP").touch()


def check_listed(index: Path, text: bytes) -> None:
    """Writes the index, unless it is there already. ValueError: with other documents."""
    if not index.exists():
        with writing(index):
            return replace_with(index, lambda half: half.write_bytes(text))
    with naming(index, "name another directory, or remove it"), open_regular(index) as file:
        if os.fstat(file.fileno()).st_size != len(text) or file.read() != text:
            raise ValueError("it lists other documents")


def sent_before(path: Path, documents: int) -> int:
    """How many were sent, by the last whole line."""
    with naming(path, "remove it, and all are sent again"), open_regular(path) as file:
        lines = [line for line in file.read(1 << 20).splitlines(keepends=True) if line.endswith(b"\n")]
        begin = int(lines[-1]) if lines else 0
        if not 0 <= begin <= documents:
            raise ValueError(f"it says that {begin} of {documents} documents were sent")
        return begin


def complete(url: str, model: str, out: Path, document: Document) -> None:
    """One request; returns when vLLM has written its file. That comes after its answer, and what is counted as sent
    lies whole on the disk."""
    while (out / "PAUSE").exists():
        time.sleep(1.0)
    place = f"{url}/v1/completions"
    answer = ask(place, {"model": model, "prompt": document.tokens.tolist(), "max_tokens": 1})
    with answering(place):
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str | None):
            raise TypeError(f"hidden_states_path is {path!r}")
    for _ in range(1200):
        if path is None or not being_written(Path(path)):
            return
        time.sleep(0.05)
    raise ValueError(f"vLLM does not finish {path}; is its disk full?")


def served_model(url: str) -> str:
    check_url(url)
    answer = ask(place := f"{url}/v1/models")
    with answering(place):
        if not isinstance(name := answer["data"][0]["id"], str):
            raise TypeError(f"the model's id is {name!r}")
        return name


def check_url(url: str) -> None:
    with suppress(ValueError):  # of a port or an address that cannot be
        parts = urllib.parse.urlsplit(url)
        written = url.isprintable() and " " not in url
        if written and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ValueError(f"--send is given {url!r}; the address of a running vLLM is wanted, as in http://localhost:8000")


ANSWER = 64 << 20  # bytes of an answer that are read
WRONG = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, http.client.HTTPException)


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with answering(url):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read(ANSWER + 1)
        if len(text) > ANSWER:
            raise ValueError(f"an answer of more than {ANSWER:,} bytes")
        if not isinstance(said := json.loads(text), dict):
            raise TypeError(f"the answer is a {type(said).__name__}")
        return said


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Whatever is wrong with a server's answer is a ValueError that names the address, in one line."""
    try:
        yield
    except WRONG as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{url} does not answer as vLLM does ({reason}); is the server up, does it fit the text?"
        ) from error


# ------------------------------------------------------------------------------------- while training: ahead, and after


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
