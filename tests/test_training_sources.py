"""Claims about data on its way into training: whatever form it comes in, the loss and every gradient are the same."""

import fcntl
import json
import os
import shutil
import signal
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from data.corpus import python_documents
from draft_deepseek import TTTLoss
from target.model import load_target
from tests.helpers import AUX, DRAFT_IDS, LAYOUTS, complaint, finish, start, turns
from training import rows as rows_module
from training.drafts import make_draft
from training.ranks import Ranks
from training.rows import Assembler
from training.settings import Settings, resolve
from training.sources import open_source


def settings(path, folder, **changes):
    common = {"model": str(path), "aux_layers": ",".join(map(str, AUX)), "device": "cpu", "runs": str(folder / "runs")}
    return resolve(Settings(**common | {"row_tokens": 64, "ttt_steps": 3, "epochs": 1, "held_out": 0.3} | changes))


def vocabulary(folder):
    offsets = DRAFT_IDS - torch.arange(len(DRAFT_IDS))
    torch.save(
        {"d2t": offsets, "t2d": torch.zeros(262, dtype=torch.bool).index_fill(0, DRAFT_IDS, True)}, folder / "map.pt"
    )
    return str(folder / "map.pt")


def loss_and_gradients(args, source, rows_of):
    """Of all documents of a source, `rows_of(documents)` saying which share a row, with one fresh draft."""
    torch.manual_seed(0)
    draft = make_draft(args, source, 96)
    everything = sorted([*source.training, *source.held_out], key=lambda d: d.tokens[1:].tolist())
    make = Assembler(args, source, draft.draft_ids)
    found = list(zip(everything, source.states(everything), strict=True))
    batches = [make([[found[i] for i in row]]) for row in rows_of(range(len(found)))]
    counts = sum(b.supervised for b in batches).clamp(min=1).float()
    module, total = TTTLoss(draft, args.ttt_steps), 0.0
    for b in batches:
        b.denominators = counts
        total += module.learn(b)[0].item()
    return {"loss": torch.tensor(total)} | {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}


def assert_close(got, want):
    assert got.keys() == want.keys() and want["loss"] > 0
    for name, x in want.items():
        assert (got[name] - x).abs().max() <= 1e-5 * x.abs().max(), name


@pytest.fixture
def online(home, target, documents, tmp_path):
    """Loss and gradients with the target at hand."""
    args = settings(home, tmp_path, draft_vocab=vocabulary(tmp_path))
    source = SimpleNamespace(
        training=documents, held_out=[], states=lambda x: target.capture([d.tokens for d in x]), head=target.head
    )
    for name in ("hidden_size", "vocab_size", "aux_layers", "embed_tokens", "lm_head", "special_token_ids"):
        setattr(source, name, getattr(target, name))
    source.width, source.config, source.draft_ids, source.is_tiny = 24, target.config.to_dict(), None, False
    return loss_and_gradients(args, source, lambda n: [n])


@pytest.mark.parametrize("kind", [kind for kind in LAYOUTS if kind != "arrow"])
def test_loss_and_gradients_are_those_of_the_running_target(layout, kind, home, online, tmp_path):
    vocab = None if kind.startswith("automodel") else vocabulary(tmp_path)
    args = settings(home, tmp_path, data=[str(layout(kind))], draft_vocab=vocab)
    source = open_source(args, Ranks())
    assert source.on_disk and len(source.training) + len(source.held_out) == 5
    assert_close(loss_and_gradients(args, source, lambda n: [n]), online)
    assert_close(loss_and_gradients(args, source, lambda n: [[i] for i in n]), online)  # packed equals unpacked


def test_a_cache_with_its_teacher_needs_a_model_only_for_another_shape(layout, home, tmp_path):
    args = settings(home, tmp_path, data=[str(layout("automodel"))], model=None)
    source = open_source(args, Ranks())
    assert source.config is None and source.lm_head is None and torch.equal(source.draft_ids, DRAFT_IDS)
    with pytest.raises(ValueError, match="hidden_size 24, not 7168.* give its --model"):
        make_draft(args, source, 96)


# --------------------------------------------------------------------------------------------------- whole runs of data

SHORT = ["--device", "cpu", "--row-tokens", "256", "--ttt-steps", "3", "--eval-rows", "2", "--decode-prompts", "1"]
SHORT += ["--decode-tokens", "8", "--held-out", "0.1", "--save-every", "100"]


def run(runs, name, *flags):
    train.main(["--runs", str(runs), "--name", name, *SHORT, *map(str, flags)])
    return [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """50 conversations as messages and the same number in ShareGPT's form, some of them of no use."""
    folder, pairs = tmp_path_factory.mktemp("chats"), python_documents(True)[:96]
    messages = [{"messages": turns(p[:90], a[:120], "again", a[120:200] or "b")} for p, a in pairs[:48]]
    shared = [
        {"conversations": [{"from": "human", "value": p[:90]}, {"from": "gpt", "value": a[:99]}]} for p, a in pairs[48:]
    ]
    messages += [{"messages": turns("a question without an answer")}, {"messages": []}]
    shared += [
        {"conversations": [{"from": "dragon", "value": "x"}]},
        {"conversations": [{"from": "human", "value": "x" * 300}, {"from": "gpt", "value": "y"}]},
    ]
    for name, rows in (("messages.jsonl", messages), ("shared.jsonl", shared)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_conversations_train_end_to_end(runs, chats, capsys):
    files = chats / "messages.jsonl", chats / "shared.jsonl"
    lines = run(runs, "chats", "--data", *files, "--epochs", 1, "--eval-every", 10, "--batch-rows", 4)
    said = capsys.readouterr().out
    assert "96 of 100 conversations" in said and "no assistant turn" in said and "an unknown role" in said
    assert "the prompt fills the row" in said and "warning: the target would have said only" in said
    assert sum(line["supervised"] for line in lines) > 0 and lines[-1]["loss"] < lines[0]["loss"]
    evaluations = [json.loads(line) for line in (runs / "chats" / "eval.jsonl").read_text().splitlines()]
    assert [x["step"] for x in evaluations] == list(range(10, len(lines), 10)) and evaluations
    result = json.loads((runs / "chats" / "result.json").read_text())
    assert result["by_position"].keys() == {"0-2K"} and result["by_position"]["0-2K"]["walked"] == result["walked"]


def test_a_dry_run_says_what_a_run_needs_and_leaves_nothing(runs, chats, capsys):
    before = sorted(path for path in runs.rglob("*") if "tokens" not in path.parts)
    train.main(["--runs", str(runs), "--name", "dry", *SHORT, "--data", str(chats), "--dry-run", "--epochs", "2"])
    said = capsys.readouterr().out
    assert (
        "96 of 100" in said
        and "slots an epoch" in said
        and "times the" in said
        and "GB a rank" in said
        and "FLOP" in said
    )
    assert sorted(path for path in runs.rglob("*") if "tokens" not in path.parts) == before


@pytest.fixture(scope="module")
def captured(runs, chats, tmp_path_factory):
    out = tmp_path_factory.mktemp("captures") / "states"
    train.main(["--runs", str(runs), *SHORT, "--data", str(chats), "--capture", str(out), "--capture-dtype", "float32"])
    return out


def test_a_captured_run_equals_the_online_one(runs, chats, captured, capsys):
    flags = ["--lr", 2e-3, "--draft-vocab", 96, "--steps", 6]
    online = run(runs, "online", "--data", chats, *flags)
    again = run(runs, "states", "--data", captured, "--model", runs / "tiny-deepseek-v3", *flags)
    assert "simulated" in capsys.readouterr().out
    held_out = [json.loads((runs / name / "result.json").read_text())["slots"] for name in ("online", "states")]
    assert held_out[0] == held_out[1] > 0
    for a, b in zip(online, again, strict=True):
        assert a["supervised"] == b["supervised"] and abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"]


def test_a_stream_is_trained_on_once_and_leaves_an_empty_folder(runs, chats, captured, tmp_path):
    """A thread stands in for vLLM: files appear one by one, locked while they are written, before the final norm."""
    arriving = tmp_path / "arriving"
    arriving.mkdir()
    last = load_file(runs / "tiny-deepseek-v3" / "model.safetensors")["model.norm.weight"]
    files = sorted((captured / "hidden_states").glob("*.safetensors"))

    def write():
        for path in files:
            held = load_file(path)
            held["hidden_states"][:, 3] /= last  # some state that the norm turns into the stored one, to its scale
            save_file(held, arriving / "half.part")
            os.replace(arriving / "half.part", arriving / path.name)
            time.sleep(0.005)
        (arriving / "STOP").touch()

    thread = threading.Thread(target=write)
    thread.start()
    flags = ["--data", chats, "--model", runs / "tiny-deepseek-v3", "--draft-vocab", 96]
    lines = run(runs, "stream", *flags, "--follow", arriving, "--batch-rows", 4)
    thread.join()
    assert [path.name for path in arriving.iterdir()] == ["STOP"]
    whole = run(runs, "not-a-stream", *flags, "--batch-rows", 4)
    assert sum(line["supervised"] for line in lines) == sum(line["supervised"] for line in whole) > 0
    assert json.loads((runs / "stream" / "result.json").read_text())["slots"] > 0


@pytest.mark.slow
def test_sigterm_while_a_stream_waits_saves_what_was_learned(runs, chats, captured, tmp_path):
    arriving, output = tmp_path / "arriving", tmp_path / "output"
    arriving.mkdir()
    files = sorted((captured / "hidden_states").glob("*.safetensors"))
    for path in files[:30]:
        shutil.copy(path, arriving)
    flags = ["--data", chats, "--model", runs / "tiny-deepseek-v3", "--draft-vocab", 96, "--follow", arriving]
    argv = ["--runs", str(runs), "--name", "waiting", *SHORT, *map(str, flags)]
    process, log = start(argv, output), runs / "waiting" / "log.jsonl"
    deadline = time.monotonic() + 100
    while not (log.exists() and log.read_text().count("\n") >= 4) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.join(2)  # all that arrived is learned or waits in the pool
    os.kill(process.pid, signal.SIGTERM)
    assert "interrupted" in finish(process, output, 130)
    done = log.read_text().count("\n")
    assert (runs / "waiting" / "checkpoints" / f"step-{done:08d}").exists() and len(list(arriving.iterdir())) < 30
    for path in files[30:]:
        shutil.copy(path, arriving)
    (arriving / "STOP").touch()
    finish(start([*argv, "--resume"], output), output, 0)
    assert [path.name for path in arriving.iterdir()] == ["STOP"] and log.read_text().count("\n") > done


def test_a_stream_of_other_texts_is_given_up_and_kept(runs, chats, captured, tmp_path):
    arriving = tmp_path / "arriving"
    shutil.copytree(captured / "hidden_states", arriving)
    (arriving / "STOP").touch()
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"messages": turns(f"question {i}", "answer")}) + "\n" for i in range(9)))
    flags = ["--data", other, "--model", runs / "tiny-deepseek-v3", "--draft-vocab", 96, "--follow", arriving]
    with pytest.raises(ValueError, match="none of the first 10 files"):
        run(runs, "other", *flags)
    assert len([path for path in arriving.iterdir() if path.suffix in (".safetensors", ".unknown")]) == 96
    with pytest.raises(ValueError, match="--follow-gb is 0.001"):  # it would wait for a pause to end that it asked for
        run(runs, "little", *flags, "--follow-gb", 0.001)
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "STOP").touch()
    with pytest.raises(ValueError, match="brought nothing to train on"):
        run(runs, "empty", *flags[:-1], empty)


def test_data_that_begins_with_what_is_learned_has_no_prompt_to_decode_but_trains(runs, tmp_path):
    rows = [{"input_ids": list(range(i, 90 + i)), "loss_mask": [1] * 90} for i in range(12)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert run(runs, "no-prompt", "--data", tmp_path / "ids.jsonl", "--steps", 2)
    assert (runs / "no-prompt" / "draft").exists()


def with_nan(path):
    """A captured file, its states no numbers."""
    held = load_file(path)
    save_file(held | {"hidden_states": held["hidden_states"].fill_(float("nan"))}, path)


def test_states_that_are_no_numbers_are_named_and_never_trained_on(runs, captured, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(captured, tmp_path / "states")
    flags = ["--data", folder, "--model", runs / "tiny-deepseek-v3", "--draft-vocab", 96, "--skip-damaged"]
    paths = sorted((folder / "hidden_states").iterdir())
    for path in paths[::3]:
        with_nan(path)
    run(runs, "some-nan", *flags, "--steps", 9)
    said = capsys.readouterr().out.partition("left out of")[2]
    assert "damaged (" in said and "its states hold NaN or Inf" in said and f"{folder}/hidden_states/hs_" in said
    for path in paths:
        with_nan(path)
    monkeypatch.setattr(rows_module, "NOT_ONE", 4)
    for steps in (1, 100):  # fewer documents than a run gives up after, and more
        with pytest.raises(ValueError, match="nothing usable is left of .*its states hold NaN or Inf"):
            run(runs, f"all-nan-{steps}", *flags, "--steps", steps)
        assert not (runs / f"all-nan-{steps}" / "draft").exists()


class FakeVLLM(BaseHTTPRequestHandler):
    """Answers as vLLM does, and leaves the states of every prompt in a folder as its connector does."""

    def do_GET(self):
        self.answer({"data": [{"id": "the-model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "the-model" and asked["max_tokens"] == 1
        tokens = torch.tensor(asked["prompt"])
        ((features, last),) = self.server.target.capture([tokens])
        last = last / self.server.target.backbone.norm.weight  # what the final norm turns into it, to its scale
        hidden = torch.cat([features.view(len(tokens), 3, -1), last[:, None]], 1)
        path = self.server.folder / f"cmpl-{len(self.server.seen)}.safetensors"
        self.server.seen.append(asked["prompt"])
        with open(f"{path}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.answer({"choices": [], "kv_transfer_params": {"hidden_states_path": str(path)}})  # before it is there
            time.sleep(0.3 * (len(self.server.seen) == 48))
            save_file({"hidden_states": hidden, "token_ids": tokens}, path)

    def answer(self, value):
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()

    def log_message(self, *args):
        pass


class Server(HTTPServer):
    request_queue_size = 256


@pytest.fixture
def vllm(runs, tmp_path):
    server = Server(("localhost", 0), FakeVLLM)
    server.folder, server.seen = tmp_path / "sent", []
    server.target = load_target(runs / "tiny-deepseek-v3")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_conversations_sent_to_a_server_come_back_as_data(runs, chats, captured, vllm, capsys):
    model = runs / "tiny-deepseek-v3"
    url = f"http://localhost:{vllm.server_port}"
    one = [chats / "messages.jsonl"]
    flags = ["--runs", runs, *SHORT, "--data", *one, "--model", model]
    train.main([*map(str, flags), "--send", url, str(vllm.folder)])
    assert (vllm.folder / "STOP").exists() and len(vllm.seen) == 48
    assert len(list(vllm.folder.glob("*.safetensors"))) == 48  # the last one, too, though it came late
    train.main([*map(str, flags), "--send", url, str(vllm.folder)])  # all were sent: nothing is sent twice
    assert len(vllm.seen) == 48
    how = ["--model", model, "--draft-vocab", 96, "--steps", 4, "--lr", 2e-3]
    lines = run(runs, "sent", "--data", vllm.folder, *how)
    online = run(runs, "sent-online", "--data", *one, *how)
    for a, b in zip(online, lines, strict=True):
        assert a["supervised"] == b["supervised"] and abs(a["loss"] - b["loss"]) < 1e-4 * a["loss"]
    with pytest.raises(ValueError, match="lists other documents"):
        train.main([*map(str, flags), "--data", str(chats), "--send", url, str(vllm.folder)])
    with pytest.raises(ValueError, match="does not answer as vLLM does"):
        train.main([*map(str, flags), "--send", "http://localhost:1", str(vllm.folder) + "-2"])


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--data", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--follow", "."], "--follow takes the loss masks from --data"),
        (["--held-out", "1.5"], "--held-out is 1.5"),
        (["--draft-vocab", "nowhere.pt"], "--draft-vocab is nowhere.pt"),
        (["--draft-vocab", "-3"], "--draft-vocab is -3"),
        (["--init", "nowhere"], "--init nowhere"),
    ],
)
def test_data_that_cannot_be_used_is_one_line(runs, flags, said, capsys):
    argv = ["--runs", str(runs), "--name", "bad", *SHORT, "--documents", "20", *flags]
    assert said in complaint(argv, capsys) and not (runs / "bad").exists()
