"""Conversations to documents with a loss mask, in the target's own chat template.

An assistant turn is rendered twice: with everything before it and the generation prompt, which is what an engine is
given, and once more with the turn itself. What the second has behind the generation prompt is what the target says: it
is learned, up to and with its end of turn; nothing before is. So no template needs `{% generation %}`, and whatever a
generation prompt brings (an empty thinking block) is never learned.

    history             <|User|>Hi
    prompt of turn 1    <|User|>Hi<|Assistant|></think>         the generation prompt: a role, and a thinking block
    with turn 1         <|User|>Hi<|Assistant|></think>Hello.<end>
    learned                                            ^^^^^^^^^^^

A template may render the history of an answered turn differently from what that turn's prompt was (reasoning is
dropped once an answer exists): then the generation prompt, which stands between the text of the last message and the
answer's own, tells where the answer begins; and what is learned stands behind the prompt as the engine gives it.

Turns share a document while the prompt of the next one begins with all that came so far. Where it does not, a new
document begins with that prompt, and only its last turn is learned: every turn is learned once, behind the very text
that an engine would give.

Thinking templates often drop the reasoning even of the last turn, although the target says it, or write a block in
another form than the prompt does. Such a turn is put together again by the template's own grammar: the opening tag
unless the prompt brings it, reasoning, the closing tag, and the rendered rest.

An engine may render instead (`data/engine.py`): turns are found in the same way, in the text of its tokens, and the
documents are made of those.

Knows tokenizers and files, never models.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch

from data.documents import Document, Skipped, listed
from data.engine import Engine
from data.grammar import Grammar, stop_ids, tell_grammar
from data.records import Chat, arguments_of, load_list, parse, read_chat
from data.rendering import SPANS, Skip, TemplateHangs, bare_backend, check_template, render
from data.server import AT_ONCE
from data.turns import Turns

BATCH = 32  # texts tokenised together: their offsets take a hundred bytes a token


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


class Text(NamedTuple):
    """A document, rendered here before it is tokens: what is learned are the characters (of an engine's the tokens)
    [begin, end) of every span, ascending."""

    text: str | list[int]
    spans: list[tuple[int, int]]


class Converter:
    """Lines to documents, with one tokenizer and what its template, or an engine, is given. Nothing that a line holds
    raises."""

    def __init__(self, tokenizer, reasoning: str, template_args: dict | None = None, engine: Engine | None = None):
        self.tokenizer, self.masks_reasoning, self.engine = tokenizer, reasoning == "mask", engine
        self.template_args, self.grammars, self.lock = template_args or {}, {}, Lock()
        self.render = partial(render, tokenizer) if engine is None else engine.render
        added, stops = tokenizer.added_tokens_decoder, stop_ids(tokenizer)
        self.ends = tuple(str(token) for token in added.values())
        self.waited_for = [str(token) for i, token in added.items() if stops is None or i in stops]
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.backend = bare_backend(tokenizer)

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
        read = [n for n, line in enumerate(lines) if not isinstance(line, bytes) or line.strip()]
        notes, lost, texts, made = Counter(), [], [], []
        for number, (found, reasons, own) in zip(read, self.read_all([lines[n] for n in read]), strict=True):
            (texts if found and isinstance(found[0], Text) else made).extend((number, x) for x in found)
            lost += [(number, reason) for reason in reasons]
            notes.update(own)
        for number, document in self.encode(texts):
            if isinstance(document, Skip):
                lost.append((number, str(document)))
            else:
                made.append((number, document))
        return gather(made, lost, read, len(lines), notes)

    def read_all(self, lines: list) -> list[tuple[list, list[str], Counter]]:
        if self.engine is None:
            return [self.read(line) for line in lines]
        with ThreadPoolExecutor(AT_ONCE) as pool:  # which wait for the engine
            return list(pool.map(self.read, lines))

    def read(self, line) -> tuple[list[Text] | list[tuple[np.ndarray, np.ndarray]], list[str], Counter]:
        """The documents of a record, as texts or as tokens with their masks; why it, or some of its turns, are not
        learned; and notes."""
        notes = Counter()
        try:
            record = parse(line) if isinstance(line, bytes) else line
            if isinstance(record, dict) and {"input_ids", "loss_mask"} <= record.keys():
                return [self.tokenised(record)], [], notes
            found, reasons = self.texts(*self.conversation(record, notes))
        except Skip as skip:
            return [], [str(skip)], notes
        if self.engine is not None:
            found = [with_mask(np.array(ids, np.int32), [x for span in spans for x in span]) for ids, spans in found]
        return found, reasons, notes

    def tokenised(self, record: dict) -> tuple[np.ndarray, np.ndarray]:
        try:
            ids, mask = listed(record["input_ids"], record["loss_mask"], self.vocab_size)
        except ValueError as error:
            raise Skip(str(error)) from None
        if not mask[1:].any():
            raise Skip("nothing supervised")
        return ids.astype(np.int32), mask

    def conversation(self, record, notes: Counter) -> tuple[Chat, Turns]:
        """A conversation, and what renders it."""
        if self.engine is None:
            check_template(self.tokenizer)
        arguments = arguments_of(record, self.template_args)
        key = json.dumps(arguments, sort_keys=True)
        with self.lock:
            if key not in self.grammars:
                self.grammars[key] = self.grammar(arguments)
        chat, own = read_chat(record, self.grammars[key])
        notes.update(own)
        return chat, Turns(self.render, arguments, chat, self.grammars[key], self.ends, notes)

    def grammar(self, arguments: dict) -> Grammar:
        def rendered(messages, add_generation_prompt=False):
            return self.render(messages, None, arguments, add_generation_prompt)

        if self.engine is not None:
            self.engine.identity(arguments)  # refuses another target's
        source = None if self.engine else str(self.tokenizer.chat_template)
        grammar = tell_grammar(rendered, source, list(self.ends), self.waited_for)
        return grammar._replace(takes_objects=True) if self.engine else grammar  # an engine parses them itself

    def texts(self, chat: Chat, turns: Turns) -> tuple[list[Text], list[str]]:
        """The documents of a conversation, and why some of its turns are not learned."""
        found, reasons = [], []
        for i, message in enumerate(chat.messages):
            if message["role"] != "assistant":
                continue
            try:
                if not chat.learned[i]:
                    raise Skip("weight 0")
                turn = turns.turn(i)
                prompt, said = turn.prompt, turn.said + turn.stop
                thinking = turns.thinking(i, prompt, said) if self.masks_reasoning else 0
                if thinking == len(said):
                    raise Skip("nothing but masked reasoning")
                if self.engine is not None:
                    prompt, said, thinking = self.engine.tokens(*turn, thinking, turns.grammar)
            except Skip as skip:
                reasons.append(str(skip))
                continue
            span = (len(prompt) + thinking, len(prompt + said))
            if found and prompt[: len(found[-1].text)] == found[-1].text:
                found[-1] = Text(prompt + said, [*found[-1].spans, span])
            else:
                turns.notes["documents begun because the template renders history differently"] += len(found) > 0
                found.append(Text(prompt + said, [span]))
        return found, reasons

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


def with_mask(ids: np.ndarray, borders: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    mask = np.zeros(len(ids), bool)
    for begin, end in zip(borders[::2], borders[1::2], strict=True):
        mask[begin:end] = True
    return ids, mask


def gather(
    made: list[tuple[int, tuple]], lost: list[tuple[int, str]], read: list[int], lines: int, notes: Counter
) -> Made:
    """One piece's documents in the order of its lines; a line without any is skipped for its first reason."""
    made.sort(key=lambda document: document[0])
    records, tokens, masks = [n for n, _ in made], [ids for _, (ids, _) in made], [mask for _, (_, mask) in made]
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
