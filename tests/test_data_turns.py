"""Claims about turns that the target did not end (`finish_reason` "length"): what it said is learned, and no token that
it never said. The families and what is wanted of them are those of `test_data_chats`."""

import pytest

from tests.helpers import EOS, chat_tokenizer, read_chats, turns
from tests.test_data_chats import FAMILIES, call, learned, loop, spoken


def cut(record, **said):
    """The same conversation, cut in its last turn."""
    *before, last = record
    return {"messages": [*before, last | said | {"finish_reason": "length"}]}


def prompt_of(family, *answered):
    """What an engine is given for the turn behind those answered."""
    text = family.head
    for r, a in answered:
        text += family.ask.replace("{q}", "Q") + family.role + family.history.replace("{r}", r).replace("{a}", a)
    return text + family.ask.replace("{q}", "Q") + family.role + family.tail


def reasons_as_told(family, name, chat):
    """The turns' reasoning, apart, where the family says any."""
    if family.think or name.endswith(("instant", "closed", "V3.1", "V3.2")):
        return [m | {"reasoning_content": "hm"} if m["role"] == "assistant" else m for m in chat]
    return chat


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_answer_that_was_cut_is_learned_up_to_the_cut_and_no_further(name, masked):
    family, half = FAMILIES[name], "A é\nhal"
    told = spoken(family, "hm", "\0", masked).partition("\0")[0] + half + "]"
    chat = reasons_as_told(family, name, turns("Q", half))
    texts, reasons, _ = learned(family.template, cut(chat), "mask" if masked else "train", **family.arguments)
    assert texts == [prompt_of(family) + told] and not reasons
    whole, _, _ = learned(family.template, {"messages": chat}, "mask" if masked else "train", **family.arguments)
    assert whole[0].startswith(texts[0][:-1]) and len(whole[0]) > len(texts[0])  # what ends a turn that was not cut
    chat = reasons_as_told(family, name, turns("Q", "A.", "Q", half))
    texts, reasons, _ = learned(family.template, cut(chat), "mask" if masked else "train", **family.arguments)
    assert texts[-1].endswith(told) and texts[-1].replace("[", "").replace("]", "").startswith(
        prompt_of(family, ("hm", "A.")).replace("[", "").replace("]", "")
    )
    assert "".join(texts).count("[" + told.rpartition("[")[2]) == 1 and not reasons


@pytest.mark.parametrize("name", FAMILIES)
def test_reasoning_that_was_cut_is_learned_without_its_closing_tag(name):
    family, thought = FAMILIES[name], "hm é\nso"
    record = cut(turns("Q", ""), reasoning_content=thought)
    texts, reasons, _ = learned(family.template, record, **family.arguments)
    if family.think:
        assert texts == [f"{prompt_of(family)}[{family.think.partition('{r}')[0]}{thought}]"] and not reasons
    else:  # the target that is asked so says none
        assert texts == [] and reasons == ["a turn that was cut, whose end the template does not show"]
    texts, reasons, _ = learned(family.template, record, "mask", **family.arguments)
    assert texts == [] and len(reasons) == 1


@pytest.mark.parametrize("name", ["K2 Thinking", "GLM"])  # whose prompts open no block, so that the target does
def test_inline_reasoning_that_never_closes_is_reasoning(name):
    family = FAMILIES[name]
    texts, reasons, _ = learned(family.template, cut(turns("Q", "<think>hm so")), **family.arguments)
    assert texts == [f"{prompt_of(family)}[{family.think.partition('{r}')[0]}hm so]"] and not reasons
    texts, reasons, _ = learned(family.template, cut(turns("Q", "<think>hm so")), "mask", **family.arguments)
    assert texts == [] and len(reasons) == 1


def test_the_blank_before_a_cut_is_learned_where_the_template_keeps_it():
    keeps = loop("<|User|>{{ m.content }}", "<|Assistant|>{{ m.content }}\n" + EOS, "", "<|Assistant|>")
    trims = keeps.replace("{{ m.content }}\n", "{{ m.content | trim }}\n")
    for template, said in ((keeps, "half \n"), (trims, "half")):
        texts, reasons, _ = learned(template, cut(turns("Q", "half \n")))
        assert texts == [f"<|User|>Q<|Assistant|>[{said}]"] and not reasons


def test_an_answer_is_cut_behind_its_own_text_and_not_where_the_end_of_turn_has_the_same():
    ends = loop("<|User|>{{ m.content }}", "<|Assistant|>{{ m.content }} e." + EOS, "", "<|Assistant|>")
    texts, reasons, _ = learned(ends, cut(turns("Q", "e")))
    assert texts == ["<|User|>Q<|Assistant|>[e]"] and not reasons


def test_a_turn_that_was_cut_at_its_calls_is_left_out_and_other_reasons_change_nothing():
    family = FAMILIES["K2"]
    texts, reasons, _ = learned(family.template, cut(turns("Q", "A"), tool_calls=[call('{"k": 2}')]))
    assert texts == [] and reasons == ["a turn that was cut at its tool calls"]
    for reason in ("stop", "tool_calls", None, 3, ["length"]):
        marked = [*turns("Q"), {"role": "assistant", "content": "A", "finish_reason": reason}]
        assert learned(family.template, {"messages": marked}) == learned(family.template, {"messages": turns("Q", "A")})


def test_a_cut_turn_in_the_middle_is_context_of_the_next(tmp_path):
    family = FAMILIES["V3"]
    first, second = turns("Q", "half"), turns("R", "A")
    record = {"messages": [first[0], first[1] | {"finish_reason": "length"}, *second]}
    texts, reasons, _ = learned(family.template, record)
    user, assistant = "<|User|>", "<|Assistant|>"
    assert not reasons and [text.removeprefix(family.head) for text in texts] == [
        f"{user}Q{assistant}[half]{EOS}{user}R{assistant}[A{EOS}]"
    ]
    documents, _ = read_chats(tmp_path, chat_tokenizer(family.template), cut(turns("Q", "half")))
    assert documents[0].loss_mask.sum() == len("half")
