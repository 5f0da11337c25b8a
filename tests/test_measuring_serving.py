"""Claims about measuring a served draft: the numbers are those of the server's own counters and of its clock, and
whatever a server does, bench.py says it in one line."""

import json
import re
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import bench
from data import server as http
from measuring import serving

GAP = 0.01  # seconds between the events of an answer


class Engine:
    """A server as vLLM is one: `say(prompt, n)` are its n tokens, `rounds` what each answer's drafts accept.

    Drafts (K 3) are counted twice over, half by each of two engines; without rounds it counts none.
    """

    def __init__(self, rounds=None, say=lambda prompt, n: list(range(n)), ids=True, gap=GAP, first=2 * GAP):
        self.rounds, self.say, self.ids, self.gap, self.first = rounds, say, ids, gap, first
        self.asked, self.now, self.most, self.lock = [], 0, 0, threading.Lock()
        self.drafts, self.accepted, self.generated, self.depth = 1000, 500, 7000, [300, 150, 50]
        self.fault = None

    def metrics(self) -> str:
        lines = [
            f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {float(self.generated)}',
            "# TYPE x counter",
        ]
        if self.rounds is None:
            return "\n".join(lines) + "\n"
        numbers = {"drafts": self.drafts, "draft_tokens": 3 * self.drafts, "accepted_tokens": self.accepted}
        for engine in "01":
            lines += [f'vllm:spec_decode_num_{x}_total{{engine="{engine}"}} {n}' for x, n in numbers.items()]
            where = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
            lines += [f'{where}{{engine="{engine}",position="{i}"}} {n:e}' for i, n in enumerate(self.depth)]
        return "\n".join(lines) + "\n"

    def count(self, tokens: int) -> None:
        self.generated += tokens
        for accepted in self.rounds or ():
            self.drafts, self.accepted = self.drafts + 1, self.accepted + accepted
            self.depth = [n + (accepted > i) for i, n in enumerate(self.depth)]

    def events(self, path: str, body: dict):
        """Text of the events of an answer: two tokens in the first, one in each after that."""
        n, chat = body["max_tokens"], "chat" in path
        said, first = self.say(body.get("prompt") or body["messages"], n), True
        while said:
            new, said = (said[:2], said[2:]) if first else (said[:1], said[1:])
            time.sleep(self.first if first else self.gap)
            text, first = "".join(f"{token} " for token in new), False
            choice = {"delta": {"content": text}} if chat else {"text": text}
            yield json.dumps({"choices": [choice | ({"token_ids": new} if self.ids else {})]})
        yield json.dumps({"choices": [], "usage": {"completion_tokens": n}})


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def answer(self, text: str, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self):
        engine = self.server.engine
        if self.path == "/v1/models":
            return self.answer(json.dumps({"data": [{"id": "m"}]}))
        code = 404 if engine.fault == "no metrics" else 200
        self.answer("<html>" if engine.fault == "html" else engine.metrics(), code)

    def do_POST(self):
        engine = self.server.engine
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with engine.lock:
            engine.asked.append((self.path, body))
            engine.now += 1
            engine.most = max(engine.most, engine.now)
        if engine.fault == "too long":
            return self.answer('{"error": {"message": "the context is 1024 tokens"}}', 400)
        if engine.fault == "hangs":
            time.sleep(1)
        if engine.fault == "restarted":
            engine.drafts = engine.accepted = engine.generated = 0
        self.answer("")
        for event in engine.events(self.path, body):
            if engine.fault == "breaks off" and "usage" in event:
                return
            if engine.fault == "error" and "usage" in event:
                event = '{"error": {"message": "EngineCore died"}}'
            if engine.fault == "no usage":
                event = event.replace("usage", "used")
            self.wfile.write(f": ping\n\ndata: {event}\n\n".encode())
        with engine.lock:
            engine.now -= 1
            engine.count(body["max_tokens"] * (engine.fault != "another's") + 5 * (engine.fault == "others"))
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def served(engine: Engine):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.engine, server.daemon_threads = engine, True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


def prompt_file(folder, count=4):
    (folder / "prompts.json").write_text(json.dumps([[7, i] for i in range(count)]))
    return ["--prompts", str(folder / "prompts.json")]


def measured(capsys, *flags) -> tuple[dict, str]:
    bench.main(["--suite", "serve", *map(str, flags)])
    said = capsys.readouterr().out
    return json.loads(said.splitlines()[-1]), said


# ------------------------------------------------------------------------------------------------------------- numbers


def test_accept_lengths_are_those_of_the_counters_pooled_over_the_cell(tmp_path, capsys):
    """Answers of 3 rounds that accept 3, 0 and 1, in two engines: 1 + 4/3, and 2/3, 1/3, 1/3 by depth."""
    engine = Engine([3, 0, 1])
    flags = [*prompt_file(tmp_path), "--at-once", 1, 3, "--rounds", 2, "--new-tokens", 9, "--temperature", 0.5]
    with served(engine) as url:
        result, said = measured(capsys, url, *flags, "--top-p", 0.9, "--out", tmp_path / "out.json")
    assert [(r["at_once"], r["temperature"], r["top_p"]) for r in result["rows"]] == [
        (1, 0.0, 1.0), (3, 0.0, 1.0), (1, 0.5, 0.9), (3, 0.5, 0.9)
    ]  # fmt: skip
    for row in result["rows"]:
        assert (row["requests"], row["tokens"], row["k"], row["others_tokens"]) == (8, 72, 3, 0)
        assert (row["drafts"], row["drafted"], row["accepted"]) == (2 * 24, 2 * 72, 2 * 32)
        assert row["accept_length"] == pytest.approx(1 + 4 / 3)
        assert row["by_depth"] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
        assert row["unique_bigrams"] == 1.0 and row["bigrams_of"] == "tokens"
    assert "2.33" in said and "67% 33% 33%" in said and "faster" not in said
    assert engine.most == 3
    cells = json.loads((tmp_path / "out.json").read_text())["cells"]
    assert all(cell["texts"] == [[[list(range(9))] * 4] * 2] for cell in cells)  # by server, round, prompt


def test_what_is_asked_is_fixed_but_never_cached(tmp_path, monkeypatch, capsys):
    engine = Engine([1])
    flags = [*prompt_file(tmp_path), "--at-once", 2, "--rounds", 1, "--new-tokens", 20, "--temperature", 0.5]
    with served(engine) as url:
        measured(capsys, url, *flags, "--may-end")
        greedy = [body for path, body in engine.asked if body["temperature"] == 0]
        assert [body["max_tokens"] for body in greedy] == [16, 16, 20, 20, 20, 20]  # two warm up
        assert sorted(body["prompt"] for body in greedy[2:]) == [[7, i] for i in range(4)]
        assert {path for path, _ in engine.asked} == {"/v1/completions"} and len(engine.asked) == 12
        assert len({body["cache_salt"] for _, body in engine.asked}) == 12
        wanted = {"model": "m", "top_p": 1.0, "stream": True, "ignore_eos": False, "return_token_ids": True}
        assert all(body.items() >= (wanted | {"temperature": 0}).items() for body in greedy)
        engine.asked.clear()
        pairs = [("def f(x):\n", "  return x\n"), ("class A:\n", "    x = 1")]
        monkeypatch.setattr(serving, "python_documents", lambda held_out: [pairs, [("", "")]][not held_out])
        measured(capsys, url, "--at-once", 1, "--rounds", 1, "--new-tokens", 2)
    assert [body["prompt"] for _, body in engine.asked] == ["def", "def", "class"]  # no word is cut
    assert all(body["ignore_eos"] for _, body in engine.asked)


def test_times_are_those_of_the_events_and_speed_ups_those_of_the_same_round(tmp_path, capsys):
    ours, theirs = Engine([1], gap=0.02, first=0.1), Engine(gap=0.06, first=0.1)
    flags = [*prompt_file(tmp_path, 2), "--at-once", 1, "--rounds", 2, "--new-tokens", 6]
    with served(ours) as url, served(theirs) as plain:
        result, said = measured(capsys, url, "--against", plain + "/", *flags)
    (row,) = result["rows"]
    for one, gap in ((row, 0.02), (row["against"], 0.06)):
        assert one["s_to_first"] == pytest.approx(0.1, abs=0.05)
        assert one["s_per_token"] == pytest.approx(4 * gap / 5, rel=0.4)  # five events, of six tokens
        assert one["tokens_per_s"] == pytest.approx(6 / (0.1 + 4 * gap), rel=0.4) and one["tokens"] == 24
    assert row["faster"] == pytest.approx(sum(row["faster_by_round"]) / 2) and len(row["faster_by_round"]) == 2
    assert row["faster"] == pytest.approx(0.34 / 0.18, rel=0.3)
    assert "k" not in row["against"] and row["identical"] == 4 and "4 of 4" in said


def test_turns_are_taken(tmp_path, capsys):
    order = []
    engines = [Engine([1], lambda _, n, i=i: order.append(i) or list(range(n))) for i in range(2)]
    engines[1].rounds = None
    with served(engines[0]) as url, served(engines[1]) as plain:
        measured(
            capsys, url, "--against", plain, *prompt_file(tmp_path, 2), "--at-once", 2, "--rounds", 2, "--new-tokens", 3
        )
    assert order == [0, 0, 1, 1] + 2 * [0, 0, 1, 1]


def test_outputs_that_differ_are_counted_where_greedy_and_bigrams_are_of_what_was_said(tmp_path, capsys):
    repeats = Engine([1], lambda prompt, n: [5] * n)  # 1 distinct pair of 4
    differs = Engine(say=lambda prompt, n: [5] * n if prompt[1] < 1 else [5, 5, 5, 5, 6][:n])
    flags = [*prompt_file(tmp_path, 3), "--at-once", 1, "--rounds", 1, "--new-tokens", 5, "--temperature", 1]
    with served(repeats) as url, served(differs) as plain:
        greedy, sampled = measured(capsys, url, "--against", plain, *flags)[0]["rows"]
        assert greedy["identical"] == 1 and "identical" not in sampled
        assert greedy["unique_bigrams"] == 1 / 4 and greedy["against"]["unique_bigrams"] == (1 + 2 + 2) / 12
        repeats.ids = False
        words = measured(capsys, url, *flags)[0]["rows"][0]
    assert words["unique_bigrams"] == 1 / 4 and words["bigrams_of"] == "words"


def test_a_server_without_the_counters_is_compared_by_its_speed_alone(tmp_path, capsys):
    flags = [*prompt_file(tmp_path, 1), "--at-once", 1, "--rounds", 1, "--new-tokens", 3]
    for fault in (None, "no metrics", "html"):
        engine = Engine()
        engine.fault = fault
        with served(engine) as url, served(Engine()) as plain:
            result, said = measured(capsys, url, "--against", plain, *flags)
            assert "has no vllm:spec_decode_num_drafts_total" in said and "speeds alone are compared" in said
            assert result["rows"][0]["faster"] > 0 and "accept_length" not in result["rows"][0]
            assert (result["rows"][0]["others_tokens"] is None) == (fault is not None)
            assert bench.cli(["--suite", "serve", url, *map(str, flags)]) == 2
            assert "only its speed, with --against" in capsys.readouterr().err


def test_what_training_reported_stands_beside(tmp_path, capsys):
    (tmp_path / "result.json").write_text(
        json.dumps({"simulated": 3.515, "sampled_walked": 2.5, "greedy_decoded": 4, "rounds": 91, "by_position": {}})
    )
    (tmp_path / "settings.json").write_text('{"ttt_steps": 7}')
    flags = [*prompt_file(tmp_path, 1), "--at-once", 1, "--rounds", 1, "--new-tokens", 3, "--run", tmp_path]
    with served(Engine([1])) as url:
        result, said = measured(capsys, url, *flags)
        assert result["training"] == {"k": 7, "simulated": 3.515, "sampled_walked": 2.5, "greedy_decoded": 4.0}
        assert "chains of 7" in said and "simulated 3.52, sampled walked 2.50, greedy decoded 4.00" in said
        (tmp_path / "result.json").unlink()
        assert bench.cli(["--suite", "serve", url, *map(str, flags)]) == 2
    assert "name a run that has ended" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------ counters


def test_counters_are_read_from_odd_but_valid_text():
    accepted = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    text = (
        "# HELP vllm:spec_decode_num_drafts_total x\n# TYPE vllm:spec_decode_num_drafts_total counter\r\n\n"
        'vllm:spec_decode_num_drafts_total{model_name="a \\"} 9",engine="0"} 1e+02 1796098544000\r\n'
        '  vllm:spec_decode_num_drafts_total { model_name = "b,position=\\"4\\"\u2028" , } 20\n'
        'vllm:spec_decode_num_drafts_created 1.79e9\nvllm:generation_tokens_total 3 # {trace="1"} 1.0\n'
        f'{accepted}{{position="1",engine="0"}} 4.0\n{accepted}{{engine="1", position="10"}} 5\n'
        f'{accepted}{{model_name="position=\\"7\\"",position="1"}} 6\n'
        'other{a="}"} NaN\nsomething that is no sample\n# EOF'
    )
    assert serving.read_counters(text) == {"drafts": 120, "generated": 3, 1: 10, 10: 5}
    assert serving.read_counters("") == serving.read_counters("<html>vllm</html>") == {}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-1", "1.5", "many", ""])
def test_a_counter_that_is_no_count_is_refused(value):
    with pytest.raises(ValueError):
        serving.read_counters(f"vllm:generation_tokens_total {value}")
    with pytest.raises(ValueError, match="has no position"):
        serving.read_counters("vllm:spec_decode_num_accepted_tokens_per_pos_total 1")


# ------------------------------------------------------------------------------------------------------------- prompts


def test_first_questions_of_chats_are_asked_and_tokens_up_to_what_is_learned(tmp_path, capsys):
    user, tool = {"role": "user", "content": "Hello?"}, {"type": "function", "function": {"name": "f"}}
    answer, more = {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "More?"}
    records = [
        {"messages": [user, answer, more, answer], "system": "Be brief.", "tools": [tool]},
        {"conversations": [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Yes."}]},
        {"messages": [answer, user, answer]},
        {"messages": [user, answer], "chat_template_kwargs": {"thinking": True}},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [0, 0, 1, 1]},
        {"prompt": "Hello?", "completion": "Yes."},
    ]
    text = "\n".join(map(json.dumps, records))
    (tmp_path / "chats.jsonl").write_text("no JSON\n\n" + text)
    engine = Engine([1])
    flags = ["--data", tmp_path / "chats.jsonl", "--at-once", 1, "--rounds", 1, "--new-tokens", 2]
    with served(engine) as url:
        _, said = measured(capsys, url, *flags, "--prompt-count", 4)
    assert "skipped 1: invalid JSON" in said and "chats.jsonl:1)" in said
    assert "skipped 1: it does not begin with a question" in said and "chats.jsonl:5)" in said
    (first, a), (_, b), (_, c), (tokens, d) = engine.asked[1:]
    assert first == "/v1/chat/completions" and tokens == "/v1/completions" and d["prompt"] == [1, 2]
    assert a["messages"] == [{"role": "system", "content": "Be brief."}, user] and b["messages"] == [user]
    assert (a["tools"], a["tool_choice"]) == ([tool], "none") and "tools" not in b
    assert c["messages"] == [user] and c["chat_template_kwargs"] == {"thinking": True}
    assert serving.question(records[-1]) == {"messages": [user]}


# ---------------------------------------------------------------------------------------------------------- what fails


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("too long", "HTTP Error 400: Bad Request .*the context is 1024 tokens"),
        ("error", "EngineCore died"),
        ("breaks off", "the stream broke off"),
        ("no usage", "v1/completions does not answer as vLLM does .*usage"),
        ("hangs", "timed out"),
        ("restarted", "/metrics went backwards; was the server restarted"),
        ("another's", "/metrics counts 0 of the 3 tokens"),
    ],
)
def test_a_server_that_fails_is_one_line_and_exit_code_2(tmp_path, fault, said, monkeypatch, capsys):
    monkeypatch.setattr(http, "TIMEOUT", 0.3)
    monkeypatch.setattr(serving, "LAG", 0.2)
    engine = Engine([1])
    engine.fault = fault
    with served(engine) as url:
        flags = ["--suite", "serve", url, *prompt_file(tmp_path, 1), "--at-once", "1", "--new-tokens", "3"]
        assert bench.cli(flags) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert re.search(said, line) and url in line


def test_tokens_of_others_are_warned_of(tmp_path, capsys):
    engine = Engine([1])
    engine.fault = "others"
    flags = [*prompt_file(tmp_path, 2), "--at-once", 1, "--rounds", 1, "--new-tokens", 3]
    with served(engine) as url:
        result, said = measured(capsys, url, *flags)
    assert result["rows"][0]["others_tokens"] == 10 and result["rows"][0]["tokens"] == 6
    assert f"warning: {url} generated 10 tokens for others meanwhile" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--suite", "serve"], "--suite serve http://localhost:8000"),
        (["http://localhost:8134"], "belong together: --suite serve http://localhost:8134"),
        (["--suite", "decode", "http://localhost:8134"], "belong together"),
        (["--suite", "serve", "--url", "http://localhost:9"], "--url"),
        (["--suite", "serve", "http://localhost:9", "http://localhost:9"], "unrecognized"),
        (["--suite", "serve", "localhost:9"], "is no address of a running server"),
        (["--suite", "serve", "http://localhost:9"], "http://localhost:9/v1/models does not answer as vLLM does"),
        (["--suite", "serve", "http://localhost:9", "--at-once", "0"], "--at-once is 0"),
        (["--suite", "serve", "http://localhost:9", "--at-once", "4", "--prompt-count", "2"], "but 2 prompts"),
        (["--suite", "serve", "http://localhost:9", "--data", "a", "--prompts", "b"], "--data and --prompts"),
        (["--suite", "serve", "http://localhost:9", "--data", "nowhere"], "--data nowhere does not exist"),
        (["--against", "http://localhost:9"], "are for --suite serve"),
    ],
)  # fmt: skip
def test_flags_that_cannot_be_used_are_one_line_and_exit_code_2(flags, said, capsys):
    assert bench.cli(flags) == 2
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1


def test_a_second_server_that_drafts_as_well_is_refused(capsys):
    with served(Engine([1])) as url:
        assert bench.cli(["--suite", "serve", url, "--against", url]) == 2
    assert "drafts as well" in capsys.readouterr().err
