"""Claims about runs: interrupted, killed, out of disk, on several ranks; they resume exactly or end with one line."""

import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import drafts
import target
import train
from conversations import answered
from data import anchors_of, cut_to, pack, python_documents
from target import byte_tokenizer
from test_decode import toy_batch, toy_draft

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent
FORK = multiprocessing.get_context("fork")  # a child has all that is imported and parsed: a run starts in a second


SHORT = ["--row-tokens", "512", "--eval-rows", "1", "--decode-prompts", "1", "--decode-tokens", "9"]
SHORT += ["--save-every", "3", "--device", "cpu", "--documents", "100"]


def command(runs, name, *flags):
    return ["--runs", str(runs), "--name", name, *SHORT, *map(str, flags)]


def start(argv, output, patch=lambda: None):
    """`train.py argv` as a process of its own, its output in a file; `patch()` is called in it first."""

    def child():
        with output.open("w") as sys.stdout:
            sys.stderr = sys.stdout
            patch()
            code = train.cli(argv)
        os._exit(code)  # not through the parent's own clean-up

    process = FORK.Process(target=child)
    process.start()
    return process


def finish(process, output, code):
    process.join(200)
    assert process.exitcode == code, f"exit code {process.exitcode}: {output.read_text()[-3000:]}"
    return output.read_text()


def torchrun(runs, name, *flags):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "29517"]
    return subprocess.Popen(
        [*launcher, "train.py", *command(runs, name, *flags)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def weights(runs, name, step):
    return load_file(runs / name / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def log(runs, name):
    return [json.loads(line) for line in (runs / name / "log.jsonl").read_text().splitlines()]


def assert_same_run(runs, one, two, step):
    """Bit for bit: the weights, and what every step logged but its speed."""
    a, b = weights(runs, one, step), weights(runs, two, step)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    logs = [[{k: x for k, x in line.items() if k != "tokens_per_second"} for line in log(runs, n)] for n in (one, two)]
    assert logs[0] == logs[1] and [line["step"] for line in logs[0]] == list(range(1, step + 1))


@pytest.mark.parametrize("preset", ["deepseek-v3", "kimi-k3"])
def test_a_run_trains_evaluates_and_exports(runs, preset, capsys):
    train.main(command(runs, f"run-{preset}", "--target", preset, "--steps", 4, "--export-dtype", "float32"))
    output = capsys.readouterr().out
    assert "simulated" in output and "1 of 1 identical" in output
    run = runs / f"run-{preset}"
    assert [line["step"] for line in log(runs, run.name)] == [1, 2, 3, 4]
    state, trained = load_file(run / "draft" / "model.safetensors"), weights(runs, run.name, 4)
    target = load_file(runs / f"tiny-{preset}" / "model.safetensors")
    embedding = next(x for name, x in target.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(state["embed_tokens.weight"], embedding)  # engines share it: never trained
    assert torch.equal(state["layers.0.mlp.up_proj.weight"], trained["model.layers.0.mlp.up_proj.weight"])
    norms = torch.cat([x for name, x in state.items() if x.ndim == 1 and x.is_floating_point()])
    assert (norms == 1).float().mean() < 0.01  # float32 masters: norms move
    with pytest.raises(ValueError, match="is complete"):
        train.main(command(runs, run.name, "--resume"))


# -------------------------------------------------------------------------------------------------- stopped and resumed


@pytest.fixture(scope="module")
def whole(runs):
    """The undisturbed run that others are compared with."""
    python_documents(True), python_documents(False)  # parsed here, once
    train.main(command(runs, "whole", *WHOLE))
    return "whole"


WHOLE = ["--steps", 7, "--accumulate", 2]


@pytest.mark.parametrize("cut", [1, 4, pytest.param(57, marks=pytest.mark.slow)])
def test_resumed_equals_undisturbed_bit_for_bit(runs, cut, monkeypatch):
    steps = 100 if cut == 57 else 7
    flags = ["--steps", steps, "--row-tokens", 256 if cut == 57 else 512]
    if not (runs / f"plain-{steps}").exists():
        train.main(command(runs, f"plain-{steps}", *flags))
    save = train.save_checkpoint

    def stop_after(run, draft, optimizer, step, *rest):
        save(run, draft, optimizer, step, *rest)
        if step == cut:
            raise KeyboardInterrupt

    monkeypatch.setattr(train, "save_checkpoint", stop_after)
    with pytest.raises(KeyboardInterrupt):
        train.main(command(runs, f"cut-{cut}", *flags, "--save-every", cut))
    monkeypatch.undo()
    train.main(command(runs, f"cut-{cut}", *flags, "--resume"))
    assert_same_run(runs, f"plain-{steps}", f"cut-{cut}", steps)


PHASES = [
    (train, "open_source"),
    (train, "optimizer_step"),
    (torch, "save"),
    (train, "evaluate"),
    (drafts, "save_file"),
]
QUICK = [(train, "make_draft"), (train, "make_rows"), (train, "decode_for_real")]


@pytest.mark.parametrize(("module", "name"), [*PHASES, *(pytest.param(*one, marks=pytest.mark.slow) for one in QUICK)])
def test_sigterm_in_any_phase_leaves_a_run_that_resumes(runs, whole, module, name, tmp_path):
    original = getattr(module, name)

    def signalled(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGTERM)
        return original(*args, **kwargs)

    run = f"term-{name}"
    output = tmp_path / "output"
    stopped = start(command(runs, run, *WHOLE), output, lambda: setattr(module, name, signalled))
    assert "interrupted" in finish(stopped, output, 130)
    finish(start(command(runs, run, "--resume"), output), output, 0)
    assert_same_run(runs, whole, run, 7)
    assert (runs / run / "draft" / "model.safetensors").exists()
    assert not list((runs / run).rglob("*.part"))


def test_sigterm_while_the_target_is_made_leaves_no_target_and_a_run_that_resumes(tmp_path):
    def quick():
        target.TINY_STEPS = {"deepseek-v3": 3}
        if stopping:
            target.next_token_loss = lambda *_: os.kill(os.getpid(), signal.SIGTERM) or time.sleep(60)

    output, stopping = tmp_path / "output", True
    finish(start(command(tmp_path, "made", "--steps", 2), output, quick), output, 130)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "output"]
    stopping = False
    finish(start(command(tmp_path, "made", "--resume"), output, quick), output, 0)
    assert len(log(tmp_path, "made")) == 2


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_ends_as_if_undisturbed(runs, kills, tmp_path):
    rng, name, output = random.Random(kills), f"killed-{kills}", tmp_path / "output"
    steps = 3 * kills
    flags = ["--steps", steps, "--save-every", 1, "--row-tokens", 256]
    train.main(command(runs, f"calm-{kills}", *flags))
    for _ in range(kills):
        before = newest(runs / name)
        process = start(command(runs, name, *flags, "--resume"), output)
        while process.exitcode is None and newest(runs / name) == before:  # until it has gone one step on
            time.sleep(0.01)
        process.join(rng.uniform(0, 0.3))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, f"{process.exitcode}: {output.read_text()[-2000:]}"
    finish(start(command(runs, name, *flags, "--resume"), output), output, 0)
    assert_same_run(runs, f"calm-{kills}", name, steps)


def newest(run):
    return max((run / "checkpoints").glob("step-????????"), default=None)


def test_a_full_disk_ends_the_run_with_one_line_and_keeps_the_last_checkpoint(runs, whole, tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))

    output, name = tmp_path / "output", "full"
    save = train.save_checkpoint

    def full_at_6():
        def save_(run, draft, optimizer, step, *rest):
            if step == 6:
                small_files()
            save(run, draft, optimizer, step, *rest)

        train.save_checkpoint = save_

    said = finish(start(command(runs, name, *WHOLE), output, full_at_6), output, 1)
    assert "the checkpoint of step 6 cannot be written" in said.splitlines()[-1]
    assert [path.name for path in (runs / name / "checkpoints").iterdir()] == ["step-00000003"]
    finish(start(command(runs, name, "--resume"), output), output, 0)
    assert_same_run(runs, whole, name, 7)


@pytest.mark.parametrize("flags", [["--documents", 30], ["--seed", 1, "--held-out", 0.3]])
def test_a_run_keeps_its_draft_vocabulary_whatever_its_data_become(runs, whole, flags, monkeypatch):
    name = f"moved-{len(flags)}"
    shutil.copytree(runs / whole, runs / name, ignore=shutil.ignore_patterns("draft"))
    seen, make_rows = [], train.make_rows
    monkeypatch.setattr(
        train, "make_rows", lambda args, source, ids, mask: seen.append(ids) or make_rows(args, source, ids, mask)
    )
    train.main(command(runs, name, "--resume", "--steps", 8, *flags))
    d2t = weights(runs, name, 8)["d2t"]
    assert torch.equal(seen[0], d2t + torch.arange(len(d2t))) and torch.equal(d2t, weights(runs, whole, 7)["d2t"])
    assert log(runs, name)[-1]["loss"] < 1.2 * log(runs, name)[0]["loss"]


def test_a_resume_that_fails_leaves_the_settings_as_they_were(runs, whole):
    shutil.copytree(runs / whole, runs / "typo", ignore=shutil.ignore_patterns("draft"))
    before = (runs / "typo" / "settings.json").read_text()
    for flags, said in ((["--data", "nowhere"], "nowhere"), (["--draft-vocab", 50], "bound to one of 96")):
        with pytest.raises(ValueError, match=said):
            train.main(command(runs, "typo", "--resume", *flags))
        assert (runs / "typo" / "settings.json").read_text() == before
    newest = max((runs / "typo" / "checkpoints").iterdir())
    (newest / "training.pt").write_bytes((newest / "training.pt").read_bytes()[:-9])
    with pytest.raises(ValueError, match="training.pt cannot be used.*remove .*step-00000007"):
        train.main(command(runs, "typo", "--resume"))
    (runs / "typo" / "settings.json").write_text("[]")
    with pytest.raises(SystemExit):
        train.main(command(runs, "typo", "--resume"))


def test_two_runs_in_one_directory_are_refused(runs, whole):
    (runs / "held").mkdir()
    given = train.Settings(runs=str(runs), name="held", resume=True)
    train.write_settings(train.Ranks(), runs / "held", given)
    with train.open_run(given, train.Ranks()), pytest.raises(ValueError, match="another process trains in"):
        train.main(command(runs, "held", "--resume"))


def test_a_loss_that_stays_not_finite_names_its_data(runs, monkeypatch):
    capture = target.Target.capture
    nan = lambda *args: [(f * float("nan"), last) for f, last in capture(*args)]  # noqa: E731
    monkeypatch.setattr(target.Target, "capture", nan)
    with pytest.raises(ValueError, match=rf"for {train.BAD_STEPS} steps in a row, up to step 10, .* corpus:\d+"):
        train.main(command(runs, "nan", "--steps", 20))
    lines = log(runs, "nan")
    assert len(lines) == 10 and all(name.startswith("corpus:") for line in lines for name in line["skipped"])


# ---------------------------------------------------------------------------------------------------------------- ranks


def documents_for(batches: int, row_tokens: int, steps: int = 3) -> int:
    """How many corpus documents make `batches` rows in the first epoch of seed 0."""
    tokenizer = byte_tokenizer()
    documents = [cut_to(d, row_tokens) for d in answered(tokenizer, python_documents(False)[:300])]
    for n in range(20, 300):
        kept = [d for d in documents[:n] if anchors_of(d.loss_mask, steps)]
        if len(pack([len(d.tokens) for d in kept], row_tokens, random.Random("0/0"))) == batches:
            return n
    raise AssertionError(f"no number of documents makes {batches} rows")


def test_ten_micro_batches_at_accumulation_4_are_three_steps(runs):
    flags = ["--documents", documents_for(10, 1024), "--epochs", 1, "--row-tokens", 1024, "--ttt-steps", 3]
    train.main(command(runs, "ten-1", *flags, "--accumulate", 1))
    train.main(command(runs, "ten-4", *flags, "--accumulate", 4))
    single = [line["supervised"] for line in log(runs, "ten-1")]
    assert len(single) == 10
    assert [line["supervised"] for line in log(runs, "ten-4")] == [sum(single[i : i + 4]) for i in (0, 4, 8)]


def test_two_ranks_equal_one_process_and_resume_on_one(runs):
    """20 steps at accumulation 4; in the last window the second rank has no rows."""
    flags = ["--documents", documents_for(153, 256), "--row-tokens", 256, "--epochs", 1, "--save-every", 10]
    flags += ["--ttt-steps", 3]
    ranks = torchrun(runs, "ranks-2", *flags, "--accumulate", 4)
    train.main(command(runs, "ranks-1", *flags, "--accumulate", 8))
    output = ranks.communicate(timeout=280)[0]
    assert ranks.returncode == 0, output[-3000:]
    for part in ("settings.json", "checkpoints/step-00000010"):
        source = runs / "ranks-2" / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, make_parent(runs / "ranks-21" / part))
    train.main(command(runs, "ranks-21", *flags, "--resume", "--accumulate", 8))
    one, lines = weights(runs, "ranks-1", 20), log(runs, "ranks-1")
    assert len(lines) == 20 and lines[-1]["supervised"] < lines[-2]["supervised"] / 4
    for name in ("ranks-2", "ranks-21"):
        for a, b in zip(lines[-len(log(runs, name)) :], log(runs, name), strict=True):
            assert a["supervised"] == b["supervised"] and abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"], (a, b)
            assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]
        for key, x in weights(runs, name, 20).items():
            assert (x.double() - one[key].double()).abs().max() <= 1e-4 * one[key].double().abs().max(), (name, key)


def make_parent(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def windows(empty: bool):
    """Four micro-batches for each of two ranks, 3 supervised tokens on the first, 1 or none on the second."""
    draft = toy_draft("deepseek", 1)
    text = torch.randint(32, (8, 1, 20), generator=torch.Generator().manual_seed(1))
    counts = [2, 0, 1, 0, 0, 0, 0 if empty else 1, 0]
    masks = [((torch.arange(20) >= 9) & (torch.arange(20) < 9 + n))[None] for n in counts]
    return draft, [toy_batch(draft, x, mask) for x, mask in zip(text, masks, strict=True)]


def one_window(rank, world, empty, port, queue):
    """Gradients of one optimizer step, on `world` ranks."""
    torch.set_num_threads(1)
    draft, rows = windows(empty)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    optimizer = train.make_optimizer(train.resolve(train.Settings(device="cpu")), parameters)
    loss, found = train.TTTLoss(draft), []
    optimizer.step = lambda: found.extend(p.grad.clone().numpy() for p in parameters)
    args = train.resolve(train.Settings(device="cpu", clip=1e9))
    if world == 1:
        train.optimizer_step(args, train.Ranks(), loss, rows, optimizer, parameters)
    else:
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world)
        ours = rows[4 * rank : 4 * rank + 4]
        train.optimizer_step(args, train.Ranks(rank, world), loss, ours, optimizer, parameters)
        dist.destroy_process_group()
    queue.put((rank, found))


@pytest.mark.parametrize("empty", [False, True])
def test_gradients_agree_over_ranks_and_with_one_process(empty):
    spawn = multiprocessing.get_context("spawn")
    queue = spawn.Queue()
    processes = [spawn.Process(target=one_window, args=(r, 2, empty, 29531 + empty, queue)) for r in range(2)]
    for process in processes:
        process.start()
    alone = []
    one_window(0, 1, empty, None, type("", (), {"put": lambda self, x: alone.extend(x[1])})())
    found = dict(queue.get(timeout=120) for _ in processes)
    for process in processes:
        process.join()
    assert alone and any(g.any() for g in alone)
    for want, a, b in zip(alone, found[0], found[1], strict=True):
        assert (a == b).all() and abs(a - want).max() <= 1e-5 * abs(want).max()


def test_a_killed_rank_ends_the_job_with_an_error(runs):
    job = torchrun(runs, "lost", "--steps", 1000)
    deadline = time.monotonic() + 120
    while not (runs / "lost" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    job.communicate(timeout=100)  # raises if it hangs
    assert job.returncode != 0


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "gpt-5"], "gpt-5"),
        (["--row-tokens", "0"], "--row-tokens is 0"),
        (["--steps", "x"], "--steps"),
        (["--draft-vocab", "100000"], "--draft-vocab is 100000; it must be an integer in 1..262"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--aux-layers", "1,2"], "three"),
        (["--aux-layers", "a,b,c"], "a,b,c"),
        (["--device", "banana"], "banana"),
        (["--lr", "nan"], "--lr is nan"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--resume"], "--name"),
        (["--device", "meta"], "--device meta"),
        (["--warmup", "3"], "--warmup is 3.0"),
        (["--name", "../x"], "--name is '../x'"),
        (["--follow-gb", "3"], "--follow-gb"),
        (["--dry-run", "--export", "a", "b"], "not allowed with"),
        (["--export", "nothing", "out"], "nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, flags, said, capsys):
    before = sorted(runs.rglob("*"))
    assert said in complaint(["--runs", str(runs), *flags], capsys)
    assert sorted(runs.rglob("*")) == before


def complaint(argv, capsys) -> str:
    """The one line that train.py ends with, by exit code 2 or a ValueError."""
    with pytest.raises((SystemExit, ValueError)) as stopped:
        train.main(argv)
    message = capsys.readouterr().err if isinstance(stopped.value, SystemExit) else str(stopped.value)
    assert message.strip().count("\n") == 0
    assert not isinstance(stopped.value, SystemExit) or stopped.value.code == 2
    return message


def test_an_existing_run_is_not_overwritten(runs):
    (runs / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        train.main(["--runs", str(runs), "--name", "taken"])
    assert not list((runs / "taken").iterdir())
