"""Records of chat files in all their forms to messages as templates read them.

Knows nothing but JSON.
"""

import json
from typing import NamedTuple

from data.grammar import CLOSE, MARK, OPEN, Grammar
from data.rendering import RESERVED, Skip

THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # names of reasoning; templates read two
ROLES = {"human": "user", "gpt": "assistant", "model": "assistant", "function": "tool", "observation": "tool"}
ROLES |= {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system"}
CALLS = "function_call"  # ShareGPT's role of an assistant turn that calls tools
NO_ID = f"{MARK}id{MARK}"
CUT = "length"  # the `finish_reason` of a message that the target did not end
NO_CALLS = "the template renders no tool calls"
UNANSWERED = "conversations cut behind their last answer"


class Chat(NamedTuple):
    messages: list[dict]
    learned: list[bool]  # of each message, whether it may be
    tools: list[dict] | None


def arguments_of(record, given: dict) -> dict:
    """What a record's template is given besides messages and tools."""
    own = (record.get("chat_template_kwargs") if isinstance(record, dict) else None) or {}
    if not isinstance(own, dict) or set(own) & RESERVED:
        raise Skip("chat_template_kwargs that are no arguments of a template")
    return given | own


def read_chat(record, grammar: Grammar) -> tuple[Chat, list[str]]:
    """The conversation of a record up to its last answer, and what is to be noted about it."""
    messages, learned, tools = read_whole(record, grammar)
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise Skip("no assistant turn")
    end = len(roles) - roles[::-1].index("assistant")
    if not any(x for x, role in zip(learned, roles, strict=True) if role == "assistant"):
        raise Skip("every assistant turn has weight 0")
    return Chat(messages[:end], learned[:end], tools), [UNANSWERED] * (end < len(roles))


def read_whole(record, grammar: Grammar) -> Chat:
    turns, asked = turns_of(record)
    messages = [read_message(turn, grammar) for turn in turns]
    learned = [n >= asked and read_weight(turn) for n, turn in enumerate(turns)]
    system = record.get("system") or None
    if not isinstance(system, str | None):
        raise Skip("a system prompt that is not text")
    if system is not None and messages and messages[0]["role"] != "system":
        messages, learned = [{"role": "system", "content": system}, *messages], [False, *learned]
    if not any(m["content"] or m.get("tool_calls") or m.get("reasoning_content") for m in messages):
        raise Skip("empty")
    if {message["role"] for message in messages} == {"system"}:
        raise Skip("a system prompt alone")
    return Chat(messages, learned, read_tools(record))


def turns_of(record) -> tuple[list, int]:
    """The turns of a record, and how many of them are its prompt: nothing of that is learned."""
    if not isinstance(record, dict):
        record = {}
    for form in ("messages", "conversations"):
        if isinstance(record.get(form), list):
            return record[form], 0
    if {"prompt", "completion"} <= record.keys():
        parts = [record["prompt"], record["completion"]]
        for i, role in enumerate(("user", "assistant")):
            if isinstance(parts[i], str):
                parts[i] = [{"role": role, "content": parts[i]}]
        if all(isinstance(part, list) for part in parts):
            return parts[0] + parts[1], len(parts[0])
    raise Skip("neither messages nor conversations nor prompt and completion nor input_ids and loss_mask")


def read_weight(turn: dict) -> bool:
    weight = turn.get("weight")
    if weight is not None and weight not in (0, 1):
        raise Skip("a weight that is neither 0 nor 1")
    return weight is None or bool(weight)


def read_tools(record: dict) -> list[dict] | None:
    tools = record.get("tools") or None
    if isinstance(tools, str):
        tools = parse(tools) or None
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise Skip("tools that are no list of objects")
    return tools


def read_message(turn, grammar: Grammar) -> dict:
    if not isinstance(turn, dict):
        raise Skip("a turn that is no object")
    name, content = str(turn.get("role", turn.get("from"))).lower(), turn.get("content", turn.get("value"))
    role = "assistant" if name == CALLS else ROLES.get(name)
    if role is None:
        raise Skip("an unknown role")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is None and role in ("assistant", "tool"):
        content = ""  # as engines render it
    if not isinstance(content, str):
        raise Skip("content that is not text")
    dropped = ("from", "value", "weight", "tool_calls", *THOUGHTS)
    message = {key: value for key, value in turn.items() if key not in dropped}
    message |= {"role": role, "content": content}
    if role != "assistant":
        return message
    reasoning = next((turn[key] for key in THOUGHTS if turn.get(key)), None)
    if not isinstance(reasoning, str | None):
        raise Skip("reasoning that is not text")
    if reasoning is None:
        reasoning, message["content"] = inline_reasoning(content, grammar, turn.get("finish_reason") == CUT)
    if reasoning is not None:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}  # under both names, as engines give it
    calls = turn.get("tool_calls")
    if name == CALLS:
        calls, message["content"] = parse(message["content"]), ""
    if calls:
        message["tool_calls"] = read_calls(calls, grammar)
    return message


def inline_reasoning(content: str, grammar: Grammar, is_cut: bool = False) -> tuple[str | None, str]:
    """What of an answer is its reasoning, and the rest. is_cut: a block that begins may never close."""
    if grammar.close is None:
        return None, content
    if grammar.close in content or is_cut and content.lstrip().startswith(grammar.open):  # as it came out of the target
        reasoning, _, answer = content.partition(grammar.close)
        answer = answer.removeprefix(grammar.lead) if grammar.lead.strip() else answer
        return reasoning.lstrip().removeprefix(grammar.open), answer
    if content.lstrip().startswith(OPEN) and CLOSE in content:  # as it came out of another one
        reasoning, _, answer = content.partition(CLOSE)
        return reasoning.lstrip().removeprefix(OPEN), answer
    return None, content


def read_calls(calls, grammar: Grammar) -> list[dict]:
    """Calls of tools with their arguments in the form that the template wants."""
    made = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise Skip("tool calls that are no functions with a name")
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str) and (grammar.takes_objects or not arguments.strip()):
            arguments = parse(arguments) if arguments.strip() else {}
        if isinstance(arguments, dict) and not grammar.takes_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        if not isinstance(arguments, dict if grammar.takes_objects else str):
            raise Skip("tool calls whose arguments are no JSON object")
        whole = call if "function" in call else {"type": "function"}
        made.append(whole | {"function": function | {"arguments": arguments}})
    return made


def marked(message: dict) -> dict:
    """The same turn with a mark before all that it says, so that a rendering shows where that begins."""
    out = dict(message)
    for name in ("content", "reasoning_content", "reasoning"):
        if out.get(name):
            out[name] = MARK + out[name]
    if calls := out.get("tool_calls"):
        out["tool_calls"] = [mark_call(n, call) for n, call in enumerate(calls)]
    return out


def mark_call(n: int, call: dict) -> dict:
    function, mark = call["function"], f"{MARK}{n}{MARK}"
    arguments = function["arguments"]
    arguments = mark + arguments if isinstance(arguments, str) else {mark: "", **arguments}
    return {"id": NO_ID, **call, "function": function | {"name": mark + function["name"], "arguments": arguments}}


def check_calls(text: str, calls: list[dict]) -> None:
    """Skip: a rendering of the marked turn lacks one of its calls, or has ids that the turn does not say."""
    if not all(f"{MARK}{n}{MARK}" in text for n in range(len(calls))):
        raise Skip(NO_CALLS)
    if NO_ID in text:
        raise Skip("tool calls without the id that the template renders")


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
