"""Conversations as a running engine renders them: its own token ids, for targets whose rendering is code.

Turns are found in the text of the ids, by the differences that find them in what a template writes. What is learned are
ids of the engine: text that looks like a special token is what the engine made of it. Only what it renders nowhere, as
the reasoning of some, is encoded here, and never by itself where a token could span the border.

Knows tokenizers and servers, never models.
"""

import json
import re
from bisect import bisect_right
from itertools import groupby

from data.grammar import ASK, Grammar, common
from data.rendering import SPANS, Skip, bare_backend
from data.server import Refused, address, answering, ask_again, served_model

UNRENDERED = "reasoning with the text of special tokens, which the engine does not render"


class Rendered(str):
    """The text of token ids. parts: at which character and token every special token, and all text between, begins."""

    ids: list[int]
    parts: list[tuple[int, int]]


class Engine:
    """A vLLM at `url` that serves the target whose tokenizer this is. Threads may share it."""

    def __init__(self, url: str, tokenizer):
        self.url, self.tokenizer, self.model = address(url), tokenizer, None
        self.added = {i: str(token) for i, token in tokenizer.added_tokens_decoder.items()}
        self.special = re.compile(
            "|".join(map(re.escape, sorted(self.added.values(), key=len, reverse=True))) or "(?!)"
        )
        self.vocab_size = 1 + max(tokenizer.get_vocab().values())
        self.backend = bare_backend(tokenizer)

    def identity(self, arguments: dict) -> dict:
        """What is served: the model's name and how it renders a probe. ValueError: this is not its tokenizer."""
        try:
            text = self.render([ASK], None, arguments, True)
        except Skip as skip:
            return {"model": self.model, "refuses": str(skip)}
        if ASK["content"] not in text:
            self.mistaken(f"{ASK['content']!r} as {str(text)[:60]!r}")
        return {"model": self.model, "renders": text.ids}

    def render(
        self, messages: list[dict], tools: list[dict] | None, arguments: dict, add_generation_prompt: bool = False
    ) -> Rendered:
        """Skip: the engine refuses the conversation. ValueError: it does not answer, or serves another target."""
        self.model = self.model or served_model(self.url)
        body = {"model": self.model, "messages": [as_requested(message) for message in messages]}
        body |= {"add_generation_prompt": add_generation_prompt, "tools": tools, "chat_template_kwargs": arguments}
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):  # JSON can hold half a surrogate pair
            raise Skip("text that is not Unicode") from None
        try:
            answer = ask_again(place := f"{self.url}/tokenize", body)
        except Refused as refusal:
            raise Skip(f"the engine refuses it ({refusal})") from None
        with answering(place):
            ids = answer["tokens"]
            if not (isinstance(ids, list) and all(type(i) is int for i in ids)):
                raise TypeError("tokens are no list of whole numbers")
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            self.mistaken(f"a conversation to tokens {min(ids)}..{max(ids)} of {self.vocab_size}")
        return self.decoded(ids)

    def mistaken(self, what: str):
        name = self.tokenizer.name_or_path or "the tokenizer"
        raise ValueError(f"{self.url} renders {what} by {name}; a server of the target of --model is wanted")

    def decoded(self, ids: list[int]) -> Rendered:
        texts, parts, char, begin = [], [], 0, 0
        for added, run in groupby(ids, self.added.get):
            for some in [[i] for i in run] if added is not None else [list(run)]:
                parts.append((char, begin))
                texts.append(self.text(some) if added is None else added)
                char, begin = char + len(texts[-1]), begin + len(some)
        text = Rendered("".join(texts))
        text.ids, text.parts = ids, [*parts, (char, begin)]
        return text

    def text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def encoded(self, text: str) -> list[int]:
        if self.backend is not None:  # the tokenizer itself is not for several threads
            return self.backend.encode(text, add_special_tokens=False).ids
        return self.tokenizer(text, add_special_tokens=False).input_ids

    # --------------------------------------------------------------------------------------------------- what is said

    def tokens(
        self, prompt: Rendered, through: Rendered, said: str, stop: str, behind: str, thinking: int, grammar: Grammar
    ) -> tuple[list[int], list[int], int]:
        """Token ids of a turn's prompt and of what is said to it, and how many of the latter are `thinking` characters.

        through: the answered turn, which ends as `said` does, blanks and what is `behind` a cut aside. stop: what ends
        the turn besides. Skip: a token spans a border.
        """
        whole = through.removesuffix(behind)
        end = len(whole) if said != said.rstrip() else len(whole.rstrip())
        begin = end - len(said) if through[:end].endswith(said) else end - len(common(said[::-1], through[:end][::-1]))
        if begin > end - len(said):
            begin = self.after(through, begin, said[: len(said) - (end - begin)], end)
        unrendered = said[: len(said) - (end - begin)]
        if self.special.search(unrendered.replace(grammar.open or "", "", 1).replace(grammar.close or "", "", 1)):
            raise Skip(UNRENDERED)
        if stop[:1].isspace() and through.ids[self.cut(through, end) - 1] not in self.added:
            raise Skip(SPANS)  # or may
        ids = self.encoded(unrendered) + through.ids[self.cut(through, begin) : self.cut(through, end)]
        ids += self.encoded(stop)
        return prompt.ids, ids, self.cut(self.decoded(ids), thinking)

    def after(self, through: Rendered, begin: int, before: str, end: int) -> int:
        """From where on an answer that begins `before`, in text that the engine does not render, has its ids: from
        `begin`, or else the first special token, which no other token reaches into."""
        if self.encoded(before)[-1] in self.added:
            return begin
        special = (char for char, token in through.parts[:-1] if through.ids[token] in self.added)
        return next((char for char in special if begin <= char < end), end)

    def cut(self, text: Rendered, at: int) -> int:
        """How many tokens the first `at` characters are. Skip: a token spans that border."""
        part = bisect_right(text.parts, (at, len(text.ids))) - 1
        char, token = text.parts[part]
        if char == at:
            return token
        run = text.ids[token : text.parts[part + 1][1]]
        if run[0] in self.added:
            raise Skip(SPANS)
        sizes = range(len(run) + 1)
        n = bisect_right(sizes, at - char, key=lambda n: len(self.text(run[:n]))) - 1
        if self.text(run[:n]) != text[char:at]:
            raise Skip(SPANS)
        return token + n


def as_requested(message: dict) -> dict:
    """A message as requests have it: arguments of calls are JSON text, which engines parse, and no call lacks an id."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"]["arguments"]
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        calls.append(
            {"id": "call", "type": "function", **call, "function": call["function"] | {"arguments": arguments}}
        )
    return message | {"tool_calls": calls}
