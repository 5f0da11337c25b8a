"""Conversations of your own, as documents with a loss mask in the target's own chat template.

An assistant turn is rendered twice: with everything before it and the generation prompt, which is what an engine is
given, and once more with the turn itself. What the second has beyond the first is what the target says: it is learned,
up to and with its end of turn; nothing of the first is. So no template needs `{% generation %}`, and whatever a
generation prompt brings (an empty thinking block) is never learned.

    prompt of turn 1    <|User|>Hi<|Assistant|></think>
    with turn 1         <|User|>Hi<|Assistant|></think>Hello.<end>
    learned                                            ^^^^^^^^^^^

Turns share a document while the prompt of the next one begins with all that came so far. Where a template renders
history differently (the reasoning of earlier turns is left out) a new document begins with that prompt, and only its
last turn is learned: every turn is learned once, behind the very text that an engine would give.

Thinking templates (they write `</think>`) often drop the reasoning even of the last turn, although the target says it.
Such a turn is put together again: `<think>` unless the prompt opened it, reasoning, `</think>`, and the rendered rest.

Knows tokenizers and files, never models.
"""

import codecs
import copy
import ctypes
import gzip
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import processors
from tqdm import tqdm
from transformers.dynamic_module_utils import init_hf_modules

from data import Document, Documents, Skipped, listed
from files import check_regular

CACHE_VERSION = 2  # to be raised when the same lines give other documents
PIECE = 4 << 20  # bytes that are read, tokenised and cached together
POOL_FROM = 64 << 20  # bytes that are worth starting processes for
LINE = 64 << 20  # bytes of the longest line
TEXT = 1 << 26  # characters of the longest rendered conversation
TEMPLATE_SECONDS = 20  # of one call of a chat template, which takes milliseconds
BATCH = 32  # texts tokenised together: their offsets take a hundred bytes a token
SUFFIXES = (".jsonl", ".json", ".jsonl.gz")
OPEN, CLOSE = "<think>", "</think>"
NO_REASONING = re.compile(rf"\s*(?:{OPEN})?\s*(?:{CLOSE})?\s*")  # what a template leaves of a block it drops
REASONING = ("reasoning_content", "reasoning", "thinking")  # its names, of which templates read the first
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
TOO_LONG = "the prompt fills the row"
SPANS = "a token spans the border of what is learned"
REWRITTEN = "the template renders the prompt differently once it is answered"


def read_conversations(
    paths: list[Path],
    tokenizer,
    row_tokens: int,
    reasoning: str = "train",
    workers: int | None = None,
    cache: Path | None = None,
    progress: bool = True,
) -> tuple["Documents", "Report"]:
    """Documents of at most `row_tokens` tokens with something to learn, in the order of files and lines, and what
    became of the rest.

    paths: files (`.jsonl`, `.jsonl.gz`, `.json` with a list or lines) and folders of them. A line is
    {"messages": [{"role", "content", ..}], "tools": ..}, ShareGPT's {"conversations": [{"from", "value"}]}, or
    {"input_ids", "loss_mask"}; forms may be mixed. reasoning: "mask" learns no thinking block. workers: processes, None
    for as many as pay; they change nothing but the time. cache: a folder that keeps the tokens of every piece of a file
    by its content, the tokenizer and its template.
    ValueError: a path without such files, no conversation left (with the reasons); a bad line is skipped and counted.
    """
    if reasoning not in ("train", "mask"):
        raise ValueError(f"reasoning is {reasoning!r}; 'train' or 'mask' is wanted")
    pieces = [piece for path in find_files(paths) for piece in cut_file(path)]
    if cache is not None:
        Path(cache).mkdir(parents=True, exist_ok=True)
    report, parts, line, size = Report(), [], 0, sum(piece.end - piece.begin for piece in pieces)
    with tqdm(total=size, desc="conversations", unit="B", unit_scale=True, disable=not progress) as bar:
        for piece, several in zip(pieces, convert_all(pieces, tokenizer, reasoning, workers, cache), strict=True):
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


def answered(tokenizer, pairs: list[tuple[str, str]], source: str = "corpus") -> list[Document]:
    """Documents of (prompt, answer) pairs: a user and an assistant turn each. ValueError: nothing to learn in one."""
    converter, turns = Converter(tokenizer, "train"), ("user", "assistant")
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


# ---------------------------------------------------------------------------------------------------------- the files


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


class Made(NamedTuple):
    """What became of one piece, nothing cut to rows yet: N tokens of D documents."""

    tokens: np.ndarray  # [N] int32
    loss_mask: np.ndarray  # [N] bool
    lengths: np.ndarray  # [D] int64
    records: np.ndarray  # [D] int64, the line each came from, counted within the piece
    lines: int
    read: int
    skipped: dict[str, tuple[int, list[int]]]  # by reason: how many lines, and the first of them
    notes: dict[str, int]


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


def convert_all(pieces: list[Piece], tokenizer, reasoning: str, workers: int | None, cache) -> Iterator[list[Made]]:
    """What became of every piece, in order."""
    key = None if cache is None else fingerprint(tokenizer, reasoning)
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if workers is None:  # alone, a fast tokenizer uses two cores by itself
        workers = cpus if cpus > 2 and sum(p.end - p.begin for p in pieces) >= POOL_FROM else 1
    if min(workers, len(pieces)) <= 1:
        converter = Converter(tokenizer, reasoning)
        yield from (cached(converter, piece, cache, key) for piece in pieces)
        return
    state = pickle.dumps((tokenizer, reasoning, cache, key))
    spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(min(workers, len(pieces)), spawn, start_worker, (state,)) as pool:
        yield from pool.map(work, pieces)


def start_worker(state: bytes) -> None:
    global worker_state
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    init_hf_modules()  # where classes of --trust-remote-code tokenizers are found
    tokenizer, reasoning, cache, key = pickle.loads(state)
    worker_state = Converter(tokenizer, reasoning), cache, key


def work(piece: Piece) -> list[Made]:
    converter, cache, key = worker_state
    return cached(converter, piece, cache, key)


def fingerprint(tokenizer, reasoning: str) -> bytes:
    """Of all that decides what a line becomes, but the line."""
    vocabulary = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else sorted(tokenizer.get_vocab().items())
    names = [type(tokenizer).__name__, tokenizer.chat_template, tokenizer.special_tokens_map]
    settings = [CACHE_VERSION, transformers.__version__, reasoning, names, vocabulary]
    return hashlib.sha256(json.dumps(settings, default=str).encode()).digest()


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


# ------------------------------------------------------------------------------------------------- lines to documents


class TemplateHangs(BaseException):
    """Past every `except Exception` of whatever a template calls."""


class TimeLimit:
    """Ends what takes longer than TEMPLATE_SECONDS `within()` it, by TemplateHangs, if it runs any Python.

    A thread counts the time of all others, only while they are within; so neither signals nor the main thread are
    needed, a process that was stopped meanwhile loses nothing, and outside nothing is ever raised.
    """

    def __init__(self):
        self.left, self.lock, self.busy, self.counter = {}, threading.Lock(), threading.Event(), None

    @contextmanager
    def within(self):
        thread = threading.get_ident()
        with self.lock:
            self.left[thread] = TEMPLATE_SECONDS
            self.busy.set()
            if self.counter is None or not self.counter.is_alive():  # the first time, or in a fork
                self.counter = threading.Thread(target=self.count, daemon=True)
                self.counter.start()
        try:
            yield
        finally:
            with self.lock:
                self.left.pop(thread, None)

    def count(self):
        while self.busy.wait():
            time.sleep(0.1)
            with self.lock:
                self.left = {thread: seconds - 0.1 for thread, seconds in self.left.items()}
                for thread in [thread for thread, seconds in self.left.items() if seconds <= 0]:
                    del self.left[thread]
                    hangs = ctypes.py_object(TemplateHangs)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), hangs)
                if not self.left:
                    self.busy.clear()


LIMIT = TimeLimit()


class Skip(Exception):
    """Why a conversation, or one turn of it, is not learned."""


class Text(NamedTuple):
    """A document before it is tokens: what is learned are the characters [begin, end) of every span, ascending."""

    text: str
    spans: list[tuple[int, int]]


class Converter:
    """Lines to documents, with one tokenizer. Nothing that a line holds raises."""

    def __init__(self, tokenizer, reasoning: str):
        self.tokenizer, self.masks_reasoning = tokenizer, reasoning == "mask"
        self.thinks = CLOSE in str(tokenizer.chat_template)
        self.ends = tuple(str(token) for token in tokenizer.added_tokens_decoder.values())
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.backend = None
        if tokenizer.is_fast:
            self.backend = copy.deepcopy(tokenizer.backend_tokenizer)
            self.backend.no_truncation()
            self.backend.no_padding()
            self.backend.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets must not hide blanks

    def documents(
        self, messages: list[dict], tools: list[dict] | None = None, source: str = "a conversation"
    ) -> list[Document]:
        """The documents of one conversation in memory; ValueError with the reason where it has nothing to learn."""
        try:
            made = self.convert(json.dumps([{"messages": messages, "tools": tools}]).encode(), is_list=True)
        except TemplateHangs as error:
            raise ValueError(f"{error} at {source}; correct the template") from None
        if made.skipped:
            raise ValueError(f"{source} has nothing to learn: {next(iter(made.skipped))}")
        tokens, masks = (torch.from_numpy(x).split(made.lengths.tolist()) for x in (made.tokens, made.loss_mask))
        return [Document(ids.long(), mask, source) for ids, mask in zip(tokens, masks, strict=True)]

    def convert(self, blob: bytes, is_list: bool) -> Made:
        """Every record of whole lines, or of one JSON list. TemplateHangs: the chat template does not end."""
        lines = load_list(blob) if is_list else blob.removesuffix(b"\n").split(b"\n")
        self.notes, lost, texts, made, read = Counter(), [], [], [], []
        for number, line in enumerate(lines):
            if isinstance(line, bytes) and not line.strip():
                continue
            read.append(number)
            try:
                record = parse(line) if isinstance(line, bytes) else line
                if isinstance(record, dict) and {"input_ids", "loss_mask"} <= record.keys():
                    made.append((number, *self.tokenised(record)))
                else:
                    found, reasons = self.texts(*self.conversation(record))
                    texts += [(number, text) for text in found]
                    lost += [(number, reason) for reason in reasons]
            except Skip as skip:
                lost.append((number, str(skip)))
        for number, document in self.encode(texts):
            if isinstance(document, Skip):
                lost.append((number, str(document)))
            else:
                made.append((number, *document))
        return gather(made, lost, read, len(lines), self.notes)

    def tokenised(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, mask = listed(record["input_ids"], record["loss_mask"], self.vocab_size)
        except ValueError as error:
            raise Skip(str(error)) from None
        if not mask[1:].any():
            raise Skip("nothing supervised")
        return ids.astype(np.int32), mask

    def conversation(self, record) -> tuple[list[dict], list[dict] | None]:
        """Messages as templates read them, and the tools."""
        forms = [record.get("messages"), record.get("conversations")] if isinstance(record, dict) else []
        turns = next((turns for turns in forms if isinstance(turns, list)), None)
        if turns is None:
            raise Skip("neither messages nor conversations nor input_ids and loss_mask")
        messages = [self.message(turn) for turn in turns]
        roles = [message["role"] for message in messages]
        if not any(m["content"] or m.get("tool_calls") or m.get("reasoning_content") for m in messages):
            raise Skip("empty")
        if set(roles) == {"system"}:
            raise Skip("a system prompt alone")
        if "assistant" not in roles:
            raise Skip("no assistant turn")
        if roles[-1] != "assistant":
            raise Skip(f"ends in a {roles[-1]} turn")
        tools = record.get("tools") or None
        if isinstance(tools, str):
            tools = parse(tools)
        if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
            raise Skip("tools that are no list of objects")
        return messages, tools

    def message(self, turn) -> dict:
        if not isinstance(turn, dict):
            raise Skip("a turn that is no object")
        name, content = turn.get("role", turn.get("from")), turn.get("content", turn.get("value"))
        role = ROLES.get(str(name).lower())
        if role is None:
            raise Skip("an unknown role")
        if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
            content = "".join(part["text"] for part in content)
        if not isinstance(content, str) and not (content is None and turn.get("tool_calls")):
            raise Skip("content that is not text")
        message = {key: value for key, value in turn.items() if key not in ("from", "value", *REASONING)}
        message |= {"role": role, "content": content}
        if role == "assistant":
            reasoning = next((turn[key] for key in REASONING if turn.get(key)), None)
            if not isinstance(reasoning, str | None):
                raise Skip("reasoning that is not text")
            if self.thinks and not reasoning and content and CLOSE in content:  # as it came out of the target
                reasoning, _, message["content"] = content.partition(CLOSE)
                reasoning = reasoning.lstrip().removeprefix(OPEN)
            if reasoning is not None:
                message["reasoning_content"] = reasoning
        return message

    # ------------------------------------------------------------------------------------------ rendering differences

    def texts(self, messages: list[dict], tools) -> tuple[list[Text], list[str]]:
        """The documents of a conversation, and why some of its turns are not learned."""
        found, reasons = [], []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            try:
                prompt, said = self.turn(messages, i, tools)
                begin = len(prompt) + (thinking(prompt, said) if self.masks_reasoning else 0)
                if begin == len(prompt + said):
                    raise Skip("nothing but masked reasoning")
            except Skip as skip:
                reasons.append(str(skip))
                continue
            span = (begin, len(prompt + said))
            if found and prompt.startswith(found[-1].text):
                found[-1] = Text(prompt + said, [*found[-1].spans, span])
            else:
                self.notes["documents begun because the template renders history differently"] += len(found) > 0
                found.append(Text(prompt + said, [span]))
        return found, reasons

    def turn(self, messages: list[dict], i: int, tools) -> tuple[str, str]:
        """What an engine is given for assistant turn i, and what the target says to it, its end of turn included."""
        answer, reasoning = messages[i]["content"] or "", messages[i].get("reasoning_content")
        if i == 0:
            raise Skip("an assistant turn that answers nothing")
        if not (answer.strip() or reasoning or messages[i].get("tool_calls")):
            raise Skip("an empty answer")
        prompt = self.render(messages[:i], tools, add_generation_prompt=True)
        through = self.render(messages[: i + 1], tools, add_generation_prompt=False)
        said = through[len(prompt) :] if through.startswith(prompt) else None
        if reasoning is not None:
            block = (said or "").partition(CLOSE)[0] if self.thinks else said or ""
            kept = said is not None and reasoning.strip() in block
            if kept and self.masks_reasoning and not self.thinks:
                raise Skip(f"reasoning without a {OPEN} block, which cannot be masked")
            if not kept and self.thinks and not prompt.rstrip().endswith(CLOSE):
                said = with_reasoning(prompt, through, reasoning, answer)
            elif not kept and said is not None:
                self.notes["turns without their reasoning, which the template does not render"] += 1
        elif said is None and prompt.rstrip().endswith(OPEN):
            raise Skip("no reasoning, where the generation prompt opens a thinking block")
        if said is None:
            raise Skip(REWRITTEN)
        end = said.rstrip()
        return prompt, end if end.endswith(self.ends) else said  # a blank behind the end of turn is never said

    def render(self, messages: list[dict], tools, add_generation_prompt: bool) -> str:
        how = {"tools": tools, "tokenize": False, "add_generation_prompt": add_generation_prompt}
        try:
            with LIMIT.within():
                text = self.tokenizer.apply_chat_template(messages, **how)
            if len(text) > TEXT:
                raise Skip(f"the chat template makes more than {TEXT:,} characters")
            text.encode()  # JSON can hold half a surrogate pair
            return text
        except TemplateHangs:
            name = self.tokenizer.name_or_path or "the tokenizer"
            raise TemplateHangs(f"the chat template of {name} takes more than {TEMPLATE_SECONDS:g} s") from None
        except Skip:
            raise
        except UnicodeEncodeError:
            raise Skip("text that is not Unicode") from None
        except Exception as error:  # templates raise whatever they meet
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:100].encode(errors="replace").decode()
            raise Skip(f"the chat template fails ({reason})") from None

    # ------------------------------------------------------------------------------------------------ tokens and masks

    def encode(self, texts: list[tuple[int, Text]]) -> Iterator[tuple[int, tuple[np.ndarray, np.ndarray] | Skip]]:
        """Tokens of whole texts and their masks; Skip where a token spans the border of what is learned."""
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            if self.backend is None:
                yield from ((number, self.encode_slowly(text)) for number, text in batch)
                continue
            encodings = self.backend.encode_batch([text.text for _, text in batch], add_special_tokens=False)
            for (number, text), encoding in zip(batch, encodings, strict=True):
                ids = np.array(encoding.ids, np.int32)
                borders = [border for span in text.spans for border in span]
                at = [len(ids) if b == len(text.text) else encoding.char_to_token(b) for b in borders]
                exact = (
                    k is not None and (k == len(ids) or encoding.token_to_chars(k)[0] == b)
                    for k, b in zip(at, borders, strict=True)
                )
                yield number, with_mask(ids, at) if all(exact) else Skip(SPANS)

    def encode_slowly(self, text: Text) -> tuple[np.ndarray, np.ndarray] | Skip:
        """Without offsets: where no token spans a border, the tokens of the parts are those of the whole."""
        borders = [0, *(border for span in text.spans for border in span)]
        parts = [text.text[a:b] for a, b in zip(borders, borders[1:], strict=False)]
        whole, *parts = (self.tokenizer(part, add_special_tokens=False).input_ids for part in (text.text, *parts))
        if [token for part in parts for token in part] != whole:
            return Skip(SPANS)
        return with_mask(np.array(whole, np.int32), np.cumsum([len(part) for part in parts]))


def with_reasoning(prompt: str, through: str, reasoning: str, answer: str) -> str | None:
    """What the target says when it thinks, of a turn that the template renders (`through`) without its reasoning."""
    stripped = prompt.rstrip()
    opened, blank = stripped.endswith(OPEN), prompt[len(stripped) :]
    head = stripped.removesuffix(OPEN) if opened else prompt
    if not through.startswith(head):
        return None
    end = NO_REASONING.match(through, len(head)).end()
    if not through.startswith(answer.strip(), end):
        return None
    begin = reasoning.removeprefix(blank) if opened else OPEN + reasoning  # the blank may be in both
    return begin + CLOSE + answer.rstrip() + through[end + len(answer.strip()) :]


def thinking(prompt: str, said: str) -> int:
    """How many characters of `said` are its thinking block, closing tag included."""
    if not (prompt.rstrip().endswith(OPEN) or said.lstrip().startswith(OPEN)):
        return 0
    before, close, _ = said.partition(CLOSE)
    return len(before + close)


def with_mask(ids: np.ndarray, borders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    mask = np.zeros(len(ids), bool)
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        mask[begin:end] = True
    return ids, mask


def parse(line: bytes | str):
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        raise Skip("invalid JSON") from None


def load_list(blob: bytes) -> list:
    try:
        value = json.loads(blob)
        return value if isinstance(value, list) else [value]
    except (ValueError, RecursionError):
        return [blob]  # one line, which is invalid


def gather(made: list[tuple], lost: list[tuple[int, str]], read: list[int], lines: int, notes: Counter) -> Made:
    """One piece's documents in the order of its lines; a line without any is skipped for its first reason."""
    made.sort(key=lambda document: document[0])
    records, tokens, masks = ([document[i] for document in made] for i in range(3))
    with_documents, first = set(records), {}
    for record, reason in lost:
        if record in with_documents:
            notes[f"turns left out: {reason}"] += 1
        first.setdefault(record, reason)
    skipped = {}
    for record in read:
        if record not in with_documents:
            count, some = skipped.get(first[record], (0, []))
            skipped[first[record]] = count + 1, [*some, record][: Skipped.few]
    return Made(
        np.concatenate([np.empty(0, np.int32), *tokens]),
        np.concatenate([np.empty(0, bool), *masks]),
        np.array([len(x) for x in tokens], np.int64),
        np.array(records, np.int64),
        lines,
        len(read),
        skipped,
        dict(+notes),
    )
