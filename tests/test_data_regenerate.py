"""Claims about asking a server for conversations anew: what it is asked, what is kept, and what stops it."""

import fcntl
import json
import os
import random
import resource
import signal
import threading
import time
from types import SimpleNamespace

import pytest

import train
from data import conversations, server
from data import regenerate as module
from data.regenerate import each_at_once, regenerate, results_for
from tests.fake_server import Fake, completion
from tests.helpers import EOS, FORK, TEMPLATES, chat_tokenizer, complaint, finish, read_chats, start, turns, write_lines
from tests.test_data_conversations import planted

# ----------------------------------------------------------------------------------------------------- a server of ours


def echo(body):
    """An answer that its messages alone decide: how many they are, and the last one's text."""
    messages = body["messages"]
    return {"content": f"{len(messages)}:{messages[-1]['content']}"}


@pytest.fixture
def serve():
    running = []

    def make(say=echo):
        running.append(Fake(say))
        return running[-1]

    yield make
    for fake in running:
        fake.http.shutdown()
        fake.http.server_close()


@pytest.fixture(autouse=True)
def no_waits(monkeypatch):
    monkeypatch.setattr(server, "WAITS", (0,) * len(server.WAITS))


HOW = {"at_once": 8, "temperature": None, "top_p": None, "max_new_tokens": None, "drop_cut": False, "timeout": 20.0}


def run(fake, tmp_path, *records, model=None, template_args=None, **how):
    """What is written, by source, and the report."""
    data = write_lines(tmp_path / "chats.jsonl", *records)
    report = regenerate(fake.url, tmp_path / "out.jsonl", [data], SimpleNamespace(**HOW | how), model, template_args)
    return lines(tmp_path), "\n".join(report)


def lines(tmp_path, name="out.jsonl"):
    rows = [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
    found = {int(row["source"].rpartition(":")[2]): row for row in rows}
    assert len(found) == len(rows), "a line twice"
    return found


def chat(*contents, **beside):
    return {"messages": turns(*contents), **beside}


# ---------------------------------------------------------------------------------------------------- what it is asked


def test_every_answer_is_asked_for_in_order_behind_those_before_it(tmp_path, serve):
    fake = serve()
    found, report = run(fake, tmp_path, {"messages": turns("Q", "old", "R", "older", "S", "oldest", system="Be.")})
    assert [m["content"] for m in found[1]["messages"]] == ["Be.", "Q", "2:Q", "R", "4:R", "S", "6:S"]
    assert [path for path, _ in fake.asked] == ["/v1/chat/completions"] * 3
    assert [[m["content"] for m in body["messages"]] for body in fake.bodies()] == [
        ["Be.", "Q"],
        ["Be.", "Q", "2:Q", "R"],
        ["Be.", "Q", "2:Q", "R", "4:R", "S"],
    ]
    assert all(body == {"model": "tiny", "messages": body["messages"]} for body in fake.bodies())  # nothing unasked
    assert "1 of 1 conversations answered, now 21 tokens" in report


def shared(*contents):
    return [{"from": x, "value": y} for x, y in zip(("human", "gpt") * 2, contents, strict=False)]


OLD, KEPT = {"role": "assistant", "content": "old"}, {"role": "assistant", "content": "kept", "weight": 0}
FORMS = {
    "messages": chat("Q", "old", "R", "old"),
    "ShareGPT": {"conversations": shared("Q", "old", "R", "old")},
    "prompt and completion": {"prompt": "Q", "completion": "old"},
    "messages of both": {"prompt": turns("P", "kept", "Q"), "completion": [OLD]},
    "a user's turn last": chat("Q", "old", "R"),
    "a prompt alone": chat("Q"),
    "weight 0": {"messages": [*turns("P"), KEPT, *turns("Q", "old")]},
    "a greeting": {"messages": [{"role": "assistant", "content": "Hi"}, *turns("Q", "old")]},
    "a system column": {"conversations": shared("Q", "old"), "system": "S"},
}
WANTED = {
    "messages": ["Q", "1:Q", "R", "3:R"],
    "ShareGPT": ["Q", "1:Q", "R", "3:R"],
    "prompt and completion": ["Q", "1:Q"],
    "messages of both": ["P", "kept", "Q", "3:Q"],
    "a user's turn last": ["Q", "1:Q", "R", "3:R"],
    "a prompt alone": ["Q", "1:Q"],
    "weight 0": ["P", "kept", "Q", "3:Q"],
    "a greeting": ["Hi", "Q", "2:Q"],
    "a system column": ["S", "Q", "2:Q"],
}


def test_every_form_that_data_reads_is_answered_and_the_result_is_one(tmp_path, serve):
    found, _ = run(serve(), tmp_path, *FORMS.values())
    assert {k: [m["content"] for m in found[n]["messages"]] for n, k in enumerate(FORMS, 1)} == WANTED
    tokenizer = chat_tokenizer(TEMPLATES["V3"])
    documents, report = read_chats(tmp_path, tokenizer, *(json.dumps(found[n]) for n in sorted(found)))
    assert report.used == len(FORMS) and not report.skipped
    learned = [tokenizer.decode(d.tokens[d.loss_mask]) for d in documents]
    wanted = {k: [x for x in some if ":" in x] for k, some in WANTED.items()}  # kept turns are not learned
    assert learned == ["".join(f"{x}{EOS}" for x in some) for some in wanted.values()]


def test_what_no_turn_can_be_asked_of_is_counted_by_reason(tmp_path, serve):
    ids = {"input_ids": [1, 2], "loss_mask": [0, 1]}
    said = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A", "weight": 0}]
    odd = '{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "A"}]}'
    found, report = run(serve(), tmp_path, chat("Q", "old"), ids, "broken", {"messages": said}, {"text": "x"}, odd)
    assert list(found) == [1]
    for reason in ("token ids", "invalid JSON", "no turn to ask for", "neither messages", "not Unicode"):
        assert report.count(reason) == 1
    assert "chats.jsonl:2" in report and not (tmp_path / "out.jsonl.left-out").exists()


def test_lists_and_blank_lines_keep_their_numbers_however_they_are_read(tmp_path, serve, monkeypatch):
    monkeypatch.setattr(conversations, "PIECE", 10)  # bytes
    (tmp_path / "list.json").write_text(json.dumps([chat("A", "x"), chat("B", "x")]))
    (tmp_path / "blank.jsonl").write_text(f"\n{json.dumps(chat('C', 'x'))}\n\n{json.dumps(chat('D', 'x'))}")
    files = [tmp_path / "list.json", tmp_path / "blank.jsonl"]
    regenerate(serve().url, tmp_path / "made" / "out.jsonl", files, SimpleNamespace(**HOW))
    rows = [json.loads(line) for line in (tmp_path / "made" / "out.jsonl").read_text().splitlines()]
    said = {row["source"]: row["messages"][0]["content"] for row in rows}
    assert said == {f"{files[0]}:1": "A", f"{files[0]}:2": "B", f"{files[1]}:2": "C", f"{files[1]}:4": "D"}


def test_options_and_template_arguments_reach_the_server_and_nothing_else_does(tmp_path, serve):
    fake, model = serve(), tmp_path / "model"
    model.mkdir()
    records = [chat("Q", "old", chat_template_kwargs={"thinking": True}, id=3), chat("R", "old", id="x")]
    found, _ = run(fake, tmp_path, *records, template_args={"thinking": False}, temperature=0.5, max_new_tokens=9)
    by = {body["messages"][0]["content"]: body for body in fake.bodies()}
    assert by["Q"].pop("chat_template_kwargs") == {"thinking": True} == found[1]["chat_template_kwargs"]
    assert by["R"].pop("chat_template_kwargs") == {"thinking": False} == found[2]["chat_template_kwargs"]
    assert all(by[x] == {"model": "tiny", "temperature": 0.5, "max_tokens": 9, "messages": turns(x)} for x in "QR")
    (model / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.95, "eos_token_id": 1}')
    asked = module.sampling(SimpleNamespace(**HOW | {"top_p": 0.9}), model)
    assert asked == {"temperature": 0.6, "top_p": 0.9}
    (model / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match="generation_config.json cannot be used"):
        module.sampling(SimpleNamespace(**HOW), model)
    with pytest.raises(ValueError, match="it is no directory"):
        module.sampling(SimpleNamespace(**HOW), tmp_path / "nowhere")


def test_many_are_asked_at_once_but_no_more_than_said(tmp_path, serve):
    def say(body):
        time.sleep(0.02)
        return echo(body)

    fake = serve(say)
    found, _ = run(fake, tmp_path, *(chat(f"Q{i}", "old", "R", "old") for i in range(30)), at_once=5)
    assert fake.most == 5 and len(found) == 30 and len(fake.asked) == 60
    assert all(row["messages"][1]["content"] == f"1:Q{n - 1}" for n, row in found.items())


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_kept_under_one_name_and_sent_under_both(tmp_path, serve, name):
    fake = serve(lambda body: {name: f"hm {len(body['messages'])}", "content": "A"})
    found, _ = run(fake, tmp_path, chat("Q", "<think>old</think>old", "R", "old"))
    said = [m for m in found[1]["messages"] if m["role"] == "assistant"]
    assert said == [{"role": "assistant", "content": "A", "reasoning_content": f"hm {n}"} for n in (1, 3)]
    asked = fake.bodies()[1]["messages"][1]
    assert asked == {"role": "assistant", "content": "A", "reasoning_content": "hm 1", "reasoning": "hm 1"}


# --------------------------------------------------------------------------------------------------------------- tools


def call(name, i, **arguments):
    return {"id": i, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


def asks(*calls):
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def result(i, text):
    return {"role": "tool", "tool_call_id": i, "content": text}


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("get", "put")]


def with_calls(*calls):
    """Calls first, then text."""

    def say(body):
        if body["messages"][-1]["role"] == "user":
            return completion({"tool_calls": list(calls)}, "tool_calls" if calls else "stop")
        return echo(body)

    return say


def agent(*results):
    calls = asks(call("get", "a", x=1), call("put", "b"))
    return {"messages": [*turns("Q"), calls, *results, OLD], "tools": TOOLS}


def test_results_of_tools_follow_the_new_answers_calls_under_their_ids(tmp_path, serve):
    fake = serve(with_calls(call("put", "n1"), call("get", "n2", x=2)))
    found, report = run(fake, tmp_path, agent(result("a", "got"), result("b", "put it")))
    assert [body["tools"] for body in fake.bodies()] == [TOOLS] * 2 and found[1]["tools"] == TOOLS
    assert found[1]["messages"] == [
        *turns("Q"),
        asks(call("put", "n1"), call("get", "n2", x=2)),
        result("n2", "got"),
        result("n1", "put it"),
        {"role": "assistant", "content": "4:put it"},
    ]
    assert "ended early" not in report and "ended" not in found[1]


@pytest.mark.parametrize(
    "calls", [(), (call("get", "n"),), (call("get", "n"),) * 2, (call("get", "n"), call("no", "m"))]
)
def test_a_conversation_ends_where_the_data_has_no_results_for_its_calls(tmp_path, serve, calls):
    fake = serve(with_calls(*calls))
    found, report = run(fake, tmp_path, agent(result("a", "got"), result("b", "put it")))
    assert len(fake.asked) == 1 and [m["role"] for m in found[1]["messages"]] == ["user", "assistant"]
    assert found[1]["ended"] == module.OTHER_CALLS and "ended early 1: calls of tools" in report


def test_calls_that_end_the_data_or_meet_a_user_are_kept_and_end_it(tmp_path, serve):
    flat = [{"name": "get", "parameters": {"type": "object"}}]
    records = [chat("Q", "old", tools=json.dumps(flat)), chat("Q", "old", "R", "old", tools=TOOLS)]
    fake = serve(with_calls(call("get", "n")))
    found, report = run(fake, tmp_path, *records)
    assert [len(found[n]["messages"]) for n in (1, 2)] == [2, 2] and "ended" not in found[1]
    assert found[2]["ended"] == module.OTHER_CALLS and "ended early 1" in report
    assert found[1]["tools"] == TOOLS[:1]  # as engines take them


def test_results_are_told_by_id_then_by_name_then_by_place():
    answer, given = (
        asks(call("get", "n1"), call("get", "n2"), call("put", "n3")),
        asks(call("put", "a"), call("get", "b")),
    )
    found = results_for(
        answer, given, [result("b", "1"), {"role": "tool", "name": "get", "content": "2"}, result("a", "3")]
    )
    assert [(r["tool_call_id"], r["content"]) for r in found] == [("n1", "1"), ("n2", "2"), ("n3", "3")]
    unnamed = [{"role": "tool", "content": text} for text in "xy"]
    found = results_for(asks(call("get", "n1"), call("put", "n2")), given, unnamed)
    assert [(r["tool_call_id"], r["content"]) for r in found] == [("n2", "x"), ("n1", "y")]
    assert results_for(asks(call("get", "n1")), asks(), unnamed[:1]) is None  # whose it was cannot be known
    assert results_for(asks(), asks(), []) == []


# ------------------------------------------------------------------------------------------------------- cut by length


def cut_at(n, text="half"):
    return lambda body: completion({"content": text}, "length") if len(body["messages"]) == n else echo(body)


def test_a_turn_cut_by_length_is_marked_and_ends_its_conversation(tmp_path, serve):
    fake = serve(cut_at(3, "half\ufffd"))
    found, report = run(fake, tmp_path, chat("Q", "old", "R", "old", "S", "old"))
    assert found[1]["messages"][1:] == [
        {"role": "assistant", "content": "1:Q"},
        {"role": "user", "content": "R"},
        {"role": "assistant", "content": "half", "finish_reason": "length"},
    ]
    assert len(fake.asked) == 2 and "ended early 1: cut by length (" in report


def test_a_cut_turn_can_be_dropped_and_is_where_it_may_hold_half_a_call_or_nothing(tmp_path, serve):
    found, report = run(serve(cut_at(3)), tmp_path, chat("Q", "old", "R", "old"), chat("Q", "old"), drop_cut=True)
    assert [m["content"] for m in found[1]["messages"]] == ["Q", "1:Q"] and "ended early 1: cut by length and" in report
    first, again = serve(cut_at(1)), chat("Q", "old")
    with pytest.raises(ValueError, match="none of 3 conversations was answered: .*left out") as stopped:
        run(first, tmp_path / "b", again, again, again, drop_cut=True) if (tmp_path / "b").mkdir() is None else 0
    assert "left out 3: cut by length and dropped" in str(stopped.value) and "\n" not in str(stopped.value)
    (tmp_path / "c").mkdir()
    _, report = run(
        serve(cut_at(1)), tmp_path / "c", chat("Q", "old", tools=TOOLS), {"messages": turns("P", "x", system="S")}
    )
    assert "left out 1: cut by length, where it may have been calling a tool" in report
    (tmp_path / "d").mkdir()
    _, report = run(serve(cut_at(1, " ")), tmp_path / "d", chat("Q", "old"), {"messages": turns("P", "x", system="S")})
    assert "left out 1: cut to nothing" in report


# ---------------------------------------------------------------------------------------------------- servers that fail

CHATS = [chat(f"Q{i}", "old", f"R{i}", "old") for i in range(7)]
BUSY = (429, {"Retry-After": "0"}, b'{"error": {"message": "slow down"}}')
FAILURES = {
    "500": (500, {}, b'{"error": {"message": "broken"}}'),
    "503 without a word": (503, {}, b""),
    "429": BUSY,
    "a cut connection": None,
    "html": b"<html>soon</html>",
    "a list": b"[1]",
    "no choices": {"choices": []},
    "no message": {"choices": [{"finish_reason": "stop"}]},
    "a message of another type": {"choices": [{"message": ["A"]}]},
    "content of another type": completion({"content": 3}),
    "reasoning of another type": completion({"content": "A", "reasoning": {"a": 1}}),
    "calls without a name": completion({"tool_calls": [{"id": "a", "function": {}}]}),
    "calls of another type": completion({"tool_calls": "get"}),
    "an answer that was aborted": completion({"content": "half"}, "abort"),
    "a stall": "stall",
}


@pytest.mark.parametrize("what", FAILURES)
def test_what_fails_once_is_asked_again_and_nothing_is_lost_or_written_twice(tmp_path, serve, what):
    seen = set()

    def say(body):
        if (key := json.dumps(body)) in seen:
            return echo(body)
        seen.add(key)
        if FAILURES[what] == "stall":
            time.sleep(0.6)
            return echo(body)
        return FAILURES[what]

    found, report = run(serve(say), tmp_path, *CHATS, timeout=0.3 if what == "a stall" else 20.0)
    assert len(found) == 7 and "7 of 7 conversations answered, now 98 tokens" in report and "early" not in report
    for i, row in enumerate(CHATS):
        said = [m["content"] for m in found[i + 1]["messages"]]
        assert said == [f"Q{i}", f"1:Q{i}", f"R{i}", f"3:R{i}"] and row["messages"][0]["content"] == f"Q{i}"


def train_on(fake, tmp_path, *flags):
    data, out = tmp_path / "chats.jsonl", tmp_path / "out.jsonl"
    if not data.exists():
        write_lines(data, *CHATS)
    return ["--device", "cpu", "--regenerate", f"{fake.url}/v1/", str(out), "--data", str(data), *flags]


def test_a_server_that_goes_on_failing_is_named_in_one_line_and_what_is_answered_is_kept(tmp_path, serve, capsys):
    fake = serve(lambda body: FAILURES["500"] if "Q5" in json.dumps(body) else echo(body))
    argv = train_on(fake, tmp_path, "--at-once", "1")
    assert train.cli(argv) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert (
        "/v1/chat/completions does not answer as vLLM does (Status: 500, broken); " in error
        and "chats.jsonl:6" in error
    )
    assert "chats.jsonl:6; what was answered is kept" in error and list(lines(tmp_path)) == [1, 2, 3, 4, 5]
    fake.say, fake.asked[:] = echo, []
    assert train.cli(argv) == 0 and len(lines(tmp_path)) == 7
    assert {body["messages"][0]["content"] for body in fake.bodies()} == {"Q5", "Q6"}
    assert "7 of 7 conversations answered" in capsys.readouterr().out


@pytest.mark.parametrize("status", [401, 403, 404, 405])
def test_an_answer_about_the_server_and_not_the_conversation_stops_at_once(tmp_path, serve, status):
    fake = serve(lambda body: (status, {}, b'{"object": "error", "message": "no such model"}'))
    with pytest.raises(ValueError, match=f"Status: {status}, no such model.* .*chats.jsonl:1; what"):
        run(fake, tmp_path, *CHATS, at_once=1)
    assert len(fake.asked) == 1 and not (tmp_path / "out.jsonl.left-out").exists()


def too_long(n):
    text = f"This model's maximum context length is 1024 tokens. However, your prompt has {n}"
    return (400, {}, json.dumps({"error": {"message": text, "code": 400}}).encode())


def test_refused_conversations_are_counted_by_reason_named_and_not_asked_again(tmp_path, serve):
    def say(body):
        first, n = body["messages"][0]["content"], len(body["messages"])
        return too_long(1025 + n) if first in ("Q1", "Q2") or (first == "Q3" and n > 1) else echo(body)

    fake, left = serve(say), tmp_path / "out.jsonl.left-out"
    found, report = run(fake, tmp_path, *CHATS)
    reason = "the server refuses it (This model's maximum context length is N tokens. However, your prompt has N)"
    assert sorted(found) == [1, 4, 5, 6, 7] and [m["content"] for m in found[4]["messages"]] == ["Q3", "1:Q3"]
    assert found[4]["ended"] == reason and sorted(lines(tmp_path, left.name)) == [2, 3]
    assert f"left out 2: {reason} (" in report and f"ended early 1: {reason} ({tmp_path}/chats.jsonl:4)" in report
    assert f"remove {left} to ask for these again" in report
    fake.asked.clear()
    again = run(fake, tmp_path, *CHATS)[1]
    assert f"left out 2: {reason} (" in again and f"ended early 1: {reason} (" in again and not fake.asked
    left.unlink()
    fake.say = echo
    found, report = run(fake, tmp_path, *CHATS)
    assert len(fake.asked) == 4 and len(found) == 7 and "left out" not in report


def test_no_answer_at_all_is_one_line(tmp_path, serve):
    with pytest.raises(
        ValueError, match="none of 7 conversations was answered: *left out 7: the server refuses it"
    ) as said:
        run(serve(lambda body: too_long(2000)), tmp_path, *CHATS)
    assert "\n" not in str(said.value) and "remove " in str(said.value)


# -------------------------------------------------------------------------------------------- stopped, and gone on with


def test_a_run_stopped_at_any_byte_goes_on_to_the_same_set_of_lines(tmp_path, serve):
    fake, out = serve(), tmp_path / "out.jsonl"
    run(fake, tmp_path, *CHATS)
    whole = out.read_bytes()
    wanted, rng = set(whole.splitlines()), random.Random(0)
    for end in [0, 1, len(whole) - 1, len(whole), *rng.sample(range(len(whole)), 25)]:
        out.write_bytes(whole[:end])
        fake.asked.clear()
        found, report = run(fake, tmp_path, *CHATS)
        assert set(out.read_bytes().splitlines()) == wanted and len(found) == 7
        assert out.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, end) + 1])
        assert len(fake.asked) == 2 * (7 - whole[:end].count(b"\n")) and "7 of 7" in report


def waited_for(path, n):
    for _ in range(1000):
        if path.exists() and path.read_bytes().count(b"\n") >= n:
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} has not got {n} lines")


@pytest.mark.parametrize("signals", [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 130)])
def test_a_process_that_is_stopped_keeps_what_is_finished_and_says_how_to_go_on(tmp_path, serve, signals):
    stuck, (number, code) = threading.Event(), signals
    fake = serve(lambda body: (stuck.wait(30), echo(body))[1] if "Q5" in json.dumps(body) else echo(body))
    argv, output = train_on(fake, tmp_path), tmp_path / "output"
    process = start(argv, output)
    waited_for(tmp_path / "out.jsonl", 6)
    begin = time.monotonic()
    os.kill(process.pid, number)
    said = finish(process, output, code)
    assert time.monotonic() - begin < 5 and "Traceback" not in said  # it waits for no answer
    assert code == -9 or said.count("interrupted; ") == 1 and "--regenerate again" in said
    assert sorted(lines(tmp_path)) == [1, 2, 3, 4, 5, 7]
    stuck.set()
    assert train.cli(argv) == 0 and sorted(lines(tmp_path)) == [1, 2, 3, 4, 5, 6, 7]


def test_whoever_stops_waits_for_no_request_that_is_in_flight():
    def stop():
        results = each_at_once(2, lambda seconds: time.sleep(seconds) or seconds, [0, 60])
        assert next(results) == 0  # and the thread of the other is left alone

    process = FORK.Process(target=stop)
    process.start()
    process.join(20)
    assert process.exitcode == 0


def test_a_second_process_and_a_full_disk_are_one_line(tmp_path, serve):
    fake = serve()
    run(fake, tmp_path, *CHATS[:3])
    before = (tmp_path / "out.jsonl").read_bytes()
    write_lines(tmp_path / "chats.jsonl", *CHATS)
    with (tmp_path / "out.jsonl").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process writes into .*out.jsonl; wait for it"):
            run(fake, tmp_path, *CHATS)
    assert (tmp_path / "out.jsonl").read_bytes() == before
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 100, limits[1]))
        with pytest.raises(OSError, match=r"out\.jsonl"):
            regenerate(fake.url, tmp_path / "out.jsonl", [tmp_path / "chats.jsonl"], SimpleNamespace(**HOW))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert len(run(fake, tmp_path, *CHATS)[0]) == 7


# ------------------------------------------------------------------------------------------------- data, files, options


def test_changed_data_is_noticed_and_added_data_goes_on(tmp_path, serve):
    fake, out = serve(), tmp_path / "out.jsonl"
    run(fake, tmp_path, *CHATS[:3])
    before = out.read_bytes()
    for changed in ([CHATS[0], chat("other", "old"), CHATS[2]], CHATS[:2], [CHATS[1], CHATS[0], CHATS[2]]):
        with pytest.raises(
            ValueError, match=r"out.jsonl answers .*chats.jsonl:[123], which is not there any more, .*; name another"
        ) as said:
            run(fake, tmp_path, *changed)
        assert "\n" not in str(said.value) and out.read_bytes() == before
    fake.asked.clear()
    assert len(run(fake, tmp_path, *CHATS)[0]) == 7 and len(fake.asked) == 8


def test_a_conversation_left_out_is_asked_again_once_it_says_something_else(tmp_path, serve):
    fake = serve(lambda body: too_long(9) if "Q1" in json.dumps(body) else echo(body))
    run(fake, tmp_path, *CHATS[:3])
    found, report = run(fake, tmp_path, CHATS[0], chat("shorter", "old"), CHATS[2])
    assert found[2]["messages"][1]["content"] == "1:shorter" and "left out" not in report


@pytest.mark.parametrize(
    "text", ['[{"messages": []}]', '{"messages": [1]}\n', '{"source": "a"}\n', "x", '{"source": "a\n']
)
def test_a_file_that_is_no_result_is_left_as_it_is(tmp_path, serve, text):
    (tmp_path / "out.jsonl").write_text(text)
    with pytest.raises(ValueError, match="out.jsonl cannot be used .*; name another OUT"):
        run(serve(), tmp_path, *CHATS)
    assert (tmp_path / "out.jsonl").read_text() == text


def test_what_would_be_read_as_its_own_data_is_refused(tmp_path, serve):
    fake, data = serve(), write_lines(tmp_path / "chats.jsonl", *CHATS)
    for paths, out in (([tmp_path], tmp_path / "sub" / "out.jsonl"), ([data], data)):
        with pytest.raises(ValueError, match="would be read as part of --data"):
            regenerate(fake.url, out, paths, SimpleNamespace(**HOW))
    assert not (tmp_path / "sub").exists() and not fake.asked


def test_options_are_checked_and_belong_to_the_command(tmp_path, serve, capsys):
    argv = train_on(serve(), tmp_path)
    for flags, said in (
        (["--temperature", "11"], "--temperature is 11.0; it must be at most 10"),
        (["--top-p", "0"], "--top-p is 0.0; it must be at least"),
        (["--timeout", "0"], "--timeout is 0.0; it must be more than 0"),
        (["--at-once", "0"], "--at-once is 0; it must be at least 1"),
        (["--chat-template", str(tmp_path / "chats.jsonl")], "in its own template"),
        (["--render", "http://localhost:9"], "in its own template"),
    ):
        assert said in complaint([*argv, *flags], capsys)
    assert "give --data" in complaint(argv[:-2], capsys)
    assert "say how to --regenerate" in complaint(["--drop-cut"], capsys)
    assert not (tmp_path / "out.jsonl").exists()


PLANTED = FORMS | {"an agent": agent(result("a", "got"), result("b", "put it"))}


@pytest.mark.parametrize("name", PLANTED)
def test_nothing_that_a_line_or_an_answer_holds_raises_anything_but_what_is_told(name):
    rng = random.Random(name)
    record = json.loads(json.dumps(PLANTED[name]))
    for _ in range(300):
        text = json.dumps(planted(rng, record)).encode()
        made = module.ask_record(
            lambda body: (echo(body) | {"role": "assistant"}, False, 1), {}, False, ("s:1", "h", text)
        )
        assert made[:2] == ("s:1", "h") and (made[3].messages or made[3].ended)
        said = completion(asks(call("get", "a", x=1)) | {"reasoning": "hm"})
        try:
            message, _, tokens = module.read_answer(planted(rng, json.loads(json.dumps(said))))
        except server.WRONG:
            continue
        assert message["role"] == "assistant" and isinstance(message["content"], str) and isinstance(tokens, int)
