"""Claims about micro-batches and ranks: however the rows are shared, a step is the same."""

import json
import multiprocessing
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import train
from data.conversations import answered
from data.corpus import python_documents
from data.documents import cut_to
from data.packing import anchors_of, pack
from target.tiny import byte_tokenizer
from tests.helpers import ROOT, command, finish, log, start, toy_batch, toy_draft, toy_rows, weights
from training.ranks import Ranks


def free_port():
    with socket.create_server(("localhost", 0)) as server:
        return server.getsockname()[1]


def start_ranks(argv, folder):
    """`train.py argv` as torchrun starts it on two ranks: its processes, each with the file of its output."""
    job = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    outputs = [folder / f"output-{rank}" for rank in range(2)]
    return [
        (start(argv, output, lambda rank=rank: os.environ.update(rank)), output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


def documents_for(batches: int, row_tokens: int, steps: int = 3) -> int:
    """How many corpus documents make `batches` rows in the first epoch of seed 0."""
    tokenizer = byte_tokenizer()
    documents = [cut_to(d, row_tokens) for d in answered(tokenizer, python_documents(False)[:300])]
    for n in range(4, 300):
        kept = [d for d in documents[:n] if anchors_of(d.loss_mask, steps)]
        if len(pack([len(d.tokens) for d in kept], row_tokens, random.Random("0/0"))) == batches:
            return n
    raise AssertionError(f"no number of documents makes {batches} rows")


def test_a_checkpoint_that_counts_in_another_packing_is_refused(runs):
    train.main(command(runs, "packed", "--steps", 2))
    (state,) = (runs / "packed" / "checkpoints").glob("step-*/training.pt")
    shutil.rmtree(runs / "packed" / "draft")
    torch.save({k: x for k, x in torch.load(state).items() if k != "packing"}, state)
    with pytest.raises(ValueError, match="older version packed them.*--init"):
        train.main(command(runs, "packed", "--steps", 3, "--resume"))


def test_ten_micro_batches_at_accumulation_4_are_three_steps(runs):
    flags = ["--documents", documents_for(10, 512), "--epochs", 1, "--row-tokens", 512]
    train.main(command(runs, "ten-1", *flags, "--accumulate", 1))
    train.main(command(runs, "ten-4", *flags, "--accumulate", 4))
    single = [line["supervised"] for line in log(runs, "ten-1")]
    assert len(single) == 10
    assert [line["supervised"] for line in log(runs, "ten-4")] == [sum(single[i : i + 4]) for i in (0, 4, 8)]


@pytest.mark.parametrize("steps", [4, pytest.param(20, marks=pytest.mark.slow)])
def test_two_ranks_equal_one_process_and_resume_on_one(runs, steps, tmp_path):
    """At accumulation 4; in the last window the second rank has no rows."""
    documents, half = documents_for(8 * (steps - 1) + 1, 256), steps // 2
    flags = ["--documents", documents, "--epochs", 1, "--save-every", half]
    names = single, double, resumed = [f"ranks-{kind}-{steps}" for kind in ("1", "2", "21")]
    ranks = start_ranks(command(runs, double, *flags, "--accumulate", 4), tmp_path)
    train.main(command(runs, single, *flags, "--accumulate", 8))
    for process, output in ranks:
        finish(process, output, 0)
    for part in ("settings.json", f"checkpoints/step-{half:08d}"):
        source = runs / double / part
        (shutil.copytree if source.is_dir() else shutil.copy)(source, make_parent(runs / resumed / part))
    train.main(command(runs, resumed, *flags, "--resume", "--accumulate", 8))
    one, lines = weights(runs, single, steps), log(runs, single)
    assert len(lines) == steps and lines[-1]["supervised"] < lines[-2]["supervised"] / 4
    for name in names[1:]:
        for a, b in zip(lines[-len(log(runs, name)) :], log(runs, name), strict=True):
            assert a["supervised"] == b["supervised"] and abs(a["loss"] - b["loss"]) < 1e-5 * a["loss"], (a, b)
            assert abs(a["grad_norm"] - b["grad_norm"]) < 1e-4 * a["grad_norm"]
        for key, x in weights(runs, name, steps).items():
            assert (x.double() - one[key].double()).abs().max() <= 1e-4 * one[key].double().abs().max(), (name, key)


def make_parent(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def windows(empty: bool):
    """Four micro-batches for each of two ranks, 3 supervised tokens on the first, 1 or none on the second; and all rows
    as one batch."""
    draft = toy_draft("deepseek", 1)
    text = torch.randint(32, (8, 1, 20), generator=torch.Generator().manual_seed(1))
    counts = [2, 0, 1, 0, 0, 0, 0 if empty else 1, 0]
    masks = [((torch.arange(20) >= 9) & (torch.arange(20) < 9 + n))[None] for n in counts]
    rows = [toy_batch(draft, x, mask) for x, mask in zip(text, masks, strict=True)]
    return draft, rows, toy_rows(draft, text[:, 0], torch.cat(masks))


def one_window(rank, world, port, found):
    """Gradients of one optimizer step on `world` ranks, of either kind of windows."""
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", f"tcp://localhost:{port}", rank=rank, world_size=world)
    args = train.resolve(train.Settings(device="cpu", clip=1e9))
    for empty in (False, True):
        draft, rows, _ = windows(empty)
        parameters = [p for p in draft.parameters() if p.requires_grad]
        optimizer, loss, gradients = train.make_optimizer(args, parameters), train.TTTLoss(draft), []
        optimizer.step = lambda gradients=gradients, parameters=parameters: gradients.extend(
            p.grad.clone().numpy() for p in parameters
        )
        ours = rows if world == 1 else rows[4 * rank : 4 * rank + 4]
        train.optimizer_step(args, Ranks(rank, world), loss, ours, optimizer, parameters)
        found.put(((rank, empty), gradients))
    if world > 1:
        dist.destroy_process_group()


def test_gradients_agree_over_ranks_and_with_one_process():
    spawn = multiprocessing.get_context("spawn")
    found, alone, port = spawn.Queue(), queue.Queue(), free_port()
    processes = [spawn.Process(target=one_window, args=(r, 2, port, found)) for r in range(2)]
    for process in processes:
        process.start()
    one_window(0, 1, None, alone)
    got = dict(found.get(timeout=120) for _ in range(4))
    for process in processes:
        process.join()
    for (_, empty), single in (alone.get() for _ in range(2)):
        draft, _, whole = windows(empty)
        draft.zero_grad()
        train.TTTLoss(draft)(whole)[0].backward()  # each supervised token counts the same, in whatever micro-batch
        trained = [p.grad.numpy() for p in draft.parameters() if p.requires_grad]
        assert single and any(g.any() for g in single)
        for want, a, b, once in zip(single, got[0, empty], got[1, empty], trained, strict=True):
            assert (a == b).all() and abs(a - want).max() <= 1e-5 * abs(want).max()
            assert abs(want - once).max() <= 1e-5 * abs(once).max()


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_with_an_error(runs):
    """By torchrun itself. On data of its own, so that neither rank cuts the corpus."""
    rows = [{"input_ids": list(range(i, i + 50)), "loss_mask": [0] * 9 + [1] * 41} for i in range(40)]
    (runs / "lost.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(free_port()), "train.py"]
    job = subprocess.Popen(
        [*launcher, *command(runs, "lost", "--steps", 1000, "--data", runs / "lost.jsonl")],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not (runs / "lost" / "log.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (runs / "lost" / "log.jsonl").exists()
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    os.kill(int(children[-1]), signal.SIGKILL)
    job.wait(100)  # raises if it hangs
    assert job.returncode != 0
