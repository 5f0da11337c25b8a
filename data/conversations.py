"""Conversations of your own: files of them to documents, by some processes, with a cache of their tokens.

Knows tokenizers and files, never models.
"""

import codecs
import gzip
import hashlib
import json
import multiprocessing
import os
import pickle
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tqdm import tqdm
from transformers.dynamic_module_utils import init_hf_modules

from data.documents import Document, Documents, Skipped
from data.engine import Engine
from data.files import check_regular, read_json, replace_with
from data.grammar import stop_ids
from data.records import load_list
from data.rendering import TemplateHangs
from data.server import Away
from data.templates import Converter, Made, gather

CACHE_VERSION = 5  # to be raised when the same lines give other documents
PIECE = 4 << 20  # bytes that are read, tokenised and cached together
POOL_FROM = 64 << 20  # bytes that are worth starting processes for
LINE = 64 << 20  # bytes of the longest line
SUFFIXES = (".jsonl", ".json", ".jsonl.gz")
TOO_LONG = "the prompt fills the row"


def read_conversations(
    paths: list[Path],
    tokenizer,
    row_tokens: int,
    reasoning: str = "train",
    workers: int | None = None,
    cache: Path | None = None,
    progress: bool = True,
    template_args: dict | None = None,
    engine: Engine | None = None,
) -> tuple["Documents", "Report"]:
    """Documents of at most `row_tokens` tokens with something to learn, in the order of files and lines, and what
    became of the rest.

    paths: files (`.jsonl`, `.jsonl.gz`, `.json` with a list or lines) and folders of them. A line is
    {"messages": [{"role", "content", ..}]}, ShareGPT's {"conversations": [{"from", "value"}]}, {"prompt",
    "completion"} (texts or messages), each with "tools", "system" and "chat_template_kwargs" beside, or {"input_ids",
    "loss_mask"}; forms may be mixed. reasoning: "mask" learns no thinking block. workers: processes, None for as many
    as pay; they change nothing but the time. cache: a folder that keeps the tokens of every piece of a file by its
    content, the tokenizer, its template and what that is given: template_args, under a record's own. engine: renders
    them instead, many at once, in one process; what it serves is part of the cache's key.
    ValueError: an engine that fails, a path without such files, no conversation left (with the reasons); a bad line is
    skipped and counted.
    """
    if reasoning not in ("train", "mask"):
        raise ValueError(f"reasoning is {reasoning!r}; 'train' or 'mask' is wanted")
    pieces = [piece for path in find_files(paths) for piece in cut_file(path)]
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
    how = (tokenizer, reasoning, template_args or {}, engine)
    report, parts, line, size = Report(), [], 0, sum(piece.end - piece.begin for piece in pieces)
    with tqdm(total=size, desc="conversations", unit="B", unit_scale=True, disable=not progress) as bar:
        for piece, several in zip(pieces, convert_all(pieces, how, workers, cache), strict=True):
            line = 0 if piece.begin == 0 else line
            for made in several:
                parts.append(fit_rows(made, piece.path, line, row_tokens, report))
                line += made.lines
            bar.update(piece.end - piece.begin)
    if not report.used:
        worst = (f"{n:,} x {reason} ({report.skipped.named[reason][0]})" for reason, n in report.skipped.most_common(8))
        reasons = "; ".join(worst) or "the files are empty"
        raise ValueError(f"none of {report.read:,} conversations in {', '.join(map(str, paths))} is usable: {reasons}")
    lengths = np.concatenate([np.asarray(part.lengths, np.int64) for part in parts])
    tokens, loss_mask = (torch.from_numpy(np.concatenate([part[i] for part in parts])) for i in (0, 1))
    sources = [source for part in parts for source in part.sources]
    documents = Documents(tokens, loss_mask, lengths.cumsum() - lengths, lengths, sources)
    report.documents, report.tokens = len(documents), len(documents.tokens)
    report.supervised = int(documents.loss_mask.sum())
    return documents, report


def answered(
    tokenizer,
    pairs: list[tuple[str, str]],
    source: str = "corpus",
    template_args: dict | None = None,
    engine: Engine | None = None,
) -> list[Document]:
    """Documents of (prompt, answer) pairs: a user and an assistant turn each. ValueError: nothing to learn in one."""
    converter, turns = Converter(tokenizer, "train", template_args, engine), ("user", "assistant")
    return [
        converter.documents(
            [{"role": role, "content": text} for role, text in zip(turns, pair, strict=True)], source=f"{source}:{i}"
        )[0]
        for i, pair in enumerate(pairs)
    ]


@dataclass
class Report:
    """What became of the conversations. `skipped` counts and names conversations by reason, `notes` what befell some
    turns."""

    read: int = 0
    used: int = 0
    documents: int = 0
    cut: int = 0  # documents that ended behind the row
    tokens: int = 0
    supervised: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    notes: Counter = field(default_factory=Counter)

    def lines(self) -> list[str]:
        """For people."""
        share = self.supervised / max(self.tokens, 1)
        first = (
            f"{self.used:,} of {self.read:,} conversations in {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{share:.0%} learned; {self.cut:,} cut to a row"
        )
        return [first, *self.skipped.lines(), *(f"  {n:,} {note}" for note, n in self.notes.most_common())]


# ------------------------------------------------------------------------------------------------------------ the files


class Piece(NamedTuple):
    """Whole lines of a file, or a whole file that cannot be cut (compressed, or one JSON list)."""

    path: Path
    begin: int  # bytes
    end: int
    is_list: bool

    def blobs(self) -> Iterator[bytes]:
        """Its bytes; of a compressed file, which may hold any amount, a piece's worth of whole lines at a time."""
        try:
            if self.path.suffix == ".gz":
                with gzip.open(self.path) as file:
                    while blob := file.read(PIECE) + whole_line(file, self.path):
                        yield blob
                return
            with self.path.open("rb") as file:
                file.seek(self.begin)
                yield file.read(self.end - self.begin)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{self.path} cannot be read ({error}); copy it again, or leave it out") from None


def whole_line(file, path: Path) -> bytes:
    """The rest of a line."""
    rest = file.readline(LINE)
    if len(rest) == LINE:
        raise ValueError(
            f"--data {path} has a line of more than {LINE >> 20} MB near byte {file.tell():,}; one conversation a line "
            "is wanted"
        )
    return rest


def find_files(paths: list[Path]) -> list[Path]:
    files = []
    for path in map(Path, paths):
        found = [path]
        if not path.is_file():
            found = sorted(p for p in path.rglob("*") if p.name.endswith(SUFFIXES) and not p.is_dir())
        for each in found if found or not path.exists() else [path]:
            check_regular(each, "--data")
        if not found:
            what = f"holds no {', '.join(SUFFIXES)} file" if path.is_dir() else "does not exist"
            raise ValueError(f"--data {path} {what}; conversations are read from such files and from folders of them")
        files += found
    return files


def cut_file(path: Path) -> Iterator[Piece]:
    size, begin = path.stat().st_size, 0
    with path.open("rb") as file:
        head = file.read(4096)
        if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError(f"--data {path} is UTF-16 by its first bytes; save it as UTF-8")
        is_list = path.suffix == ".json" and head.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        if is_list or path.suffix == ".gz":
            yield Piece(path, 0, size, is_list)
            return
        while begin < size:
            file.seek(begin + PIECE)
            whole_line(file, path)
            end = min(file.tell(), size)
            yield Piece(path, begin, end, False)
            begin = end


def records(files: list[Path]) -> Iterator[tuple[str, str, bytes]]:
    """Source (as in chats.jsonl:3), hash and text of every conversation."""
    for path in files:
        number = 0
        for piece in cut_file(path):
            for blob in piece.blobs():
                lines = load_list(blob) if piece.is_list else blob.removesuffix(b"\n").split(b"\n")
                for n, line in enumerate(lines, number + 1):
                    text = (line if isinstance(line, bytes) else json.dumps(line).encode()).strip()
                    if text:
                        yield f"{path}:{n}", hashlib.sha256(text).hexdigest()[:16], text
                number += len(lines)


class Fitted(NamedTuple):
    tokens: np.ndarray  # [N] int32
    loss_mask: np.ndarray  # [N] bool
    lengths: list[int]
    sources: list[str]


def fit_rows(made: Made, path: Path, first_line: int, row_tokens: int, report: Report) -> Fitted:
    """Documents of a piece cut to a row; those that have nothing to learn there (`anchors_of` none) are left out."""
    report.read += made.read
    for reason, (n, lines) in made.skipped.items():
        report.skipped.add(reason, (f"{path}:{first_line + line + 1}" for line in lines), n)
    report.notes.update(made.notes)
    kept, records = [], made.records.tolist()
    for end, length, record in zip(made.lengths.cumsum().tolist(), made.lengths.tolist(), records, strict=True):
        begin, fits = end - length, min(length, row_tokens)
        if made.loss_mask[begin + 1 : begin + fits].any():  # a token at 0 is drafted from no slot
            kept.append((begin, fits, record))
            report.cut += length > fits
    used = {record for _, _, record in kept}
    report.used += len(used)
    if too_long := sorted(set(records) - used):
        report.skipped.add(TOO_LONG, (f"{path}:{first_line + line + 1}" for line in too_long), len(too_long))
    report.notes += Counter({f"documents left out: {TOO_LONG}": sum(r in used for r in records) - len(kept)})
    at = [slice(begin, begin + fits) for begin, fits, _ in kept]
    return Fitted(
        np.concatenate([made.tokens[:0], *(made.tokens[i] for i in at)]),
        np.concatenate([made.loss_mask[:0], *(made.loss_mask[i] for i in at)]),
        [fits for _, fits, _ in kept],
        [f"{path}:{first_line + record + 1}" for _, _, record in kept],
    )


# ---------------------------------------------------------------------------------------------- processes and the cache


def convert_all(pieces: list[Piece], how: tuple, workers: int | None, cache) -> Iterator[list[Made]]:
    """What became of every piece, in order. how: what a Converter is made of."""
    key, engine = None if cache is None else fingerprint(*how, cache), how[3]
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if workers is None:  # alone, a fast tokenizer uses two cores by itself
        workers = cpus if cpus > 2 and sum(p.end - p.begin for p in pieces) >= POOL_FROM else 1
    if min(workers, len(pieces)) <= 1 or engine is not None:
        converter = Converter(*how)
        yield from (cached(converter, piece, cache, key) for piece in pieces)
        return
    state = pickle.dumps((how, cache, key))
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(min(workers, len(pieces)), spawn, start_worker, (state,)) as pool:
        yield from pool.map(work, pieces)


def start_worker(state: bytes) -> None:
    global worker_state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    init_hf_modules()  # where classes of --trust-remote-code tokenizers are found
    how, cache, key = pickle.loads(state)
    worker_state = Converter(*how), cache, key


def work(piece: Piece) -> list[Made]:
    converter, cache, key = worker_state
    return cached(converter, piece, cache, key)


def fingerprint(tokenizer, reasoning: str, template_args: dict, engine: Engine | None, cache: Path) -> bytes:
    """Of all that decides what a line becomes, but the line."""
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    names = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map, stop_ids(tokenizer)]
    settings = [CACHE_VERSION, transformers.__version__, reasoning, template_args, names, vocabulary]
    if engine is not None:
        settings.append(served(engine, template_args, cache))
    return hashlib.sha256(json.dumps(settings, default=str).encode()).digest()


def served(engine: Engine, template_args: dict, cache: Path) -> dict:
    """What the engine serves; what it served last where it is away, so that a run resumes without it."""
    asked = json.dumps([engine.url, template_args], sort_keys=True, default=str)
    path = Path(cache) / f"served-{hashlib.sha256(asked.encode()).hexdigest()[:16]}.json"
    try:
        now = engine.identity(template_args)
    except Away:
        if not path.is_file():
            raise
        return read_json(path, ())
    replace_with(path, lambda half: half.write_text(json.dumps(now)))
    return now


def cached(converter: "Converter", piece: Piece, cache: Path | None, key: bytes | None) -> list[Made]:
    """What became of a piece, from the cache where that has it. ValueError: its chat template does not end."""
    try:
        return [cached_blob(converter, blob, piece.is_list, cache, key) for blob in piece.blobs()]
    except TemplateHangs as error:
        raise ValueError(f"{error} at a conversation of {piece.path}; correct the template") from None


def cached_blob(converter: "Converter", blob: bytes, is_list: bool, cache: Path | None, key: bytes | None) -> Made:
    if not blob.strip():  # at once: it may be gigabytes
        return gather([], [], [], blob.removesuffix(b"\n").count(b"\n") + 1, Counter())
    if cache is None:
        return converter.convert(blob, is_list)
    name = hashlib.sha256(key + bytes([is_list]) + blob).hexdigest()
    path = Path(cache) / f"{name}.npz"
    try:
        with np.load(path, allow_pickle=False) as file:  # a zip: damage does not pass its checksums
            arrays = [file[name] for name in Made._fields[:4]]
            return Made(*arrays, *json.loads(file["counts"].tobytes()))
    except FileNotFoundError:
        pass
    except Exception:  # whatever a damaged file provokes: it is made again
        path.unlink(missing_ok=True)
    made = converter.convert(blob, is_list)
    counts = np.frombuffer(json.dumps(made[4:]).encode(), np.uint8)
    arrays = dict(zip(Made._fields[:4], made[:4], strict=True))
    with tempfile.NamedTemporaryFile(dir=cache, suffix=".tmp", delete=False) as half:
        np.savez(half, **arrays, counts=counts)
    os.replace(half.name, path)
    return made
