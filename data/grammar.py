"""How a target's chat template writes reasoning, tool calls and the ends of turns, told by rendering probes.

    probe       <|User|>Q<|Assistant|><think>REASONING</think>ANSWER<end>      (or <o>think<s>REASONING<c>think<s>..)
    open, close                       ^^^^^^^         ^^^^^^^^

The closing tag ends as the opening one does (`think>`), whatever marks it as closing; so no list of tags is needed.
"""

import json
import os.path
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from data.rendering import Skip

OPEN, CLOSE = "<think>", "</think>"  # what data have inline, and what templates write that render no reasoning at all
REASONING, ANSWER, ASK = "zqreasonqz", "zqanswerqz", {"role": "user", "content": "zqaskqz"}
MARK = "\ue000"  # a private character, which marks what is looked for in a rendered text


class Grammar(NamedTuple):
    open: str | None  # None: the template knows no reasoning
    close: str | None
    lead: str  # between the closing tag and the answer
    header: str  # what the generation prompt does with a thinking block behind a user's turn: "open", "closed" or ""
    takes_objects: bool  # are arguments of tool calls wanted as an object, not as JSON text?
    stops: tuple[str, str]  # what ends an answer, and calls of tools, where turns end without any token of their own

    def tail(self, header: str) -> str:
        """What a generation prompt writes of a thinking block."""
        at = -1 if self.open is None else header.rfind(self.open)
        if at < 0 and self.close is not None:
            at = header.rfind(self.close)
        return "" if at < 0 else header[at:]

    def state(self, tail: str) -> str:
        """Of a thinking block, behind what a generation prompt writes of it."""
        return "" if not tail else "closed" if self.close in tail else "open"


def tell_grammar(render: Callable[..., str], source: str | None, added: list[str], waited_for: list[str]) -> Grammar:
    """render: messages, then whether to add the generation prompt. source: of the template; None: it is not known.
    added: the tokens that are whole texts (special and others). waited_for: those of them at which an engine stops."""
    prompt, history = quietly(render, [ASK], True), quietly(render, [ASK])
    header = prompt[len(common(prompt, history)) :] or prompt.partition(ASK["content"])[2]
    objects, tags = takes_objects(render), None
    nothing = {} if objects else "{}"
    for extra in ({}, {"tool_calls": [call(nothing)]}):
        said = {"role": "assistant", "content": ANSWER, "reasoning_content": REASONING, "reasoning": REASONING, **extra}
        tags = tags or tags_of(quietly(render, [ASK, said]), prompt, added)
    if tags is None and (writes_tags(render) if source is None else CLOSE in source):
        tags = (OPEN, CLOSE, "")
    stops = ("", "") if ends_turns(render, added) else tuple(stop(render, waited_for, x) for x in (None, nothing))
    without = Grammar(*(tags or (None, None, "")), "", objects, stops)
    return without._replace(header=without.state(without.tail(header)))


def quietly(render: Callable[..., str], *messages_and_prompt) -> str:
    """Nothing where a template refuses a probe."""
    try:
        return render(*messages_and_prompt)
    except Skip:
        return ""


def common(a: str, b: str) -> str:
    """The longest text that both begin with."""
    return os.path.commonprefix([a, b])


def call(arguments) -> dict:
    return {"id": "zq0", "type": "function", "function": {"name": "zqcallqz", "arguments": arguments}}


def tags_of(text: str, prompt: str, added: list[str]) -> tuple[str, str, str] | None:
    """The opening tag, the closing one, and what stands between that and an answer; None: no reasoning in tags."""
    before, found, after = text.partition(REASONING)
    between, also, _ = after.partition(ANSWER)
    if not (found and also):
        return None
    for opening in (before.rstrip(), prompt.rstrip()):  # some templates write the opening tag in prompts alone
        fitting = (n for n in range(len(opening), 0, -1) if opening[-n:] in between)
        tail = opening[len(opening) - next(fitting, 0) :]
        if re.search(r"\w{2}", tail):
            break
    else:
        return None
    end = between.index(tail) + len(tail)
    return opening[tag_begin(opening, len(opening) - len(tail), added) :], between[:end].lstrip(), between[end:]


def tag_begin(opening: str, at: int, added: list[str]) -> int:
    """Where the tag begins whose end is known from `at` on: with the token that reaches there, or a bracket."""
    for token in sorted(added, key=len, reverse=True):
        begin = opening.rfind(token, 0, at + len(token))
        if begin >= 0 and begin < at <= begin + len(token):
            return begin
    return max(opening.rfind("<", 0, at), opening.rfind("[", 0, at), 0)


def writes_tags(render: Callable[..., str]) -> bool:
    """Does it write the usual tags, or take them and what they hold out of an answer?"""
    inline = {"role": "assistant", "content": OPEN + REASONING + CLOSE + ANSWER}
    own = quietly(render, [ASK], True) + quietly(render, [ASK, {"role": "assistant", "content": ANSWER}])
    return OPEN in own or CLOSE in own or REASONING not in quietly(render, [ASK, inline])


def takes_objects(render: Callable[..., str]) -> bool:
    """False where an object makes the template fail, or write it as Python does."""
    said = {"role": "assistant", "content": "", "tool_calls": [call({"zq": "zq"})]}
    text = quietly(render, [ASK, said])
    if text:
        return str({"zq": "zq"}) not in text
    said["tool_calls"] = [call('{"zq": "zq"}')]
    return not quietly(render, [ASK, said])


def ends_turns(render: Callable[..., str], added: list[str]) -> bool:
    """Does an answer end in a token of its own?"""
    _, found, end = quietly(render, [ASK, {"role": "assistant", "content": ANSWER}]).partition(ANSWER)
    return not found or any(token in end for token in added)


def stop(render: Callable[..., str], waited_for: list[str], arguments) -> str:
    """The token that begins the next turn, where an engine waits for it, behind an answer or, with their arguments,
    calls of tools; "": there is none."""
    said, after = {"role": "assistant", "content": ANSWER}, ASK
    if arguments is not None:
        said = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
        after = {"role": "tool", "content": "zq", "tool_call_id": "zq0", "name": "zqcallqz"}
    alone, followed = quietly(render, [ASK, said]), quietly(render, [ASK, said, after])
    if not alone or not followed.startswith(alone):
        return ""
    tokens = "|".join(map(re.escape, sorted(waited_for, key=len, reverse=True)))
    found = re.match(rf"\s*(?:{tokens})", followed[len(alone) :])
    return found[0] if waited_for and found else ""


def stop_ids(tokenizer) -> list[int] | None:
    """The tokens at which an engine stops, by the files beside the tokenizer's; None: they do not say."""
    for name in ("generation_config.json", "config.json") if tokenizer.name_or_path else ():
        try:
            ids = json.loads((Path(tokenizer.name_or_path) / name).read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError, RecursionError):  # no such file, or not what it should be
            continue
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return None


# Of chats that a server renders: reasoning stays where it is, arguments of calls are JSON text
AS_SERVED = Grammar(None, None, "", "", False, ("", ""))
