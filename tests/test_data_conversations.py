"""Claims about conversations: exactly which tokens are learned, in the grammars of DeepSeek and Kimi, and what becomes
of everything else.

The oracle is written by hand: `[square brackets]` around what is learned in the text that an engine would see. The
tokenizers are made here: bytes, where a token is one byte or one special string, and a merge-heavy one.
"""

import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from data import conversations, rendering, templates
from data.conversations import TOO_LONG, read_conversations, start_worker
from data.packing import anchors_of
from data.records import UNANSWERED
from data.templates import SPANS, Converter
from tests.helpers import (
    BOS,
    EOS,
    GOOD,
    SPECIAL,
    TEMPLATES,
    UNTHINK,
    chat_tokenizer,
    many_chats,
    read_chats,
    same_documents,
    turns,
    wrap,
    write_lines,
)


def by_hand(marked: str) -> tuple[list[int], list[bool]]:
    """Bytes and special tokens of a text in which `[..]` encloses what is learned."""
    ids, mask, learned = [], [], False
    for part in re.split("(" + "|".join(map(re.escape, [*SPECIAL, "[", "]"])) + ")", marked):
        if part in ("[", "]"):
            learned = part == "["
            continue
        new = [256 + SPECIAL.index(part)] if part in SPECIAL else list(part.encode())
        ids, mask = ids + new, mask + [learned] * len(new)
    return ids, mask


def assert_are(documents, *marked: str):
    assert [(d.tokens.tolist(), d.loss_mask.tolist()) for d in documents] == [by_hand(m) for m in marked]
    for d in documents:
        assert d.tokens.dtype == torch.int64 and d.loss_mask.dtype == torch.bool
        assert 0 < d.loss_mask.sum() < len(d.tokens)


# ----------------------------------------------------------------------------------------------------- what is learned

EXACT = {
    "V3": (f"{BOS}Be.", "<|User|>{}<|Assistant|>", "[{}<|end_of_sentence|>]"),
    "V3.1": (f"{BOS}Be.", "<|User|>{}<|Assistant|></think>", "[{}<|end_of_sentence|>]"),
    "K2": (
        "<|im_system|>system<|im_middle|>Be.<|im_end|>",
        "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>",
        "[{}<|im_end|>]",
    ),
    "K2.5 instant": (
        "<|im_system|>system<|im_middle|>Be.<|im_end|>",
        "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|><think></think>",
        "[{}<|im_end|>]",
    ),
    "K2.5": (
        "<|im_system|>system<|im_middle|>Be.<|im_end|>",
        "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|><think>",
        "[</think>{}<|im_end|>]",
    ),
    "ChatML": (
        "<|im_start|>system\nBe.<|im_end|>\n",
        "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n",
        "[{}<|im_end|>]\n",
    ),
    "no end": ("system: Be.\n", "user: {}\nassistant:", "[ {}\n]"),
}
EXACT["between"] = EXACT["ChatML"]


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", EXACT)
def test_exactly_the_answers_and_their_ends_of_turn_are_learned(tmp_path, name, count):
    said = ["Hi é", "Hello 日本 🙂.", "a\n\nb", "  two\nlines", "one more?", "No."][: 2 * count]
    head, ask, answer = EXACT[name]
    text = head + "".join((ask if i % 2 == 0 else answer).format(x) for i, x in enumerate(said))
    documents, report = read_chats(tmp_path, chat_tokenizer(TEMPLATES[name]), {"messages": turns(*said, system="Be.")})
    if name == "ChatML":
        text = text.replace("  two", "two")  # that template trims
    assert_are(documents, text.removesuffix("\n") if text.endswith("]\n") else text)  # blanks behind the end: not said
    assert (report.read, report.used, report.documents, report.cut) == (1, 1, 1, 0) and not report.skipped
    assert report.tokens == len(documents[0].tokens) and report.supervised == int(documents[0].loss_mask.sum())


@pytest.mark.parametrize("name", ["V3", "V3.1", "K2", "K2.5", "between"])
def test_one_answer_in_memory_is_what_two_tokenisations_give(name):
    tokenizer = chat_tokenizer(TEMPLATES[name])
    converter = Converter(tokenizer, "train")
    for prompt, answer in [("Q", "A"), ("def f(x):\n", "    return 'é'\n"), ("日本", "🙂")]:
        opening = tokenizer.apply_chat_template(turns(prompt), tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(turns(prompt, answer), tokenize=False)
        before, tokens = (tokenizer(text, add_special_tokens=False).input_ids for text in (opening, whole))
        (made,) = converter.documents(turns(prompt, answer))
        assert made.tokens.tolist() == tokens and tokens[: len(before)] == before
        assert made.loss_mask.tolist() == [i >= len(before) for i in range(len(tokens))]
    with pytest.raises(ValueError, match="pair 3 has nothing to learn: an empty answer"):
        converter.documents(turns("Q", ""), source="pair 3")


R1_CHAT = turns("Q", "<think>\nhm</think>\n\nA", "P", "<think>\nso\n</think>B")


def test_a_template_that_strips_reasoning_still_learns_every_turn_behind_what_an_engine_gives(tmp_path):
    first = f"{BOS}<|User|>Q<|Assistant|>" + "<think>\n[hm</think>\n\nA" + EOS + "]"
    second = f"{BOS}<|User|>Q<|Assistant|>%sA{EOS}<|User|>P<|Assistant|>" + "<think>\n[so\n</think>B" + EOS + "]"
    documents, report = read_chats(tmp_path, chat_tokenizer(TEMPLATES["R1"]), {"messages": R1_CHAT})
    assert_are(documents, first, second % "\n\n")
    assert documents[0].source == documents[1].source and report.used == 1 and report.documents == 2
    assert report.notes == {"documents begun because the template renders history differently": 1}
    # The same from the form in which engines hand it out, and from a template that keeps it in the last turn.
    apart = turns("Q", "\n\nA", "P", "B")
    apart[1]["reasoning_content"], apart[3]["reasoning"] = "hm", "so\n"
    for name in ("R1", "R1 earlier"):
        documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES[name]), {"messages": apart})
        assert_are(documents, first, second % "\n\n")


def test_a_blank_thinking_block_is_learned_as_it_was_said(tmp_path):
    said = turns("Q", "<think>\n\n</think>\n\nA")
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["R1"]), {"messages": said})
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|><think>\n[\n</think>\n\nA{EOS}]")


def test_a_thinking_template_that_opens_no_block_learns_the_block_whole(tmp_path):
    chat = turns("Q", "A", "P", "B")
    chat[1]["reasoning_content"] = "hm\n"
    ask = "<|im_user|>user<|im_middle|>{}<|im_end|><|im_assistant|>assistant<|im_middle|>"
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["K2 thinking"]), {"messages": chat})
    first, second = (
        ask.format("Q") + "[<think>hm\n</think>A<|im_end|>]",
        ask.format("P") + "[<think></think>B<|im_end|>]",
    )
    assert_are(documents, first, ask.format("Q") + "<think></think>A<|im_end|>" + second)


def test_reasoning_is_masked_with_its_closing_tag(tmp_path):
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["R1"]), {"messages": R1_CHAT[:2]}, reasoning="mask")
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|>" + "<think>\nhm</think>[\n\nA" + EOS + "]")
    said = turns("Q", "A </think> tag")  # V3 knows no thinking: this is text, and the block below is as well
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3"]), {"messages": said}, reasoning="mask")
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|>[A </think> tag{EOS}]")
    block = {"messages": turns("Q", "<think>hm</think>A")}
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3"]), block, reasoning="mask")
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|><think>hm</think>[A{EOS}]")
    instant = {"messages": turns("Q", "<think>hm</think>A")}
    documents, report = read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3.1"]), instant)
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|></think>[A{EOS}]")
    assert report.notes == {"turns without their reasoning, which the template does not render": 1}


def test_tools_and_tool_calls_reach_the_template(tmp_path):
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    chat = [*turns("Q"), {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}]
    chat += [{"role": "tool", "content": "2"}, {"role": "assistant", "content": "Two."}]
    tools = [{"type": "function"}]
    declared = '<|im_system|>tool_declare<|im_middle|>{"type": "function"}<|im_end|>'
    ask = "<|im_user|>user<|im_middle|>Q<|im_end|><|im_assistant|>assistant<|im_middle|>"
    result = "<|im_tool|>tool<|im_middle|>2<|im_end|><|im_assistant|>assistant<|im_middle|>"
    said = '[<|call|>add{"a": 1}<|im_end|>]'
    template = TEMPLATES["K2"].replace("tools | tojson", "tools[0] | tojson")
    for given in (tools, json.dumps(tools)):
        documents, _ = read_chats(tmp_path, chat_tokenizer(template), {"messages": chat, "tools": given})
        assert_are(documents, declared + ask + said + result + "[Two.<|im_end|>]")
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["K2 thinking"]), {"messages": chat})
    first = ask + said.replace("[", "[<think>hm</think>")
    again = ask + said.replace("[", "<think></think>").strip("]") + result + "[<think></think>Two.<|im_end|>]"
    assert_are(documents, first, again)
    chat[1] = {"role": "assistant", "content": "call"}  # no assistant tag between a tool's output and the answer
    documents, _ = read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3.1"]), {"messages": chat})
    start = f"{BOS}<|User|>Q<|Assistant|></think>[call{EOS}]"
    assert_are(documents, f"{start}<|tool_output|>2[Two.{EOS}]")


def test_an_answer_is_cut_by_the_row_and_a_prompt_that_fills_it_is_left_out(tmp_path):
    tokenizer = chat_tokenizer(TEMPLATES["V3"])
    long, late = turns("Q", "x" * 99), turns("q" * 50, "A")
    begin = len(by_hand(f"{BOS}<|User|>Q<|Assistant|>")[0])
    for row_tokens in (begin + 1, begin + 7, begin + 99, begin + 100):
        documents, report = read_chats(
            tmp_path, tokenizer, {"messages": long}, {"messages": late}, row_tokens=row_tokens
        )
        assert (report.used, report.cut) == (1 + (row_tokens > 54), int(row_tokens < begin + 100))
        assert report.skipped == ({TOO_LONG: 1} if row_tokens <= 54 else {})
        assert len(documents[0].tokens) == row_tokens
        assert int(documents[0].loss_mask.sum()) == row_tokens - begin
        assert (256 + SPECIAL.index(EOS) in documents[0].tokens) == (row_tokens == begin + 100)
    with pytest.raises(ValueError, match=f"1 x {TOO_LONG}"):
        read_chats(tmp_path, tokenizer, {"messages": long}, row_tokens=begin)


def test_a_document_is_kept_where_it_has_an_anchor(tmp_path):
    rng = random.Random(0)
    rows = [[int(rng.random() < 0.15) for _ in range(rng.randrange(1, 12))] for _ in range(300)]
    records = [{"input_ids": [7] * len(mask), "loss_mask": mask} for mask in rows]
    documents, report = read_chats(tmp_path, chat_tokenizer(""), *records, row_tokens=6)
    for steps in (1, 3, 7):
        wanted = [mask[:6] for mask in rows if anchors_of(torch.tensor(mask[:6], dtype=torch.bool), steps)]
        assert [d.loss_mask.int().tolist() for d in documents] == wanted
    assert report.used == len(wanted) and report.used + report.skipped.total() == report.read == 300


# -------------------------------------------------------------------------------------------------- a merging tokenizer


class Slow:
    """A tokenizer without offsets, as those written in Python are."""

    is_fast = False

    def __init__(self, tokenizer):
        self.inner = tokenizer

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __call__(self, *args, **options):
        return self.inner(*args, **options)


@pytest.fixture(scope="module", params=["fast", "slow"])
def merging(request):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rng, words = random.Random(0), ["the", " the", "\n\n", "\n", " cat", " sat", " on", " mat", "user", "assistant"]
    text = ["".join(rng.choices(words, k=40)) for _ in range(60)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )

    def make(template=TEMPLATES["ChatML untrimmed"]):
        made = wrap(tokenizer, template)
        return made if request.param == "fast" else Slow(made)

    return make


def test_a_document_is_the_tokens_of_the_whole_text(tmp_path, merging):
    tokenizer = merging()
    said = ["\nthe cat sat", "Z the cat", " on\n", "Z sat on"]
    text = "".join(
        f"<|im_start|>{role}\n{x}<|im_end|>\n" for role, x in zip(["user", "assistant"] * 2, said, strict=True)
    )
    whole = tokenizer(text.strip(), add_special_tokens=False).input_ids
    pieces = [
        tokenizer(x, add_special_tokens=False).input_ids for x in re.split(r"((?<=\n)\nthe cat sat)", text.strip())
    ]
    assert sum(pieces, []) != whole  # the case: "\n\n" spans the user's turn
    (document,), _ = read_chats(tmp_path, tokenizer, {"messages": turns(*said)})
    assert document.tokens.tolist() == whole
    spans = tokenizer.decode(torch.where(document.loss_mask, document.tokens, tokenizer.bos_token_id)).split(BOS)
    assert [x for x in spans if x] == ["Z the cat<|im_end|>", "Z sat on<|im_end|>"]


def test_a_token_that_spans_the_border_is_skipped_with_the_reason(tmp_path, merging):
    tokenizer = merging()
    assert len(tokenizer("\n\n", add_special_tokens=False).input_ids) == 1
    good, bad = {"messages": turns("x", "Z sat on")}, {"messages": turns("x", "\nZ sat on")}
    documents, report = read_chats(tmp_path, tokenizer, bad, good)
    assert len(documents) == 1 and report.skipped == {SPANS: 1}
    # Here the prompt's blank and the answer become one token; trimmed offsets would let it begin with the answer.
    tokenizer = merging(TEMPLATES["no end"].replace("assistant:", "assistant: "))
    assert len(tokenizer(" the", add_special_tokens=False).input_ids) == 1
    documents, report = read_chats(
        tmp_path, tokenizer, {"messages": turns("x", "the mat")}, {"messages": turns("x", "Z")}
    )
    assert report.skipped == {SPANS: 1}
    assert tokenizer.decode(documents[0].tokens[documents[0].loss_mask]) == "Z\n"


# ------------------------------------------------------------------------------------------------------ forms and skips


def test_sharegpt_and_parts_give_the_same_as_messages(tmp_path):
    tokenizer = chat_tokenizer(TEMPLATES["K2"])
    wanted, _ = read_chats(tmp_path, tokenizer, {"messages": [*turns("Q", "A", system="S"), *turns("P", "B")]})
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    chat = [*turns("Q", "A", system="S"), *turns("P", "B")]
    for record in (
        {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in chat]},
        {"conversations": chat, "messages": None},
        {"messages": [m | {"content": [{"type": "text", "text": part} for part in m["content"]]} for m in chat]},
    ):
        documents, _ = read_chats(tmp_path, tokenizer, record)
        assert same_documents(documents, wanted)


def test_tokenised_rows_pass_unchanged(tmp_path):
    documents, _ = read_chats(
        tmp_path, chat_tokenizer(""), {"input_ids": [5, 0, 256, 9], "loss_mask": [0, 1, 0, 1], "messages": []}
    )
    assert documents[0].tokens.tolist() == [5, 0, 256, 9]
    assert documents[0].loss_mask.tolist() == [False, True, False, True]


FAILS = "{% if 'boom' in messages[0].content %}{{ raise_exception('no boom') }}{% endif %}" + TEMPLATES["V3"]
FORGETS = "<|User|>{{ m.content if loop.last }}"
REWRITES = TEMPLATES["V3"].replace("{{ bos_token }}", "{{ bos_token }}{{ messages | length }}")
BAD = {
    "invalid JSON": ['{"messages": [', "\x00\x01", "[" * 100_000, "1" * 9_999, "NaN,"],
    "neither messages nor conversations nor prompt and completion nor input_ids and loss_mask": [
        *["3", "null", {"text": "x"}, {"messages": "x"}, {"prompt": "x"}, {"prompt": 3, "completion": "x"}]
    ],
    "a turn that is no object": [{"messages": ["x"]}],
    "an unknown role": [{"messages": [*turns("Q"), {"role": "critic", "content": "A"}]}, {"messages": [{"role": []}]}],
    "content that is not text": [
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *turns("Q", "A")]},
        {"messages": [{"role": "user", "content": 3}, *turns("Q", "A")[1:]]},
    ],
    "reasoning that is not text": [{"messages": [*turns("Q"), turns("Q", "A")[1] | {"reasoning": ["hm"]}]}],
    "empty": [{"messages": []}, {"messages": turns("", "")}, {"conversations": []}],
    "a system prompt alone": [{"messages": turns(system="S")}],
    "no assistant turn": [{"messages": turns("Q")}],
    "every assistant turn has weight 0": [{"messages": [*turns("Q"), turns("Q", "A")[1] | {"weight": 0}]}],
    "a weight that is neither 0 nor 1": [{"messages": [turns("Q")[0] | {"weight": 0.5}, *turns("Q", "A")[1:]]}],
    "a system prompt that is not text": [GOOD | {"system": ["x"]}],
    "chat_template_kwargs that are no arguments of a template": [
        GOOD | {"chat_template_kwargs": 3},
        GOOD | {"chat_template_kwargs": {"tokenize": True}},
    ],
    "tool calls that are no functions with a name": [
        {"messages": [*turns("Q"), turns("Q", "A")[1] | {"tool_calls": calls}]}
        for calls in (3, [3], [{"function": 3}], [{"function": {"name": ""}}])
    ],
    "an empty answer": [{"messages": turns("Q", " ")}],
    "an assistant turn that answers nothing": [{"messages": turns("Q", "A")[1:]}],
    "tools that are no list of objects": [GOOD | {"tools": "3"}, GOOD | {"tools": [3]}],
    "text that is not Unicode": [{"messages": turns("Q", "\ud800")}],
    "the chat template fails (TemplateError: no boom)": [{"messages": turns("boom", "A")}],
    "input_ids and loss_mask that are no lists of integers": [
        {"input_ids": ids, "loss_mask": mask}
        for ids, mask in [
            ([1.0], [1]),
            ([[1], [1, 2]], [1]),
            (None, [1]),
            ([], []),
            ("ab", [1]),
            ([1], [0.5]),
            ([2**64], [1]),
        ]
    ],
    "input_ids and loss_mask of different length": [{"input_ids": [1, 2], "loss_mask": [1]}],
    "input_ids outside the vocabulary": [
        {"input_ids": [1, i], "loss_mask": [0, 1]} for i in (-1, 256 + len(SPECIAL), 2**40)
    ],
    "a loss_mask of other numbers than 0 and 1": [{"input_ids": [1, 2], "loss_mask": [0, 2]}],
    "nothing supervised": [{"input_ids": [1, 2], "loss_mask": [1, 0]}],
}


@pytest.mark.parametrize("reason", BAD)
def test_what_cannot_be_learned_is_skipped_with_the_reason(tmp_path, reason):
    bad = BAD[reason]
    documents, report = read_chats(tmp_path, chat_tokenizer(FAILS), GOOD, *bad, "", GOOD)
    assert report.skipped == {reason: len(bad)} and report.read == len(bad) + 2 and report.used == len(documents) == 2
    assert [d.source.rpartition(":")[2] for d in documents] == ["1", str(len(bad) + 3)]
    with pytest.raises(ValueError, match=re.escape(f"{len(bad)} x {reason}")) as error:
        read_chats(tmp_path, chat_tokenizer(FAILS), *bad)
    assert "\n" not in str(error.value)


def test_an_answer_that_cannot_be_told_from_its_prompt_is_skipped(tmp_path):
    documents, _ = read_chats(tmp_path, chat_tokenizer(REWRITES), GOOD)
    assert_are(documents, f"{BOS}1<|User|>Q<|Assistant|>[A{EOS}]")  # behind the prompt that an engine gives
    with pytest.raises(ValueError, match="1 x the template renders the prompt differently once it is answered"):
        read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3"].replace("<|User|>{{ m.content }}", FORGETS)), GOOD)
    with pytest.raises(ValueError, match="1 x no reasoning, where the generation prompt opens a thinking block"):
        read_chats(tmp_path, chat_tokenizer(TEMPLATES["R1"]), GOOD)
    unfinished = turns("Q", "A")
    unfinished[1]["reasoning_content"] = "hm"
    template = TEMPLATES["V3"].replace("{{ m.content }}" + EOS, "{{ m.reasoning_content }}{{ m.content }}" + EOS)
    with pytest.raises(ValueError, match="1 x reasoning without a <think> block, which cannot be masked"):
        read_chats(tmp_path, chat_tokenizer(template), {"messages": unfinished}, reasoning="mask")


def test_one_turn_that_cannot_be_learned_leaves_the_others(tmp_path):
    documents, report = read_chats(tmp_path, chat_tokenizer(TEMPLATES["V3"]), {"messages": turns("Q", "", "P", "B")})
    assert_are(documents, f"{BOS}<|User|>Q<|Assistant|>{EOS}<|User|>P<|Assistant|>[B{EOS}]")
    assert report.notes == {"turns left out: an empty answer": 1} and not report.skipped
    lines = report.lines()
    assert lines[0].startswith("1 of 1 conversations in 1 documents, 10 tokens, 20% learned; 0 cut") and len(lines) == 2


# ------------------------------------------------------------------------------------------ templates, processes, cache

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize("where", ["here", "in a thread", pytest.param("in processes", marks=pytest.mark.slow)])
def test_a_template_that_never_returns_is_named(tmp_path, where, monkeypatch):
    monkeypatch.setattr(rendering, "TEMPLATE_SECONDS", 0.3)
    tokenizer, path = chat_tokenizer(LOOPS), write_lines(tmp_path / "x.jsonl", GOOD)
    tokenizer.name_or_path = "looping"
    if where == "in processes":
        monkeypatch.setattr(conversations, "start_worker", start_impatient_worker)
        paths, workers = [path, write_lines(tmp_path / "y.jsonl", GOOD)], 2
    else:
        paths, workers = [path], 1

    def read():
        with pytest.raises(ValueError, match=r"template of looping takes more than 0.3 s at a conv.* of .*x.jsonl"):
            read_conversations(paths, tokenizer, 64, progress=False, workers=workers)

    if where == "in a thread":
        with ThreadPoolExecutor(1) as pool:
            pool.submit(read).result(30)
    else:
        read()
    for _ in range(20):  # nothing of it is left to hit what comes later
        time.sleep(0.02)
    good = chat_tokenizer(TEMPLATES["V3"])
    assert read_conversations([path], good, 64, progress=False)[1].used == 1 and not rendering.LIMIT.left
    with pytest.raises(ValueError, match="template of looping takes more .* at corpus:0"):
        conversations.answered(tokenizer, [("Q", "A")])


def start_impatient_worker(state):
    rendering.TEMPLATE_SECONDS = 0.3
    start_worker(state)


def test_a_template_that_explodes_is_skipped_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(rendering, "TEXT", 1000)
    path = write_lines(tmp_path / "x.jsonl", GOOD)
    with pytest.raises(ValueError, match="x.jsonl is usable: 1 x the chat template makes more than 1,000 characters"):
        read_conversations([path], chat_tokenizer("{% for i in range(9999) %}x{% endfor %}"), 64, progress=False)


JUNK = [None, True, -1, 3.5, 2**70, "", "\ud800", UNTHINK, [], [[]], {}, {"a": 1}, [None], "assistant", EOS]


def planted(rng, value):
    """The value with junk somewhere in it."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.1:
        return rng.choice(JUNK)
    key = rng.choice(list(value) if isinstance(value, dict) else range(len(value)))
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    made = {k: planted(rng, v) if k == key else v for k, v in pairs}
    return made if isinstance(value, dict) else list(made.values())


@pytest.mark.parametrize("name", TEMPLATES)
def test_nothing_that_a_line_holds_raises(name):
    rng, call = random.Random(name), {"function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"}
    chat = {"messages": [*turns("Q"), said, {"role": "tool", "content": "2"}, *R1_CHAT], "tools": [call]}
    records = [planted(rng, rng.choice([chat, GOOD, {"input_ids": [1, 2], "loss_mask": [0, 1]}])) for _ in range(150)]
    for reasoning in ("train", "mask"):
        made = Converter(chat_tokenizer(TEMPLATES[name]), reasoning).convert(json.dumps(records).encode(), is_list=True)
        assert made.read == 150 == len(set(made.records.tolist())) + sum(n for n, _ in made.skipped.values())
        assert all(mask[1:].any() for mask in np.split(made.loss_mask, made.lengths.cumsum()[:-1]) if len(mask))


def test_processes_and_the_size_of_pieces_change_nothing(tmp_path, monkeypatch):
    path, tokenizer = many_chats(tmp_path), chat_tokenizer(TEMPLATES["V3.1"])
    wanted, report = read_conversations([path], tokenizer, 99, progress=False)
    assert report.skipped["invalid JSON"] == 1 and report.notes[UNANSWERED] > 5
    for size, workers in ((1, None), (700, None), (1500, 2)):
        monkeypatch.setattr(conversations, "PIECE", size)
        assert len(list(conversations.cut_file(path))) > 3
        documents, again = read_conversations([path], tokenizer, 99, workers=workers, progress=False)
        assert same_documents(documents, wanted) and again == report


def test_the_cache_gives_what_it_was_made_from(tmp_path, monkeypatch):
    path, tokenizer, cache = many_chats(tmp_path), chat_tokenizer(TEMPLATES["V3.1"]), tmp_path / "cache" / "deep"
    monkeypatch.setattr(conversations, "PIECE", 2000)
    calls, convert = [], templates.Converter.convert
    monkeypatch.setattr(templates.Converter, "convert", lambda *args: calls.append(1) or convert(*args))

    def made(tokenizer=tokenizer, row_tokens=99, **options):
        calls.clear()
        result = read_conversations([path], tokenizer, row_tokens, cache=cache, progress=False, **options)
        return *result, len(calls)

    wanted, report, pieces = made()
    files = sorted(cache.iterdir())
    assert pieces == len(files) > 2 and {f.suffix for f in files} == {".npz"}
    documents, again, n = made()
    assert n == 0 and same_documents(documents, wanted) and again == report
    for damage in (lambda b: b[:-1], lambda b: b[: len(b) // 2], lambda b: b"", lambda b: os.urandom(len(b))):
        files[0].write_bytes(damage(files[0].read_bytes()))
        documents, again, n = made()
        assert n == 1 and same_documents(documents, wanted) and again == report
    blob = bytearray(files[0].read_bytes())
    blob[300] ^= 1  # one bit of the tokens
    files[0].write_bytes(blob)
    documents, _, n = made()
    assert n == 1 and same_documents(documents, wanted)
    assert made(row_tokens=40)[2] == 0  # rows are cut behind the cache
    assert made(reasoning="mask")[2] == pieces  # everything else that decides is in the key
    assert made(chat_tokenizer("{# #}" + TEMPLATES["V3.1"]))[2] == pieces
    other = chat_tokenizer(TEMPLATES["V3.1"])
    other.add_tokens(["xxx"])
    assert made(other)[2] == pieces
    with path.open("a") as file:
        file.write(json.dumps(GOOD) + "\n")
    assert made()[2] == 1  # only the piece that grew


def test_what_is_skipped_is_named_by_file_and_line(tmp_path):
    bad = [GOOD, "broken", *[{"input_ids": [1, 2], "loss_mask": [0, 2]}] * 5, GOOD]
    mask = "a loss_mask of other numbers than 0 and 1"
    for cache in (None, tmp_path / "cache", tmp_path / "cache"):
        path = write_lines(tmp_path / "bad.jsonl", *bad)
        documents, report = read_conversations([path], chat_tokenizer(FAILS), 64, cache=cache, progress=False)
        assert len(documents) == 2 and report.skipped == {"invalid JSON": 1, mask: 5}
        said = "\n".join(report.lines())
        assert f"skipped 1: invalid JSON ({path}:2)" in said
        assert f"skipped 5: {mask} ({path}:3, {path}:4, {path}:5, ...)" in said
    with pytest.raises(ValueError, match=re.escape(f"1 x invalid JSON ({path}:1)")):
        read_conversations([write_lines(path, "broken")], chat_tokenizer(FAILS), 64, progress=False)
