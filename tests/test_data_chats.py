"""Claims about chats as agents and thinking models hold them: exactly what the target says is learned, behind exactly
what an engine gives it.

The templates are our own, in the documented grammar of each family; the wanted texts are put together by hand from what
a prompt, an answer and a turn of history look like there, with [square brackets] around what is learned.
"""

import json
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from data.conversations import read_conversations
from data.records import NO_CALLS, UNANSWERED
from data.rendering import read_arguments
from data.templates import Converter
from data.turns import DROPPED, NO_ANSWER, REWRITTEN, UNOPENED
from tests.helpers import BOS, EOS, GOOD, TEMPLATES, chat_tokenizer, turns, write_lines
from training.sources import with_template

MORE = [
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<tool_call>",
    "</tool_call>",
    "[gMASK]",
    "<|calls|>",
    "<|arg|>",
]
MORE += ["<|calls_end|>", "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]


def tokenizer_of(template):
    tokenizer = chat_tokenizer(template)
    tokenizer.add_tokens(MORE, special_tokens=True)
    return tokenizer


def marked(tokenizer, made) -> list[str]:
    """Tokens of documents, parted by spaces, with [those that are learned]."""
    cuts, texts = made.lengths.cumsum()[:-1], []
    for ids, mask in zip(np.split(made.tokens, cuts), np.split(made.loss_mask, cuts), strict=True):
        if len(ids):
            edges = [0, *(np.flatnonzero(np.diff(mask)) + 1), len(ids)]
            parts = [(tokenizer.decode(ids[a:b]), mask[a]) for a, b in zip(edges, edges[1:], strict=False)]
            texts.append("".join(f"[{text}]" if x else text for text, x in parts))
    return texts


def learned(template, record, reasoning="train", folder="", **arguments):
    """Texts with [what is learned], reasons, notes. folder: of the target."""
    tokenizer = tokenizer_of(template)
    tokenizer.name_or_path = str(folder)
    made = Converter(tokenizer, reasoning, arguments).convert(json.dumps([record]).encode(), is_list=True)
    return marked(tokenizer, made), [*made.skipped], made.notes


def call(arguments, name="near"):
    return {"id": "n0", "type": "function", "function": {"name": name, "arguments": arguments}}


# ------------------------------------------------------------------------------------------------------- families


class Family(NamedTuple):
    template: str
    arguments: dict
    head: str
    ask: str  # {q}
    role: str  # what a generation prompt begins with,
    tail: str  # and what it writes of a thinking block
    think: str  # {r}: what the target says first, its closing tag included,
    answer: str  # {a}: and then
    history: str  # {r}, {a}: an earlier turn behind its role
    call: str = ""  # what the target says that calls a tool, behind its reasoning
    result: str = ""


def loop(user, assistant, tool, prompt, head="", first=""):
    return (
        first + head + "{% for m in messages %}{% if m.role == 'user' %}" + user +
        "{% elif m.role == 'tool' %}" + tool + "{% elif m.role == 'assistant' %}" + assistant + "{% endif %}" +
        "{% endfor %}{% if add_generation_prompt %}" + prompt + "{% endif %}"
    )  # fmt: skip


# Reasoning is kept behind the last assistant turn that calls no tool: within one agent's run, until it has answered.
KEPT = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
# Reasoning is kept behind the last user's turn.
ASKED = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
)
KIMI_CALL = (
    "{% for c in m.tool_calls or [] %}<|calls|>{{ c.function.name }}<|arg|>{% if c.function.arguments is string %}"
    "{{ c.function.arguments }}{% else %}{{ c.function.arguments | tojson }}{% endif %}<|calls_end|>{% endfor %}"
)
KIMI = ("<|im_user|>user<|im_middle|>{q}<|im_end|>", "<|im_assistant|>assistant<|im_middle|>")
KIMI_TOOL = ("<|im_system|>near<|im_middle|>{{ m.content }}<|im_end|>", "<|im_system|>near<|im_middle|>Oslo<|im_end|>")
DEEPSEEK = ("<|User|>{q}", "<|Assistant|>")
DEEPSEEK_CALL = (
    "{% for c in m.tool_calls or [] %}<|calls|>{{ c.function.name + '<|arg|>' + c.function.arguments }}<|calls_end|>"
    "{% endfor %}"
)
SWITCH = "{% if thinking %}<think>{% else %}{}{% endif %}"


def in_jinja(ask: str) -> str:
    return ask.replace("{q}", "{{ m.content }}")


def kimi(block, prompt="", head="", first=""):
    return loop(
        in_jinja(KIMI[0]), KIMI[1] + block + "{{ m.content }}" + KIMI_CALL + "<|im_end|>", KIMI_TOOL[0],
        KIMI[1] + prompt, head, first,
    )  # fmt: skip


def deepseek(answer, prompt, first=""):
    """Behind tool output there is nothing but what a generation prompt writes of a thinking block."""
    role = "{% if loop.previtem is defined and loop.previtem.role != 'tool' %}<|Assistant|>{% endif %}"
    return loop(
        in_jinja(DEEPSEEK[0]), role + answer + DEEPSEEK_CALL + EOS, "<|tool_output|>{{ m.content }}",
        "{% if messages[-1].role != 'tool' %}<|Assistant|>" + prompt + "{% endif %}", "{{ bos_token }}", first,
    )  # fmt: skip


NEAR = '<|calls|>near<|arg|>{"k": 2}<|calls_end|>'
STRIPPED = "{{ m.content.split('</think>')[-1] }}"
CHANNEL = "<|open|>{0}<|sep|>{1}<|close|>{0}<|sep|>"
K3_CALL = """<|open|>tools<|sep|><|open|>call near<|sep|>{"k": 2}<|close|>call near<|sep|><|close|>tools<|sep|>"""
K3 = loop(
    "<|open|>message user<|sep|>{{ m.content }}<|close|>message<|sep|><|end_of_msg|>",
    "<|open|>message assistant<|sep|><|open|>think<|sep|>{{ m.reasoning_content if loop.index0 > ns.last else '' }}"
    "<|close|>think<|sep|><|open|>response<|sep|>{{ m.content }}<|close|>response<|sep|>"
    "{% for c in m.tool_calls or [] %}<|open|>tools<|sep|><|open|>call {{ c.function.name }}<|sep|>"
    "{{ c.function.arguments | tojson }}<|close|>call "
    "{{ c.function.name }}<|sep|><|close|>tools<|sep|>{% endfor %}<|close|>message<|sep|><|end_of_msg|>",
    "<|open|>message tool<|sep|>{{ m.content }}<|close|>message<|sep|><|end_of_msg|>",
    "<|open|>message assistant<|sep|><|open|>think<|sep|>{% if thinking is defined and not thinking %}<|close|>think"
    "<|sep|><|open|>response<|sep|>{% endif %}",
    first=ASKED,
)
K3_ASK = "<|open|>message user<|sep|>{q}<|close|>message<|sep|><|end_of_msg|>"
K3_ROLE, K3_END = (
    "<|open|>message assistant<|sep|>",
    "<|close|>response<|sep|>{calls}<|close|>message<|sep|><|end_of_msg|>",
)
K3_DONE = "<|open|>response<|sep|>{a}" + K3_END.replace("{calls}", "")
GLM = loop(
    "<|user|>\n{{ m.content }}",
    "<|assistant|>\n<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>{{ '\n' + m.content if "
    "m.content }}{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name + '\n' }}{% for k, v in "
    "c.function.arguments.items() %}{{ k }}={{ v }}{{ '\n' }}{% endfor %}</tool_call>{% endfor %}",
    "<|observation|>\n{{ m.content }}",
    "<|assistant|>{% if enable_thinking is defined and not enable_thinking %}{{ '\n' }}<think></think>{% endif %}",
    "[gMASK]",
    ASKED,
)
V3 = deepseek("{{ m.content }}", "")
V31 = deepseek("</think>" + STRIPPED, SWITCH.replace("{}", "</think>"))
V32 = deepseek(
    "{% if thinking and loop.index0 > ns.last %}<think>{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}",
    SWITCH.replace("{}", "<think></think>"),
    ASKED,
)
R1 = deepseek(STRIPPED, "<think>\n")
DISTILL = deepseek("</think>{{ m.content }}", "<think>\n\n</think>\n\n")
MOONLIGHT_HEAD = "<|im_system|>system<|im_middle|>Help.<|im_end|>"
A_EOS, A_END = "{a}" + EOS, "{a}<|im_end|>"
FAMILIES = {
    "V3": Family(V3, {}, BOS, *DEEPSEEK, "", "", A_EOS, A_EOS, NEAR + EOS, "<|tool_output|>Oslo"),
    "R1": Family(R1, {}, BOS, *DEEPSEEK, "<think>\n", "{r}</think>", A_EOS, A_EOS),
    "R1 distilled, closed": Family(
        DISTILL, {}, BOS, *DEEPSEEK, "<think>\n\n</think>\n\n", "", A_EOS, "</think>" + A_EOS
    ),
    "V3.1": Family(V31, {}, BOS, *DEEPSEEK, "</think>", "", A_EOS, "</think>" + A_EOS),
    "V3.1 thinking": Family(
        V31, {"thinking": True}, BOS, *DEEPSEEK, "<think>", "{r}</think>", A_EOS, "</think>" + A_EOS
    ),
    "V3.2": Family(V32, {}, BOS, *DEEPSEEK, "<think></think>", "", A_EOS, "</think>" + A_EOS),
    "V3.2 thinking": Family(
        V32, {"thinking": True}, BOS, *DEEPSEEK, "<think>", "{r}</think>", A_EOS, "</think>" + A_EOS
    ),
    "Moonlight": Family(
        kimi("", head="{% if messages[0].role != 'system' %}" + MOONLIGHT_HEAD + "{% endif %}"),
        {}, MOONLIGHT_HEAD, *KIMI, "", "", A_END, A_END, NEAR + "<|im_end|>", KIMI_TOOL[1],
    ),
    "K2": Family(kimi(""), {}, "", *KIMI, "", "", A_END, A_END, NEAR + "<|im_end|>", KIMI_TOOL[1]),
    "K2 Thinking": Family(
        kimi("<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>", first=KEPT),
        {}, "", *KIMI, "", "<think>{r}</think>", A_END, "<think></think>" + A_END, NEAR + "<|im_end|>", KIMI_TOOL[1],
    ),
    "K2.5": Family(
        kimi("<think>{{ m.reasoning_content if loop.index0 > ns.last else '' }}</think>", "<think>", first=KEPT),
        {}, "", *KIMI, "<think>", "{r}</think>", A_END, "<think></think>" + A_END, NEAR + "<|im_end|>", KIMI_TOOL[1],
    ),
    "K3": Family(
        K3, {}, "", K3_ASK, K3_ROLE, "<|open|>think<|sep|>", "{r}<|close|>think<|sep|>", K3_DONE,
        CHANNEL.format("think", "") + K3_DONE,
        "<|open|>response<|sep|>" + K3_END.replace("{calls}", K3_CALL),
        "<|open|>message tool<|sep|>Oslo<|close|>message<|sep|><|end_of_msg|>",
    ),
    "K3 instant": Family(
        K3, {"thinking": False}, "", K3_ASK, K3_ROLE, CHANNEL.format("think", "") + "<|open|>response<|sep|>", "",
        K3_DONE.removeprefix("<|open|>response<|sep|>"), CHANNEL.format("think", "") + K3_DONE,
    ),
    "GLM": Family(
        GLM, {}, "[gMASK]", "<|user|>\n{q}", "<|assistant|>", "", "\n<think>{r}</think>", "\n{a}<|user|>",
        "\n<think></think>\n{a}", "\n<tool_call>near\nk=2\n</tool_call><|observation|>", "<|observation|>\nOslo",
    ),
    "GLM instant": Family(
        GLM, {"enable_thinking": False}, "[gMASK]", "<|user|>\n{q}", "<|assistant|>", "\n<think></think>", "",
        "\n{a}<|user|>", "\n<think></think>\n{a}",
    ),
}  # fmt: skip


def spoken(family, r, a, masked):
    think, answer = family.think.replace("{r}", r), family.answer.replace("{a}", a)
    return f"{think}[{answer}]" if masked else f"[{think}{answer}]"


def joined(several: list[tuple[str, str]]) -> list[str]:
    """Documents of (prompt, what is said in brackets): one is gone on with where the next prompt begins with it."""
    texts = []
    for prompt, said in several:
        plain = texts[-1].replace("[", "").replace("]", "") if texts else None
        if plain is not None and prompt.startswith(plain):
            texts[-1] += prompt[len(plain) :] + said
        else:
            texts.append(prompt + said)
    return texts


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_learned_behind_its_own_prompt(name, count):
    family = FAMILIES[name]
    qs, rs, answers = ["Q é", "P\n", "What?"][:count], ["hm", "so 日本", "well"], ["A.", "B\n\nb", "C"]
    for masked in (False, True):
        several, so_far = [], family.head.replace("[gMASK]", "(gMASK)")
        for q, r, a in zip(qs, rs, answers, strict=False):
            so_far += family.ask.replace("{q}", q) + family.role
            several.append((so_far + family.tail, spoken(family, r, a, masked)))
            so_far += family.history.replace("{r}", r).replace("{a}", a)
        wanted = [text.replace("(gMASK)", "[gMASK]") for text in joined(several)]
        chats = {form: turns(*(x for pair in zip(qs, answers, strict=False) for x in pair)) for form in "abc"}
        if family.think or name.endswith(("instant", "closed", "V3.1", "V3.2")):
            for i, r in enumerate(rs[:count]):
                chats["a"][2 * i + 1]["reasoning_content"] = chats["b"][2 * i + 1]["reasoning"] = r
                chats["c"][2 * i + 1]["content"] = f"<think>{r}</think>{answers[i]}"
        for chat in chats.values():
            texts, reasons, notes = learned(
                family.template, {"messages": chat}, "mask" if masked else "train", **family.arguments
            )
            assert texts == wanted and not reasons
            assert not any(note.startswith("turns left out") for note in notes)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.call])
def test_a_tool_is_called_and_its_result_answered(name):
    family = FAMILIES[name]
    thinks = {"reasoning_content": "hm"} if family.think else {}
    first = {"role": "assistant", "content": None, **thinks}
    chat = [*turns("Q"), first, {"role": "tool", "content": "Oslo", "tool_call_id": "n0", "name": "near"}]
    chat += [{"role": "assistant", "content": "A", **(thinks and {"reasoning_content": "so"})}]
    start = family.head.replace("[gMASK]", "(gMASK)") + family.ask.replace("{q}", "Q") + family.role + family.tail
    role = "" if family.head == BOS else family.role + family.tail  # DeepSeek writes none behind tool output
    for masked in (False, True):
        think = family.think.replace("{r}", "hm")
        says = f"{think}[{family.call}]" if masked else f"[{think}{family.call}]"
        after = family.result.removeprefix("<|observation|>") if name == "GLM" else family.result  # it was said
        wanted = (start + says + after + role + spoken(family, "so", "A", masked)).replace("(gMASK)", "[gMASK]")
        for arguments in ('{"k": 2}', {"k": 2}):
            first["tool_calls"] = [call(arguments)]
            assert learned(family.template, {"messages": chat}, "mask" if masked else "train", **family.arguments) == (
                [wanted],
                [],
                {},
            )


# ----------------------------------------------------------------------------------------------------------- tool calls


@pytest.mark.parametrize(
    "wants", ["c.function.arguments | tojson", "'' + c.function.arguments", "c.function.arguments"]
)
def test_arguments_take_the_form_that_the_template_wants(wants):
    template = TEMPLATES["V3"].replace(
        "{{ m.content }}" + EOS,
        "{{ m.content }}{% for c in m.tool_calls or [] %}<|call|>{{ c.function.name }} {{ "
        + wants
        + " }}{% endfor %}"
        + EOS,
    )
    for arguments in ('{"é": [2, "x"]}', {"é": [2, "x"]}):
        said = {"role": "assistant", "content": "", "tool_calls": [call(arguments), call("", "far")]}
        texts, reasons, notes = learned(template, {"messages": [*turns("Q"), said]})
        text = f'{BOS}<|User|>Q<|Assistant|>[<|call|>near {{"é": [2, "x"]}}<|call|>far {{}}{EOS}]'
        assert (texts, reasons, notes) == ([text], [], {})
    bare = [{"name": "near", "arguments": {"k": 2}}]  # as some data have them
    texts, _, _ = learned(template, {"messages": [*turns("Q"), {"role": "assistant", "tool_calls": bare}]})
    assert texts == [f'{BOS}<|User|>Q<|Assistant|>[<|call|>near {{"k": 2}}{EOS}]']
    said["tool_calls"] = [call("[3]")] if wants.endswith("tojson") else [call([3])]
    assert learned(template, {"messages": [*turns("Q"), said]})[1] == ["tool calls whose arguments are no JSON object"]


def test_null_content_is_rendered_as_an_empty_one():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m['content'] }}{% elif m.role == 'assistant' %}"
        "<|Assistant|>{% if m['content'] is none %}none{% else %}{{ m['content'] + '' }}{% endif %}{% for c in "
        "m.tool_calls or [] %}<|call|>{{ c.function.arguments }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|>{% endif %}"
    )
    for content in ({"content": ""}, {"content": None}, {}):
        said = {"role": "assistant", "tool_calls": [call({"k": 2})], **content}
        texts = [f"<|User|>Q<|Assistant|>[<|call|>{json.dumps({'k': 2})}<|im_end|>]"]
        assert learned(template, {"messages": [*turns("Q"), said]}) == (texts, [], {})


def test_what_the_template_does_not_render_leaves_the_turn_out():
    said = {"role": "assistant", "content": "", "tool_calls": [call("{}")]}
    result = {"role": "tool", "content": "2"}
    chat = {"messages": [*turns("Q"), said, result, turns("Q", "A")[1]]}
    texts, _, notes = learned(TEMPLATES["V3"], chat)
    assert texts == [f"{BOS}<|User|>Q<|Assistant|>{EOS}<|tool_output|>2[A{EOS}]"]
    assert notes == {f"turns left out: {NO_CALLS}": 1}
    said["content"] = "let me see near"  # the name of the tool in its text is no call
    assert learned(TEMPLATES["V3"], chat)[2] == {f"turns left out: {NO_CALLS}": 1}
    only_calls = (
        kimi("")
        .replace("{{ m.content }}<|im_end|>{% elif", "{{ m.content }}<|im_end|>{% elif")
        .replace("<|im_middle|>{{ m.content }}{% for c", "<|im_middle|>{% for c")
    )
    assert learned(only_calls, {"messages": [*turns("Q"), said]})[1] == [NO_ANSWER]


def test_an_id_that_the_template_renders_must_be_there():
    """Kimi K2 names a call by its id alone."""
    template = kimi("").replace("{{ c.function.name }}", "{{ c.id }}")
    said = {"role": "assistant", "content": "", "tool_calls": [call('{"k": 2}') | {"id": "functions.near:0"}]}
    start = KIMI[0].replace("{q}", "Q") + KIMI[1]
    wanted = start + "[" + NEAR.replace("near", "functions.near:0") + "<|im_end|>]"
    assert learned(template, {"messages": [*turns("Q"), said]}) == ([wanted], [], {})
    said["tool_calls"][0].pop("id")
    reason = "tool calls without the id that the template renders"
    assert learned(template, {"messages": [*turns("Q"), said]})[1] == [reason]


def test_sharegpt_calls_tools_and_keeps_its_system_prompt_and_tools_beside():
    template = TEMPLATES["K2"].replace("{{ c.function.arguments }}", "{{ c.function.arguments | tojson }}")
    said = {"from": "function_call", "value": '{"name": "near", "arguments": {"k": 2}}'}
    ask, answer = {"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}
    record = {"conversations": [ask, said, {"from": "observation", "value": "Oslo"}, answer], "system": "Be."}
    record["tools"] = json.dumps([{"type": "function"}])
    declared = '<|im_system|>tool_declare<|im_middle|>({"type": "function"})<|im_end|>'
    wanted = (
        "<|im_system|>system<|im_middle|>Be.<|im_end|><|im_user|>user<|im_middle|>Q<|im_end|><|im_assistant|>assistant"
        '<|im_middle|>[<|call|>near{"k": 2}<|im_end|>]<|im_tool|>tool<|im_middle|>Oslo<|im_end|>'
        "<|im_assistant|>assistant<|im_middle|>[A<|im_end|>]"
    )
    template = template.replace("{{ tools | tojson }}", "({{ tools[0] | tojson }})")
    assert learned(template, record) == ([declared + wanted], [], {})
    said["value"] = "near(2)"
    assert learned(template, record)[1] == ["invalid JSON"]
    record["conversations"] = [{"from": "system", "value": "Be."}, ask, answer]  # the turn is nearer than the column
    text = learned(template, record | {"system": "Else.", "tools": ""})[0]
    assert text == [wanted.partition("[")[0] + "[A<|im_end|>]"]


# -------------------------------------------------------------------------------------------------------------- forms


def test_prompt_and_completion_are_turns_or_the_texts_of_two():
    ask = f"{BOS}<|User|>Q<|Assistant|>"
    record = {"prompt": "Q", "completion": "A"}
    assert learned(V3, record) == ([f"{ask}[A{EOS}]"], [], {})
    record = {"prompt": turns("Q", "A", "P"), "completion": turns("", "B")[1:]}
    texts, _, notes = learned(V3, record)
    assert texts == [f"{ask}A{EOS}<|User|>P<|Assistant|>[B{EOS}]"] and notes == {"turns left out: weight 0": 1}


def test_a_turn_of_weight_0_is_context_alone():
    chat = turns("Q", "A", "P", "B")
    for form, key in (
        (chat, "messages"),
        ([{"from": m["role"], "value": m["content"]} for m in chat], "conversations"),
    ):
        form = [m | ({"weight": 0} if i == 1 else {"weight": 1} if i == 3 else {}) for i, m in enumerate(form)]
        texts, _, notes = learned(V3, {key: form})
        assert texts == [f"{BOS}<|User|>Q<|Assistant|>A{EOS}<|User|>P<|Assistant|>[B{EOS}]"]
        assert notes == {"turns left out: weight 0": 1}


def test_what_follows_the_last_answer_is_left_off():
    wanted = [f"{BOS}<|User|>Q<|Assistant|>[A{EOS}]"]
    for rest in (turns("P"), [{"role": "tool", "content": "x"}], [*turns("P"), {"role": "system", "content": "x"}]):
        assert learned(V3, {"messages": turns("Q", "A") + rest}) == (wanted, [], {UNANSWERED: 1})


def test_the_stop_token_is_learned_where_the_next_turn_brings_it(tmp_path):
    unstopped = loop("<|user|>{{ m.content }}", "<|assistant|>{{ m.content }}", "", "<|assistant|>")
    texts, _, _ = learned(unstopped, {"messages": turns("Q", "A", "P", "B")})
    assert texts == ["<|user|>Q<|assistant|>[A<|user|>]P<|assistant|>[B<|user|>]"]
    i = tokenizer_of(unstopped).convert_tokens_to_ids("<|user|>")
    for name, stops in (("config", i), ("generation_config", [1, i]), ("generation_config", 1)):  # what an engine reads
        (tmp_path / f"{name}.json").write_text(json.dumps({"eos_token_id": stops}))
        texts, _, _ = learned(unstopped, {"messages": turns("Q", "A")}, folder=tmp_path)
        assert texts == ["<|user|>Q<|assistant|>[A<|user|>]" if stops != 1 else "<|user|>Q<|assistant|>[A]"]
    between = unstopped.replace("{% endfor %}", "{% if not loop.last %}" + EOS + "{% endif %}{% endfor %}", 1)
    between = between.replace("{% if add_generation_prompt %}", "{% if add_generation_prompt %}" + EOS)
    texts, _, _ = learned(between, {"messages": turns("Q", "A")})
    assert texts == [f"<|user|>Q{EOS}<|assistant|>[A{EOS}]"]


# ---------------------------------------------------------------------------------------------------------- reasoning


def test_reasoning_that_a_prompt_closes_is_dropped_by_name():
    chat = turns("Q", "A")
    chat[1]["reasoning_content"] = "hm"
    for name in ("V3.1", "V3.2", "K3 instant", "GLM instant", "R1 distilled, closed"):
        family = FAMILIES[name]
        assert learned(family.template, {"messages": chat}, **family.arguments)[2] == {DROPPED: 1}


def test_reasoning_that_only_another_turn_s_prompt_opens_leaves_the_turn_out():
    said = turns("Q", "<think>\nhm</think>A") + [{"role": "tool", "content": "2"}]
    said += [{"role": "assistant", "content": "B", "reasoning_content": "so"}]
    texts, _, notes = learned(R1, {"messages": said})
    assert texts == [f"{BOS}<|User|>Q<|Assistant|><think>\n[hm</think>A{EOS}]"]
    assert notes == {f"turns left out: {UNOPENED}": 1}
    said[-1].pop("reasoning_content")
    texts, _, notes = learned(R1, {"messages": said})
    assert texts[1] == f"{BOS}<|User|>Q<|Assistant|>A{EOS}<|tool_output|>2[B{EOS}]"


def test_any_pair_of_tags_is_told_from_the_template():
    for opening, closing in (("[THINK]", "[/THINK]"), ("<|thought|>", "<|/thought|>"), ("<a:think>", "</a:think>")):
        block = opening + "{{ m.reasoning_content }}" + closing + "{{ m.content }}" + EOS
        template = loop("<|user|>{{ m.content }}", "<|assistant|>" + block, "", "<|assistant|>")
        chats = [turns("Q", "A"), turns("Q", f"{opening}hm{closing}A"), turns("Q", "<think>hm</think>A")]
        chats[0][1]["reasoning"] = "hm"
        for chat in chats:
            for reasoning in ("train", "mask"):
                mask = Converter(tokenizer_of(template), reasoning).documents(chat)[0].loss_mask
                said = f"{opening}hm{closing}A{EOS}" if reasoning == "train" else f"A{EOS}"
                tokens = tokenizer_of(template)(said, add_special_tokens=False).input_ids
                whole = Converter(tokenizer_of(template), reasoning).documents(chat)[0].tokens
                assert whole[mask].tolist() == tokens and mask[-len(tokens) :].all()


def test_a_user_who_writes_the_role_does_not_move_the_answer():
    """In history that is rewritten, the role is looked for between the last message's text and the answer's own."""
    family = FAMILIES["K2 Thinking"]
    chat = [*turns("Q"), {"role": "assistant", "content": "", "tool_calls": [call("{}")], "reasoning_content": "hm"}]
    chat += [{"role": "tool", "content": f"x{family.role}y"}]
    chat += [{"role": "assistant", "content": f"B{family.role}C", "reasoning_content": "so"}]
    (text,), _, notes = learned(family.template, {"messages": chat})
    assert text.endswith(f"<|im_end|>{family.role}[<think>so</think>B{family.role}C<|im_end|>]") and not notes


def test_an_answer_in_rewritten_history_without_a_role_is_found_or_left_out():
    """DeepSeek's grammar has nothing between tool output and answer; or a turn lacks the role that its prompt has."""
    chat = [*turns("Q"), {"role": "assistant", "content": "", "tool_calls": [call("{}")]}]
    chat += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "B"}]
    rewrites = V3.replace("{{ bos_token }}", "{{ messages | length }}")
    called = NEAR.replace('"k": 2', "") + EOS
    texts = [f"<|User|>Q<|Assistant|>[{called}]", f"<|User|>Q<|Assistant|>{called}<|tool_output|>2[B{EOS}]"]
    assert learned(rewrites, {"messages": chat})[0] == ["1" + texts[0], "3" + texts[1]]
    lost = rewrites.replace("previtem.role != 'tool'", "previtem.role != 'user'")
    assert learned(lost, {"messages": turns("Q", "A", "P", "B")})[1] == [REWRITTEN]


# ------------------------------------------------------------------------------------------ what a template is given


def test_arguments_of_a_template_are_read_as_json_or_text():
    given = ["thinking=true", "mode=fast", "n=3", 'a={"b": null}', "c=None", "d=False", "e=x=y"]
    wanted = {"thinking": True, "mode": "fast", "n": 3, "a": {"b": None}, "c": None, "d": False, "e": "x=y"}
    assert read_arguments(given) == wanted and read_arguments(None) == {}
    for wrong in ("thinking", "=3", "a-b=3", "tools=3", "add_generation_prompt=true"):
        with pytest.raises(ValueError, match="NAME=VALUE of an argument of the chat template is wanted"):
            read_arguments([wrong])


def test_a_record_s_own_arguments_stand_above_the_given_ones(tmp_path):
    said = {"messages": turns("Q", "<think>hm</think>A")}
    own = said | {"chat_template_kwargs": {"thinking": True}}
    closed, opened = (f"{BOS}<|User|>Q<|Assistant|>" + x for x in (f"</think>[A{EOS}]", f"<think>[hm</think>A{EOS}]"))
    assert learned(V31, said)[0] == learned(V31, said, thinking=False)[0] == [closed]
    assert (
        learned(V31, own)[0] == learned(V31, own, thinking=False)[0] == learned(V31, said, thinking=True)[0] == [opened]
    )
    path = write_lines(tmp_path / "x.jsonl", said)
    made = [
        read_conversations(
            [path], tokenizer_of(V31), 99, cache=tmp_path / "cache", progress=False, template_args={"thinking": x}
        )[1].supervised
        for x in (True, False, True)
    ]
    assert made[0] == made[2] > made[1] and len(list((tmp_path / "cache").iterdir())) == 2  # part of the key


def test_a_target_without_a_template_says_what_to_do(tmp_path):
    path, tokenizer = write_lines(tmp_path / "x.jsonl", GOOD), tokenizer_of(None)
    for name in ("", "/models/v32"):
        tokenizer.name_or_path = name
        with pytest.raises(
            ValueError, match=f"^{name or 'the tokenizer'} brings no .*--chat-template FILE, .*--render URL$"
        ):
            read_conversations([path], tokenizer, 99, progress=False)
    tokens = write_lines(tmp_path / "y.jsonl", {"input_ids": [1, 2], "loss_mask": [0, 1]})
    assert read_conversations([tokens], tokenizer, 99, progress=False)[1].used == 1  # these need none
    file = tmp_path / "chat_template.jinja"
    args = SimpleNamespace(model="m", chat_template=str(file))
    for text in (None, b"\xff\xfe{"):
        if text:
            file.write_bytes(text)
        with pytest.raises(ValueError, match=r"chat_template.jinja cannot be used \(.*names a file of a chat template"):
            with_template(args, tokenizer)
    file.write_text(V3)
    assert read_conversations([path], with_template(args, tokenizer), 99, progress=False)[1].used == 1
    with pytest.raises(ValueError, match="m has no tokenizer, and the data are text"):
        with_template(args, None)
