"""What an engine is given for a turn of a chat, and what the target says to it, by differences of renderings."""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from data.grammar import CLOSE, MARK, OPEN, Grammar, common
from data.records import CUT, Chat, check_calls, marked
from data.rendering import Skip

REWRITTEN = "the template renders the prompt differently once it is answered"
UNOPENED = "reasoning that neither the prompt nor the template opens"
CLOSED_WITHIN = "reasoning that holds its own closing tag"
NO_ANSWER = "the template does not render the answer"
DROPPED = "turns without their reasoning, which the template does not render"


class Turn(NamedTuple):
    """What an engine is given, and what the target says to it, its end of turn included: `said` and `stop`."""

    prompt: str
    through: str  # the answered turn rendered, which ends as `said` does, blanks and `behind` aside
    said: str
    stop: str
    behind: str = ""  # what the template writes behind a turn that was cut, though the target never said it


class Turns:
    """The assistant turns of one conversation, as its template renders them with these arguments.

    rendering: makes text of messages, tools, arguments, whether to add the generation prompt. ends: the tokens that are
    whole texts, one of which may end a turn. notes: counts what befell some turns.
    """

    def __init__(
        self, rendering: Callable, arguments: dict, chat: Chat, grammar: Grammar, ends: tuple[str, ...], notes: Counter
    ):
        self.rendering, self.arguments, self.chat, self.grammar = rendering, arguments, chat, grammar
        self.ends, self.notes = ends, notes

    def render(self, messages: list[dict], add_generation_prompt: bool = False) -> str:
        return self.rendering(messages, self.chat.tools, self.arguments, add_generation_prompt)

    def turn(self, i: int) -> Turn:
        """Assistant turn i. Skip: it cannot be had."""
        message, before = self.chat.messages[i], self.chat.messages[:i]
        calls = message.get("tool_calls")
        if i == 0:
            raise Skip("an assistant turn that answers nothing")
        if not (message["content"].strip() or message.get("reasoning_content") or calls):
            raise Skip("an empty answer")
        if self.grammar.close and self.grammar.close in message.get("reasoning_content", ""):
            raise Skip(CLOSED_WITHIN)
        prompt = self.render(before, add_generation_prompt=True)
        through = self.render([*before, message])
        tail = ""
        if self.grammar.close is not None:
            tail = self.grammar.tail(prompt[len(common(prompt, self.render(before))) :])
        upto = prompt.removesuffix(tail)
        begin = len(upto) if through.startswith(upto) else self.located(i, through, tail)
        said = self.said(through[begin:], tail, message)
        if message["content"].strip() not in said:
            raise Skip(NO_ANSWER)
        if calls:
            check_calls(self.render([*before, marked(message)]), calls)
        if message.get("finish_reason") == CUT:
            return Turn(prompt, through, *self.unended(said, through, i))
        end = said.rstrip()
        said = end if end.endswith(self.ends) else said  # a blank behind the end of turn is never said
        return Turn(prompt, through, said, self.grammar.stops[bool(calls)])

    def located(self, i: int, through: str, tail: str) -> int:
        """Where answer i begins in a rendering that rewrites the history before it: what the prompt has behind the text
        of its last message, the role included, stands there between that text and the answer's own."""
        message, before = self.chat.messages[i], self.chat.messages[:i]
        own = len(common(through, self.render([*before, marked(message)])))
        asked = [*before[:-1], before[-1] | {"content": before[-1]["content"] + MARK}]
        role = self.render(asked, add_generation_prompt=True).rpartition(MARK)[2].removesuffix(tail)
        _, *between = self.render([*asked, marked(message)]).split(MARK)
        for text in (role, role.rstrip()):
            if len(between) > 1 and between[0].startswith(text):
                return own - len(between[0]) + len(text)
        raise Skip(REWRITTEN)

    def said(self, body: str, tail: str, message: dict) -> str:
        """What the target says. body: the rendered turn behind its role. tail: what of that the prompt already has, a
        thinking block opened or closed."""
        grammar, reasoning = self.grammar, message.get("reasoning_content")
        if grammar.close is None:
            self.notes[DROPPED] += reasoning is not None and reasoning.strip() not in body
            return body
        state = grammar.state(tail)
        block, rest = self.parted(body, state, reasoning)
        inner = None if block is None else block.lstrip().removeprefix(grammar.open)
        blank = tail[len(tail.rstrip()) :]
        if state == "closed":
            self.notes[DROPPED] += bool(reasoning)
            brought = tail.rpartition(grammar.close)[2]
            return body.removeprefix(tail) if body.startswith(tail) else rest.removeprefix(brought)
        if reasoning is None:
            if state == "open" and not body.startswith(tail):
                raise Skip("no reasoning, where the generation prompt opens a thinking block")
            return body.removeprefix(tail)
        if inner is not None and reasoning.strip() in inner:
            return inner.removeprefix(blank) + grammar.close + rest if state == "open" else body
        if state == "" and grammar.header == "open":
            raise Skip(UNOPENED)
        if state == "" and grammar.header == "closed":
            self.notes[DROPPED] += bool(reasoning)
            return body
        answer = message["content"]
        if answer[:1].isspace() and rest.lstrip().startswith(answer.strip()):  # as it was said, blanks included
            rest = answer.rstrip() + rest.lstrip()[len(answer.strip()) :]
        if state == "open":
            return reasoning.removeprefix(blank) + grammar.close + rest  # the blank may be in both
        indent = "" if block is None else block[: len(block) - len(block.lstrip())]
        return indent + grammar.open + reasoning + grammar.close + rest

    def unended(self, said: str, through: str, i: int) -> tuple[str, str, str]:
        """`said`, `stop` and `behind` of a turn that was cut."""
        message, before = self.chat.messages[i], self.chat.messages[:i]
        if message.get("tool_calls"):
            raise Skip("a turn that was cut at its tool calls")
        names = ("content",) if message["content"].strip() else ("reasoning_content", "reasoning")
        cut = self.render([*before, message | {name: message[name] + MARK for name in names}])
        behind = cut.rpartition(MARK)[2] if MARK in cut else through
        if names == ("content",) and said.endswith(behind):
            return said.removesuffix(behind), "", behind
        if len(names) > 1 and self.grammar.close is not None:
            thought, found, _ = said.partition(self.grammar.close)
            thought, also, _ = thought.rpartition(reasoning := message["reasoning_content"].strip())
            if found and also:
                return thought + reasoning, "", behind
        raise Skip("a turn that was cut, whose end the template does not show")

    def parted(self, body: str, state: str, reasoning: str | None) -> tuple[str | None, str]:
        """A rendered turn's thinking block without its closing tag, and the rest; None: there is no block."""
        block, found, rest = body.partition(self.grammar.close)
        inner = block.strip()
        if not found or not (inner in ("", (reasoning or "").strip()) or inner.startswith(self.grammar.open)):
            return None, body
        return block, rest

    def thinking(self, i: int, prompt: str, said: str) -> int:
        """How many characters of `said` are its thinking block, closing tag included. Skip: it cannot be told."""
        reasoning = self.chat.messages[i].get("reasoning_content")
        opening, close = self.grammar.open, self.grammar.close
        if close is None and reasoning and reasoning.strip() in said:
            raise Skip(f"reasoning without a {OPEN} block, which cannot be masked")
        opening, close = opening or OPEN, close or CLOSE  # inline, it is text to such a template
        if not (prompt.rstrip().endswith(opening) or said.lstrip().startswith(opening)):
            return 0
        before, found, _ = said.partition(close)
        return len(before + found)
