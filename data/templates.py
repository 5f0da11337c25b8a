"""Conversations to documents with a loss mask, in the target's own chat template.

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

import copy
import ctypes
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import processors

from data.documents import Document, Skipped, listed

TEXT = 1 << 26  # characters of the longest rendered conversation
TEMPLATE_SECONDS = 20  # of one call of a chat template, which takes milliseconds
BATCH = 32  # texts tokenised together: their offsets take a hundred bytes a token
OPEN, CLOSE = "<think>", "</think>"
NO_REASONING = re.compile(rf"\s*(?:{OPEN})?\s*(?:{CLOSE})?\s*")  # what a template leaves of a block it drops
REASONING = ("reasoning_content", "reasoning", "thinking")  # its names, of which templates read the first
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
SPANS = "a token spans the border of what is learned"
REWRITTEN = "the template renders the prompt differently once it is answered"


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
