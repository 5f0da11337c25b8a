"""Train an EAGLE-3 draft with an MLA backbone against its frozen target.

    python train.py --target deepseek-v3                      # a tiny built-in target is made first; minutes on a CPU
    python train.py --target deepseek-v3 --model PATH         # a local Hugging Face model instead
    python train.py --name NAME --resume                      # go on after an interruption, exactly
    torchrun --nproc-per-node 8 train.py --target kimi-k3     # one process per GPU
    python train.py --export runs/NAME/checkpoints/step-00000300 OUT

`main` is the table of contents. Exit codes: 0 done, 1 the disk failed and 130 interrupted (both resumable), 2 a value
that cannot be used.
"""

import contextlib
import dataclasses
import fcntl
import functools
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

# OpenMP's threads must sleep while they wait: spinning ones make a step ten times slower, at random, when others work
# on the same cores. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from capture import prefetched, write_capture
from costs import model_flops, step_memory
from decode import BUCKETS, Accepted, Drafter, choose_verifier, speculative, walk_by_bucket
from draft_deepseek import BLOCK, Metrics, RowBatch, TTTLoss, anchor_mask, attend, block_index
from drafts import export, load_checkpoint, load_draft, make_draft, save_checkpoint, trimmed
from settings import DRAFT_VOCAB, Settings, is_built_in, parse, resolve
from sources import FollowedRows, Rows, Source, Window, open_source
from target import Target

# ----------------------------------------------------------------------------------------------------------------- main


def main(argv=None) -> None:
    given, instead = parse(argv)
    if instead.export:
        return export(load_draft(instead.export[0]), Path(instead.export[1]), given.export_dtype)
    args = resolve(given)
    transformers_logging.disable_progress_bar()  # one for every file that is read or written
    signal.signal(signal.SIGTERM, interrupt)  # unwinds, whatever is being done
    if instead.capture:
        return capture(args, Path(instead.capture))
    with join_ranks(args) as ranks, nothing() if instead.dry_run else open_run(given, ranks) as run:
        torch.manual_seed(args.seed)
        source = open_source(args, ranks)
        draft = make_draft(args, source, DRAFT_VOCAB["built-in" if is_built_in(args) else "model"])
        rows, held_out = make_rows(args, ranks, source, draft)
        say_plan(args, ranks, draft, rows)
        if instead.dry_run:
            return
        loss = TTTLoss(draft, args.ttt_steps, args.loss, recompute=args.recompute)
        compile_loss(loss, args.compile)
        check = functools.partial(evaluate, args, ranks, loss, held_out)
        train(args, ranks, run, loss, rows, check)
        result = check()
        if ranks.rank == 0:
            result |= decode_for_real(args, source, draft)
            export(draft, run / "draft", args.export_dtype)
            report(args, run, result)


nothing = contextlib.nullcontext


def interrupt(number, frame):
    raise KeyboardInterrupt


class Ranks(NamedTuple):
    """This process among those of `torchrun`; alone without it."""

    rank: int = 0
    world: int = 1

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, items: list) -> list:
        """The items of all ranks, in their order."""
        if self.world == 1:
            return items
        found = [None] * self.world
        dist.all_gather_object(found, items)
        return [item for part in found for item in part]

    def first_alone(self):
        """Rank 0 goes through the block first, the others after it."""
        return first_alone(self) if self.world > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def first_alone(ranks: Ranks):
    if ranks.rank > 0:
        dist.barrier()
    yield
    if ranks.rank == 0:
        dist.barrier()


@contextlib.contextmanager
def join_ranks(args: Settings):
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.device(args.device).type == "cuda":
        args.device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def open_run(given: Settings, ranks: Ranks):
    """runs/<name> with its settings and versions, the same on all ranks, held by this job alone.

    It is made before anything slow begins, so that a run stopped at any moment resumes with its settings. ValueError:
    it exists and is not to be resumed, is complete, or another process trains in it. A new run that ends in a
    ValueError before its first step leaves nothing.
    """
    box = [Path(given.runs) / (given.name or f"{given.target}-{time.strftime('%Y%m%d-%H%M%S')}")]
    if ranks.world > 1:
        dist.broadcast_object_list(box)  # clocks differ
    (run,) = box
    if ranks.rank > 0:
        yield run
        return
    is_new = not run.exists()
    if not is_new and not given.resume:
        raise ValueError(f"{run} exists already; --resume goes on with it, another --name starts anew")
    if (run / "draft").exists():
        raise ValueError(f"{run} is complete, its draft is in {run / 'draft'}; start another --name")
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process trains in {run}; choose another --name or stop that one") from None
        settings = json.dumps(dataclasses.asdict(given) | {"torch": torch.__version__}, indent=1)
        half = run / "settings.json.part"
        half.write_text(settings + "\n")
        os.replace(half, run / "settings.json")
        try:
            yield run
        except ValueError:
            if is_new and not (run / "log.jsonl").exists():
                shutil.rmtree(run)
            raise


@functools.cache
def flex_compiles(device: str) -> bool:
    """Whether FlexAttention compiles for this device; if not, says so, and plain attention takes its place."""
    q = torch.randn(1, 1, BLOCK, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    slots = torch.arange(BLOCK, device=device)[None]
    mask = anchor_mask(slots, torch.zeros_like(slots))
    try:
        o, lse = torch.compile(attend, fullgraph=True)(q, q, q, mask._replace(blocks=block_index(mask, BLOCK)), 0.125)
        (o.sum() + lse.sum()).backward()
    except Exception as error:  # whatever the compilers of some device raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"FlexAttention does not compile for {device} ({reason}); plain attention takes more time and memory")
        return False
    return True


def compile_loss(loss: TTTLoss, mode: str) -> None:
    """Make the S-step loss one static graph; the only place that compiles. mode: off, default or max-autotune."""
    if mode != "off":
        torch._dynamo.config.recompile_limit = 16  # two capacities, in training and evaluation, and some to spare
        loss.compile(fullgraph=True, dynamic=False, mode=mode)


def autocast(args: Settings):
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bfloat16")


# ------------------------------------------------------------------------------------------------------------- training


BAD_STEPS = 10  # so many in a row are skipped before a run gives up


def train(args: Settings, ranks: Ranks, run: Path, loss: TTTLoss, rows: Rows) -> None:
    """All optimizer steps that are left. SIGINT and SIGTERM end it after a checkpoint, by KeyboardInterrupt."""
    parameters = [p for p in loss.parameters() if p.requires_grad]
    optimizer = make_optimizer(args, parameters)
    per_step = args.accumulate * ranks.world
    done, consumed = load_checkpoint(run, loss.draft, optimizer, args.device)  # steps, micro-batches of all ranks
    steps = args.steps or done + -(-(rows.count(args.epochs) - consumed) // per_step)
    model = DistributedDataParallel(loss) if ranks.world > 1 else loss
    first = ranks.rank == 0
    if first:
        shape = f"{args.row_tokens} slots and {rows.anchors} anchors, {args.batch_rows * per_step} rows a step"
        print(f"rows of {shape}, {steps} steps{f', {done} of them done' if done else ''}, on {args.device}")
        log = trimmed_log(run / "log.jsonl", done)
    bar = tqdm(
        range(done + 1, steps + 1), desc="training the draft", unit="step", initial=done, total=steps, disable=not first
    )
    empty, bad, start = 0, 0, time.perf_counter()
    with Interruption() as interruption:
        for step in bar:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate(step - 1, steps, args.warmup)
            ours = [consumed + m * ranks.world + ranks.rank for m in range(args.accumulate)]
            consumed += per_step
            line = optimizer_step(args, ranks, model, [rows[i] for i in ours], optimizer, parameters)
            empty += line["supervised"] == 0
            bad = 0 if math.isfinite(line["grad_norm"]) else bad + 1
            if bad:
                line["skipped"] = ranks.gather([name for i in ours for name in rows.names(i)])
            now = time.perf_counter()
            line |= {"lr": optimizer.param_groups[0]["lr"], "tokens_per_second": line["supervised"] / (now - start)}
            start = now
            if first:
                print(json.dumps({"step": step} | line), file=log, flush=True)
                speed = f"{line['tokens_per_second']:,.0f}"
                bar.set_postfix(loss=f"{line['loss']:.3f}", accept=f"{line['accept_length']:.2f}", supervised_s=speed)
                if step in (50, steps) and 2 * empty > step - done:
                    tqdm.write(f"warning: {empty} of {step - done} steps had nothing to learn; check the loss mask")
            if bad == BAD_STEPS:
                raise ValueError(
                    f"loss or gradient was not finite for {bad} steps in a row, up to step {step}, whose data was "
                    f"{', '.join(line['skipped'][:8])}; {run / 'log.jsonl'} names that of all of them"
                )
            stop = bool(ranks.sum(torch.tensor(float(interruption.asked), device=args.device)) > 0)
            if first and (stop or step % args.save_every == 0 or step == steps):
                save_checkpoint(run, loss.draft, optimizer, step, consumed, args.keep)
            if stop:
                raise KeyboardInterrupt


def make_optimizer(args: Settings, parameters: list) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    for p in parameters:  # for good: a gradient adopted from a captured graph would be overwritten by its next replay
        p.grad = torch.zeros_like(p)
    return torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=torch.device(args.device).type == "cuda")


def learning_rate(step: int, steps: int, warmup: float) -> float:
    """Share of the peak: linear warm-up, then a cosine down to a tenth."""
    rise = max(1, round(warmup * steps))
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def optimizer_step(args, ranks: Ranks, model: nn.Module, window: list[RowBatch], optimizer, parameters: list) -> dict:
    """Forward and backward of the window's micro-batches over the counts of all ranks' windows, then one update.

    With nothing supervised anywhere nothing moves: AdamW would, by its momentum, even on zero gradients.
    """
    supervised = ranks.sum(sum((rows.teacher_index >= 0).sum((1, 2)) for rows in window))
    denominators = supervised.clamp(min=1).float()
    sums = torch.zeros(3, args.ttt_steps, dtype=torch.float64, device=denominators.device)  # hits, prefix hits, valid
    total = torch.zeros((), dtype=torch.float64, device=denominators.device)
    for m, rows in enumerate(window, start=1):
        if rows.features.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        last = m == len(window) or ranks.world == 1
        with contextlib.nullcontext() if last else model.no_sync():
            with autocast(args):
                loss, metrics = model(rows._replace(denominators=denominators))
            (loss * ranks.world).backward()  # DistributedDataParallel takes the mean over ranks, the loss is a sum
        total += loss.detach()
        sums += torch.stack([metrics.step_hits, metrics.step_prefix_hits, metrics.step_valid])
    count = int(supervised.sum())
    hits, prefix_hits, valid = ranks.sum(sums)
    norm = nn.utils.clip_grad_norm_(parameters, args.clip)
    if count and norm.isfinite():
        optimizer.step()
    for p in parameters:
        p.grad.zero_()
    return {
        "loss": float(ranks.sum(total)),
        "accuracy": float(hits.sum()) / max(count, 1),
        "accept_length": 1 + float((prefix_hits / valid.clamp(min=1)).sum()),
        "supervised": count,
        "grad_norm": float(norm),
    }


class Interruption:
    """Within it SIGINT and SIGTERM only ask to stop; a second one stops at once."""

    def __enter__(self):
        self.asked = False
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(args: Settings, ranks: Ranks, loss: TTTLoss, rows: Rows) -> dict:
    """Over held-out rows: accept lengths at S drafted tokens (simulated, walked) and accuracy per step, all pooled."""
    walked, sums = Accepted(0, 0), torch.zeros(4, args.ttt_steps, dtype=torch.float64, device=args.device)
    batches = rows.epoch(0)[: max(1, args.eval_rows // args.batch_rows)]
    for batch in batches[ranks.rank :: ranks.world]:
        made = rows.make(batch)
        with autocast(args):
            _, m = loss(made)
        walked += walk(made, m)
        sums += torch.stack([m.step_prefix_hits, m.step_valid, m.step_hits, m.step_supervised])
    prefix_hits, valid, hits, supervised = ranks.sum(sums)
    walked = Accepted(*ranks.sum(torch.tensor(walked, dtype=torch.float64, device=args.device)).tolist())
    return {
        "simulated": 1 + float((prefix_hits / valid.clamp(min=1)).sum()),
        "walked": walked.length,
        "accuracy": (hits / supervised.clamp(min=1)).tolist(),
        "slots": int(valid[0]),
    }


def decode_for_real(args: Settings, target: Target, draft: nn.Module, documents: list) -> dict:
    """Greedy speculative decoding after held-out prompts, its tokens compared with the target's own greedy ones."""
    accepted, same = Accepted(0, 0), 0
    prompts = [d.tokens[: int(d.loss_mask.int().argmax())] for d in documents[: args.decode_prompts]]
    for prompt in tqdm(prompts, desc="decoding", unit="prompt", disable=not prompts):
        tokens, rounds = speculative_greedy(draft, target, prompt, args.decode_tokens, args.ttt_steps)
        accepted += rounds
        same += torch.equal(tokens, target.greedy(prompt, args.decode_tokens))
    return {"prompts": len(prompts), "identical": same, "rounds": accepted.rounds, "decoded": accepted.length}


def report(args: Settings, run: Path, result: dict) -> None:
    (run / "result.json").write_text(json.dumps(result) + "\n")
    k = args.ttt_steps
    print(f"\nheld out, greedy, chains of {k}, {result['slots']:,} slots:")
    print(f"  accept length   simulated {result['simulated']:.2f}, walked {result['walked']:.2f}")
    print(f"  accuracy        {' '.join(f'{x:.1%}' for x in result['accuracy'])}  (steps 1..{k})")
    if result["prompts"]:
        what = f"{result['prompts']} prompts of {args.decode_tokens} new tokens, {result['rounds']} rounds"
        print(f"  decoded         {result['decoded']:.2f} tokens a round ({what})")
        print(
            f"                  {result['identical']} of {result['prompts']} identical to the target's greedy decoding"
        )
    print(f"log: {run / 'log.jsonl'}; next: serve {run / 'draft'} beside its target, or train on with another --name")


def cli(argv=None) -> int:
    """main with its failures as one line and an exit code."""
    try:
        main(argv)
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; --resume with the run's --name goes on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(cli())
