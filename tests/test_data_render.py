"""Claims about conversations that an engine renders: the documents of a local template, where the engine has the same
one, and the engine's own token ids where its rendering is code.

The engines are made here, over HTTP as vLLM's: one renders by a tokenizer's template, arguments of tools parsed, one
encodes what users write without special tokens, one is code that knows no generation prompt.
"""

import json
import random
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

import train
from data import server
from data.conversations import answered, read_conversations
from data.engine import UNRENDERED, Engine
from data.rendering import SPANS
from data.templates import Converter
from data.turns import CLOSED_WITHIN, DROPPED
from states.read import open_captured
from target.ends import load_ends
from tests.helpers import BOS, EOS, GOOD, TEMPLATES, command, error_line, log, same_documents, turns, wrap, write_lines
from tests.test_data_chats import FAMILIES, call, marked, tokenizer_of
from tests.test_data_conversations import FAILS, R1_CHAT, Slow, planted

REFUSES, FAILS_ONCE = "refuse this", "fail once"


class Fake:
    """A server whose `encode(messages, tools, prompt, **arguments)` makes ids; counts what it was asked."""

    def __init__(self):
        self.encode, self.model, self.asked, self.status, self.answer = None, "m", [], 200, None
        self.failed = set()

    def reply(self, path: str, body: dict | None) -> tuple[int, bytes]:
        self.asked.append(path)
        if self.status != 200 or self.answer is not None:
            return self.status, self.answer or b"no"
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": self.model}]}).encode()
        assert path == "/tokenize" and body["model"] == self.model
        text = json.dumps(body)
        if FAILS_ONCE in text and text not in self.failed:
            self.failed.add(text)
            return 503, b"{}"
        for message in body["messages"]:
            for one in message.get("tool_calls") or []:
                assert one["id"] and one["type"] == "function" and isinstance(one["function"]["arguments"], str)
                one["function"]["arguments"] = json.loads(one["function"]["arguments"])
        try:
            how = (body["messages"], body.get("tools"), body["add_generation_prompt"])
            if REFUSES in text:
                raise ValueError(f"no\n such thing `{text}`")
            return 200, json.dumps({"tokens": self.encode(*how, **(body.get("chat_template_kwargs") or {}))}).encode()
        except Exception as error:
            return 400, json.dumps({"error": {"message": str(error), "code": 400}}).encode()


@pytest.fixture(scope="module")
def running():
    made = Fake()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, text = made.reply(self.path, json.loads(body) if body else None)
            if status is None:
                return self.connection.close()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size, daemon_threads = 256, True

        def handle_error(self, *args):
            pass

    with Server(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        made.url = f"http://127.0.0.1:{http.server_port}"
        yield made
        http.shutdown()


@pytest.fixture
def fake(running, monkeypatch):
    url = running.url
    running.__init__()
    running.url = url
    monkeypatch.setattr(server, "WAITS", (0.01,))
    return running


def by_template(tokenizer):
    """As an engine with this template renders."""

    def encode(messages, tools, prompt, **arguments):
        how = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
        text = tokenizer.apply_chat_template(messages, **how, **arguments)
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def both(fake, tokenizer, records, reasoning="train", arguments=None):
    """What a local template makes of records, and what the engine that has it does."""
    fake.encode, blob = by_template(tokenizer), json.dumps(records).encode()
    engine = Engine(fake.url, tokenizer)
    return [Converter(tokenizer, reasoning, arguments, x).convert(blob, is_list=True) for x in (None, engine)]


def assert_equal(one, other):
    for a, b in zip(one, other, strict=True):
        assert np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b


# -------------------------------------------------------------------------------- an engine with the template itself


def chats(thinks: bool, calls: bool) -> list[dict]:
    """One to three turns in all forms, with all that a record can say."""
    several = [
        turns(*("Q é", "A.", "P\n", "B\n\nb", "What?", "C日本")[: 2 * n], system=s) for n, s in ((1, None), (3, "Be."))
    ]
    if thinks:
        for chat in (turns("Q", "A", "P", "B"), turns("Q", " A ", "P", "B\n")):
            chat[1]["reasoning_content"], chat[3]["reasoning"] = "hm", "\nso 日本\n"
            inline = turns("Q", "<think>\nhm\n</think>\n\nA", "P", "<think>so</think>B")
            several += [chat, inline]
    several += [turns("Q", "A", "P", "B", "R"), turns("Q", " "), turns("A<|im_end|>B<think>", f"so <|User|> {EOS} it")]
    if calls:
        first = {"role": "assistant", "content": None, "tool_calls": [call({"k": "é"}), call("{}", "far")]}
        first |= {"reasoning_content": "hm"} if thinks else {}
        several.append(
            [*turns("Q"), first, {"role": "tool", "content": "Oslo", "tool_call_id": "n0"}, *turns("", "A")[1:]]
        )
    cut = [[*chat[:-1], chat[-1] | {"finish_reason": "length"}] for chat in several]
    cut.append([*turns("Q"), {"role": "assistant", "content": "", "reasoning": "hm 日", "finish_reason": "length"}])
    records = [{"messages": chat} for chat in several + cut]
    records.append({"messages": [m | {"weight": int(i == 3)} for i, m in enumerate(turns("Q", "A", "P", "B"))]})
    return [*records, {"prompt": "Q", "completion": "A"}, GOOD | {"chat_template_kwargs": {"thinking": True}}, {"x": 1}]


TAKES_OBJECTS = ("K2", "K2 Thinking", "K2.5", "Moonlight", "K3", "GLM")


@pytest.mark.parametrize("reasoning", ["train", "mask"])
@pytest.mark.parametrize("name", FAMILIES)
def test_an_engine_with_the_template_gives_the_documents_of_the_template(fake, name, reasoning):
    family = FAMILIES[name]
    records = chats(bool(family.think), name in TAKES_OBJECTS)
    one, other = both(fake, tokenizer_of(family.template), records, reasoning, family.arguments)
    assert_equal(one, other)
    assert one.loss_mask.any() and len(one.lengths) > 5


@pytest.mark.parametrize("reasoning", ["train", "mask"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_so_it_is_with_the_plain_templates(fake, name, reasoning):
    thinks = name.startswith(("R1", "K2 thinking"))
    assert_equal(*both(fake, tokenizer_of(TEMPLATES[name]), chats(thinks, False), reasoning))


def merging_tokenizer(template):
    """Words, blanks and line ends are joined to longer tokens, across the borders of what templates write."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    text = ["user\nThe cat assistant\nThe cat\nThe mat\n\nThe 日本 cat</think>The mat user\n日本 assistant\n日本\n"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return wrap(tokenizer, template)


SPANNING = ["The cat", "\nThe cat", "日本", "日", "\n\nThe mat\n", " cat", "The mat "]


@pytest.mark.parametrize("name", ["ChatML untrimmed", "no end", "V3"])
def test_tokens_that_span_a_border_are_seen(fake, name):
    tokenizer = merging_tokenizer(TEMPLATES[name])
    records = [{"messages": turns(a, b, system="Be.")} for a in SPANNING for b in SPANNING]
    one, other = both(fake, tokenizer, records)
    assert_equal(one, other)
    slow = Converter(Slow(tokenizer), "train", None, Engine(fake.url, Slow(tokenizer)))
    assert_equal(one, slow.convert(json.dumps(records).encode(), is_list=True))
    assert len(one.lengths) > 7 and bool(one.skipped) == (name == "ChatML untrimmed")
    _, made = both(fake, tokenizer, [{"messages": turns("Q", "The cat", "P", "\nThe cat")}])
    assert len(made.lengths) == 1  # each turn by itself: the engine's prompt of the second is no worse for the first
    assert made.notes == ({f"turns left out: {SPANS}": 1} if name == "ChatML untrimmed" else {})


def test_reasoning_that_the_engine_does_not_render_is_encoded_behind_its_prompt(fake):
    """As the target says it, which goes on behind the tokens of the prompt."""
    tokenizer = merging_tokenizer(TEMPLATES["R1"])
    encode = tokenizer.backend_tokenizer.encode
    for r in SPANNING:
        for a in SPANNING:
            _, made = both(fake, tokenizer, [{"messages": turns("Q", f"<think>\n{r}</think>\n\n{a}")}])
            prompt = fake.encode(turns("Q"), None, True)
            said = encode(f"{r}</think>\n\n{a}{EOS}", add_special_tokens=False).ids
            assert made.tokens.tolist() == prompt + said and made.loss_mask.sum() == len(said)
    for r, a in (("a <|User|> b", "A"), ("hm", "\nA <|User|>")):
        _, made = both(fake, tokenizer, [{"messages": turns("Q", f"<think>\n{r}</think>{a}")}])
        assert [*made.skipped] == [UNRENDERED] * (r != "hm")  # an answer is rendered


@pytest.mark.parametrize("name", ["K2 thinking", "R1", "ChatML"])
def test_nothing_that_a_line_holds_raises(fake, name):
    rng, one = random.Random(name), {"function": {"name": "f", "arguments": "{}"}}
    said = {"role": "assistant", "content": None, "tool_calls": [one], "reasoning_content": "hm"}
    chat = {"messages": [*turns("Q"), said, {"role": "tool", "content": "2"}, *R1_CHAT], "tools": [one]}
    records = [planted(rng, rng.choice([chat, GOOD, {"input_ids": [1, 2], "loss_mask": [0, 1]}])) for _ in range(150)]
    _, made = both(fake, tokenizer_of(TEMPLATES[name]), records, "mask")
    assert made.read == 150 == len(set(made.records.tolist())) + sum(n for n, _ in made.skipped.values())


# -------------------------------------------------------------------------------------- engines whose rendering is code


def segments(tokenizer, *parts: str) -> list[int]:
    """Ids of texts in turns: what the engine writes itself, with special tokens, and what others write, as bytes."""
    special = tokenizer.backend_tokenizer.encode
    ids = [list(x.encode()) if i % 2 else special(x, add_special_tokens=False).ids for i, x in enumerate(parts)]
    return [token for some in ids for token in some]


def without_specials(tokenizer):
    """Kimi K3's grammar; what anyone writes holds no special token."""

    def encode(messages, tools, prompt):
        ids, last = [], max(i for i, m in enumerate(messages) if m["role"] == "user")
        for i, m in enumerate(messages):
            if m["role"] == "assistant":
                thoughts = m.get("reasoning", "") if i > last else ""
                ids += segments(tokenizer, K3_HEAD, thoughts, K3_BETWEEN, m["content"], K3_TAIL)
            else:
                ids += segments(tokenizer, f"<|open|>message {m['role']}<|sep|>", m["content"], K3_CLOSE)
        return ids + (segments(tokenizer, K3_HEAD) if prompt else [])

    return encode


K3_HEAD = "<|open|>message assistant<|sep|><|open|>think<|sep|>"
K3_BETWEEN = "<|close|>think<|sep|><|open|>response<|sep|>"
K3_CLOSE = "<|close|>message<|sep|><|end_of_msg|>"
K3_TAIL = "<|close|>response<|sep|>" + K3_CLOSE


@pytest.mark.parametrize("reasoning", ["train", "mask"])
def test_text_of_special_tokens_is_what_the_engine_makes_of_it(fake, reasoning):
    tokenizer = tokenizer_of(FAMILIES["K3"].template)
    fake.encode = without_specials(tokenizer)
    q, r, a = (
        "Say <|end_of_msg|> or <think>",
        "a <|im_end|> tag",
        "<think> it <|close|>think<|sep|> is 日本<|end_of_msg|>",
    )
    chat = turns(q, a, "P", "B")
    chat[1]["reasoning_content"], chat[3]["reasoning"] = r, "so"
    records = json.dumps([{"messages": chat}]).encode()
    made = Converter(tokenizer, reasoning, None, Engine(fake.url, tokenizer)).convert(records, is_list=True)
    user = ["<|open|>message user<|sep|>", q, K3_CLOSE + K3_HEAD]
    wanted = [segments(tokenizer, *user, r, K3_BETWEEN, a, K3_TAIL)]
    more = ["P", K3_CLOSE + K3_HEAD, "so", K3_BETWEEN, "B", K3_TAIL]
    history = [*user, "", K3_BETWEEN, a, K3_TAIL + "<|open|>message user<|sep|>"]
    wanted.append(segments(tokenizer, *history, *more))
    assert [x.tolist() for x in np.split(made.tokens, made.lengths.cumsum()[:-1])] == wanted
    begins = [len(segments(tokenizer, *user)), len(segments(tokenizer, *history, *more[:2]))]
    if reasoning == "mask":
        begins = [begin + len(text) + len("think") + 2 for begin, text in zip(begins, (r, "so"), strict=True)]
    masks = [[i >= begin for i in range(len(ids))] for begin, ids in zip(begins, wanted, strict=True)]
    assert made.loss_mask.tolist() == sum(masks, []) and not made.skipped
    local = Converter(tokenizer, reasoning).convert(records, is_list=True)
    assert local.tokens.tolist() != made.tokens.tolist()


def knows_no_prompt(tokenizer):
    """DeepSeek V3.2's code: a user's turn brings the next one's header, whatever a request says of prompts."""

    def encode(messages, tools, prompt, thinking=False):
        text, last = BOS, max(i for i, m in enumerate(messages) if m["role"] == "user")
        for i, m in enumerate(messages):
            header = "<think>" if thinking and i >= last else "</think>"
            if m["role"] == "user":
                text += f"<|User|>{m['content']}<|Assistant|>{header}"
            elif m["role"] == "tool":
                text += f"<result>{m['content']}</result>\n\n{header}"
            else:
                if thinking and i > last:
                    text += m["reasoning"] + "</think>"
                called = "".join(
                    f"\n\n<|calls|>{json.dumps(c['function'], ensure_ascii=False)}" for c in m.get("tool_calls") or []
                )
                text += m["content"] + called + EOS
        return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids

    return encode


def test_a_rendering_without_generation_prompts_is_understood(fake):
    tokenizer = tokenizer_of(None)
    fake.encode = knows_no_prompt(tokenizer)

    def made(messages, reasoning="train", **arguments):
        converter = Converter(tokenizer, reasoning, arguments, Engine(fake.url, tokenizer))
        done = converter.convert(json.dumps([{"messages": messages}]).encode(), is_list=True)
        return marked(tokenizer, done), done.notes, [*done.skipped]

    chat = turns("Q", "<think>hm</think>A", "P", "<think>so</think>B")
    ask, then = f"{BOS}<|User|>Q<|Assistant|>", f"</think>A{EOS}<|User|>P<|Assistant|><think>"
    assert made(chat) == ([f"{ask}</think>[A{EOS}]<|User|>P<|Assistant|></think>[B{EOS}]"], {DROPPED: 2}, [])
    for reasoning, parts in (("train", ("[", "")), ("mask", ("", "["))):
        wanted = [ask + "<think>{}hm</think>{}A", ask + then + "{}so</think>{}B"]
        found, notes, skipped = made(chat, reasoning, thinking=True)
        assert found == [text.format(*parts) + EOS + "]" for text in wanted] and not skipped and len(notes) == 1
    said = {"role": "assistant", "content": "", "reasoning": "hm", "tool_calls": [call('{"k": 2}')]}
    agent = [
        *turns("Q"),
        said,
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "B", "reasoning": "so"},
    ]
    called = f"""\n\n<|calls|>{json.dumps({"name": "near", "arguments": {"k": 2}})}{EOS}"""
    result = "<result>2</result>\n\n<think>"
    text = f"{ask}<think>[hm</think>{called}]{result}[so</think>B{EOS}]"
    assert made(agent, thinking=True) == ([text], {}, [])
    said["tool_calls"] = [call("[2]")]
    assert made(agent[:2], thinking=True)[2] == ["tool calls whose arguments are no JSON object"]
    chat[1]["content"], chat[1]["reasoning_content"] = "A", "a </think> b"
    assert made(chat[:2], thinking=True)[2] == [CLOSED_WITHIN]


def test_an_engine_parses_the_arguments_of_tools_itself(fake):
    """So they are written as it writes objects, and what it would take for none at all is not learned."""
    tokenizer = tokenizer_of(TEMPLATES["K2"])
    for arguments, said in (('{"k": "é"}', "[<|call|>near{'k': 'é'}<|im_end|>]"), ("", "[<|call|>near{}<|im_end|>]")):
        chat = [*turns("Q"), {"role": "assistant", "content": None, "tool_calls": [call(arguments)]}]
        _, made = both(fake, tokenizer, [{"messages": chat}])
        assert marked(tokenizer, made)[0].endswith(said)
    for arguments in ("[2]", "near"):
        chat[1]["tool_calls"] = [call(arguments)]
        assert not both(fake, tokenizer, [{"messages": chat}])[1].lengths.size


# ------------------------------------------------------------------------------------------------- servers that fail


def read(fake, tokenizer, path, **options):
    return read_conversations([path], tokenizer, 99, progress=False, engine=Engine(fake.url, tokenizer), **options)


def test_what_the_engine_refuses_is_skipped_by_its_reason_and_a_failure_is_asked_again(tmp_path, fake):
    tokenizer = tokenizer_of(FAILS)
    fake.encode = by_template(tokenizer)
    bad = [{"messages": turns(x, "A")} for x in (REFUSES, f"again, {REFUSES}", "boom", "\ud800")]
    path = write_lines(tmp_path / "x.jsonl", GOOD, *bad, {"messages": turns(FAILS_ONCE, "A")}, GOOD, "broken")
    documents, report = read(fake, tokenizer, path)
    reasons = ["the engine refuses it (no such thing)", "the engine refuses it (no boom)"]
    assert report.skipped == dict.fromkeys([*reasons, "text that is not Unicode", "invalid JSON"], 1) | {reasons[0]: 2}
    assert [d.source.rpartition(":")[2] for d in documents] == ["1", "6", "7"] and fake.failed
    assert same_documents(documents[:1], read_conversations([path], tokenizer, 99, progress=False)[0][:1])


NONSENSE = [b"<html>", b"{}", b'{"tokens": 3}', b'{"tokens": ["a"]}', b'{"tokens": [true]}', b"[1]", b""]


@pytest.mark.parametrize("status, answer", [(404, None), (500, None), (None, None), *((200, x) for x in NONSENSE)])
def test_a_server_that_fails_is_one_line_that_names_it(tmp_path, fake, status, answer):
    tokenizer = tokenizer_of(TEMPLATES["V3"])
    engine = Engine(fake.url, tokenizer)
    engine.model = "m"  # asked before
    fake.status, fake.answer = status, answer
    path = write_lines(tmp_path / "x.jsonl", GOOD, GOOD)
    with pytest.raises(ValueError, match=f"^{fake.url}/tokenize does not answer as vLLM does .*") as stopped:
        read_conversations([path], tokenizer, 99, progress=False, engine=engine)
    assert "\n" not in str(stopped.value) and str(status if answer is None and status else "") in str(stopped.value)


def test_a_server_of_another_target_is_refused(tmp_path, fake):
    tokenizer, path = tokenizer_of(TEMPLATES["V3"]), write_lines(tmp_path / "x.jsonl", GOOD)
    own = by_template(tokenizer)
    for encode in (
        lambda messages, *args: [*own(messages, *args), 9999][: 99 if "Q" in str(messages) else -1],
        lambda *args: [70],
    ):
        fake.encode = encode
        with pytest.raises(ValueError, match=f"{fake.url} renders .*; a server of the target of --model is wanted"):
            read(fake, tokenizer, path)
        with pytest.raises(ValueError, match=f"{fake.url} renders .*; a server of the target of --model is wanted"):
            answered(tokenizer, [("Q", "A")], engine=Engine(fake.url, tokenizer))


def test_a_second_start_asks_for_nothing_and_another_rendering_is_another_cache(tmp_path, fake):
    tokenizer = tokenizer_of(TEMPLATES["V3.1"])
    fake.encode, cache = by_template(tokenizer), tmp_path / "cache"
    path = write_lines(tmp_path / "x.jsonl", *({"messages": turns(f"Q{i}", "A", "P", "B")} for i in range(20)))

    def made(**options):
        fake.asked.clear()
        return *read(fake, tokenizer, path, cache=cache, **options), len(fake.asked)

    wanted, report, asked = made()
    assert asked > 20 * 2 * 2 and same_documents(
        wanted, read_conversations([path], tokenizer, 99, progress=False, cache=cache)[0]
    )
    documents, again, asked = made()
    assert same_documents(documents, wanted) and again == report and asked == 2  # what is served
    fake.status = None
    assert same_documents(made()[0], wanted)  # a run resumes without the server,
    write_lines(tmp_path / "y.jsonl", GOOD)
    with pytest.raises(ValueError, match=f"{fake.url}/v1/models does not answer as vLLM does"):  # but nothing else
        read(fake, tokenizer, tmp_path / "y.jsonl", cache=cache)
    with pytest.raises(ValueError, match=f"{fake.url}/v1/models does not answer as vLLM does"):
        made(template_args={"thinking": True})
    fake.status, fake.model = 200, "n"
    assert made()[2] > 20 * 2 * 2
    fake.encode = by_template(tokenizer_of(TEMPLATES["V3"]))
    assert made()[2] > 20 * 2 * 2 and not same_documents(made()[0], wanted) and made()[2] == 2


# -------------------------------------------------------------------------------------------------------- train.py


def test_a_run_takes_its_tokens_from_a_server_where_the_target_brings_no_template(tmp_path, fake, tiny_targets, capsys):
    """Dry, sent, captured and trained on, and resumed when the server is gone."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_targets["deepseek-v3"])
    model = shutil.copytree(tiny_targets["deepseek-v3"], tmp_path / "model")
    (model / "chat_template.jinja").unlink()
    path = write_lines(tmp_path / "x.jsonl", *({"messages": turns(f"Q{i}", "An answer.")} for i in range(30)))
    fake.encode, wanted = by_template(tokenizer), read_conversations([path], tokenizer, 256, progress=False)[0]
    argv = ["--target", "deepseek-v3", "--model", model, "--data", path]
    with pytest.raises(ValueError, match="brings no chat template .*--render URL"):
        train.main(command(tmp_path, "dry", *argv, "--dry-run"))
    argv += ["--render", fake.url + "/"]
    train.main(command(tmp_path, "dry", *argv, "--dry-run"))
    assert "30 of 30 conversations" in capsys.readouterr().out and fake.asked
    train.main(command(tmp_path, "captured", *argv, "--capture", tmp_path / "captured"))
    assert len(open_captured(tmp_path / "captured", load_ends(model)).documents) == len(wanted) == 30
    with pytest.raises(ValueError, match="v1/completions does not answer"):
        train.main(command(tmp_path, "sent", *argv, "--send", fake.url, tmp_path / "sent"))
    sent = [json.loads(line)["input_ids"] for line in (tmp_path / "sent/index.jsonl").read_text().splitlines()]
    assert sent == [d.tokens.tolist() for d in wanted]
    train.main(command(tmp_path, "run", *argv, "--steps", 1, "--decode-prompts", 0))
    shutil.rmtree(tmp_path / "run/draft")
    fake.status = 500
    with pytest.raises(ValueError, match="v1/models does not answer as vLLM does .*500"):
        train.main(command(tmp_path, "run", "--resume", "--steps", 2))
    fake.status = None
    train.main(["--runs", str(tmp_path), "--name", "run", "--resume", "--steps", "2"])
    assert [line["step"] for line in log(tmp_path, "run")] == [1, 2]


def test_settings_that_render_nothing_are_one_line(tmp_path, capsys):
    (tmp_path / "t.jinja").write_text("x")
    both = ["--render", "http://localhost:1", "--chat-template", tmp_path / "t.jinja"]
    assert "--chat-template says how to render here, --render has a server do it by its own" in error_line(both, capsys)
    assert "--render 'localhost:1' is no address of a running server" in error_line(["--render", "localhost:1"], capsys)
