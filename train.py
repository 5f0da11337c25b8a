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
import math
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from entry import ending, guard_loading, handle_signals, interrupt

# OpenMP's threads must sleep while they wait: spinning ones make a step ten times slower, at random, when others work
# on the same cores. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if __name__ in ("__main__", "__mp_main__"):  # what follows takes seconds to load
    guard_loading(__name__)

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from capture import send, write_capture
from costs import even_workload, matrix_rate, memory_of, model_flops, step_memory
from decode import BUCKETS, Accepted, Drafter, choose_verifier, speculative, walk_by_bucket
from draft_deepseek import BLOCK, Metrics, RowChunks, TTTLoss, anchor_mask, attend, block_index
from drafts import export, load_checkpoint, load_draft, make_draft, newest_checkpoint, save_checkpoint, trimmed
from files import is_part, remove, remove_parts, replace_with, to_json
from settings import DRAFT_VOCAB, Settings, flag, is_built_in, parse, resolve
from sources import Batch, FollowedRows, Rows, Source, conversations, make_rows, open_source
from target import Target, load_tokenizer

# ----------------------------------------------------------------------------------------------------------------- main


def main(argv=None) -> None:
    handle_signals(interrupt)  # unwinds, whatever is being done
    given, instead = parse(argv, __doc__)
    transformers_logging.disable_progress_bar()  # one for every file that is read or written
    if instead.export:
        return export(load_draft(instead.export[0]), Path(instead.export[1]), given.export_dtype)
    args = resolve(given)
    if instead.capture:
        return capture(args, Path(instead.capture))
    if instead.send:
        return send_conversations(args, *instead.send)
    with join_ranks(args) as ranks, contextlib.nullcontext() if instead.dry_run else open_run(given, ranks) as run:
        source = open_source(args, ranks)
        torch.manual_seed(args.seed)
        newest = None if instead.dry_run else newest_checkpoint(run)
        draft = make_draft(args, source, DRAFT_VOCAB["built-in" if is_built_in(args) else "model"], newest)
        on_cuda = torch.device(args.device).type == "cuda"
        make_mask = on_cuda and args.compile != "off" and flex_compiles(args.device)
        rows, held_out = make_rows(args, source, draft.draft_ids, make_mask)
        ranks.print(plan(args, ranks, source, draft, rows))
        if instead.dry_run:
            return
        check_memory(args, step_bytes(args, draft))
        loss = TTTLoss(draft, args.ttt_steps, args.loss)
        compile_loss(loss, args.compile)
        check = functools.partial(evaluate, args, ranks, loss, held_out)
        optimizer = make_optimizer(args, [p for p in draft.parameters() if p.requires_grad])
        begin = load_checkpoint(run, draft, optimizer, args.device)
        write_settings(ranks, run, given)  # those that the run really goes on with
        train(args, ranks, run, loss, rows, optimizer, begin, check)
        result = check()
        source.report_unread(args, ranks)
        if ranks.rank == 0:
            result |= decode_for_real(args, source, draft)
            finish(args, run, draft, result)


def finish(args: Settings, run: Path, draft: nn.Module, result: dict) -> None:
    """The draft and, last, result.json: with both of them a run is complete, killed before it does this again."""
    for stale in (run / "result.json", run / "draft"):
        if stale.exists():
            remove(stale)
    if is_servable(draft):
        export(draft, run / "draft", args.export_dtype)
    replace_with(run / "result.json", lambda half: half.write_text(to_json(result) + "\n"))
    report(args, run, result)


class Ranks(NamedTuple):
    """This process among those of `torchrun`; alone without it."""

    rank: int = 0
    world: int = 1

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def share(self, module: nn.Module) -> None:
        """The first rank's parameters and buffers, on all."""
        if self.world > 1:
            for x in [*module.parameters(), *module.buffers()]:
                dist.broadcast(x.data, 0)

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
    it exists and is not to be resumed, is complete, or another process trains in it. A new run that
    fails before its first step leaves nothing.
    """
    box = [Path(given.runs) / (given.name or f"{given.target}-{time.strftime('%Y%m%d-%H%M%S')}")]
    if ranks.world > 1:
        dist.broadcast_object_list(box)  # clocks differ
    (run,) = box
    if ranks.rank > 0:
        yield run
        return
    is_new = not run.exists() or given.resume and is_untouched(run)
    if given.resume and is_new:
        print(f"{run} does not exist yet: a new run, with the settings given now")
    if given.resume and not is_new and not (run / "settings.json").is_file():
        raise ValueError(f"{run} has no settings.json, so it is no run that can be resumed; name another")
    if not is_new and not given.resume:
        raise ValueError(f"{run} exists already; --resume goes on with it, another --name starts anew")
    if (run / "draft").exists() and (run / "result.json").exists():
        raise ValueError(f"{run} is complete, its draft is in {run / 'draft'}; start another --name")
    run.mkdir(parents=True, exist_ok=True)
    with (run / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ValueError(f"another process trains in {run}; choose another --name or stop that one") from None
        for folder in (run, run / "checkpoints"):
            remove_parts(folder)
        try:
            if is_new:
                write_settings(ranks, run, given)
            print(f"run: {run}", flush=True)
            yield run
        except Exception:
            if is_new and not (run / "log.jsonl").exists():
                shutil.rmtree(run)
            raise


def is_untouched(run: Path) -> bool:
    """A run that was stopped before it had settings."""
    return run.is_dir() and all(path.name == "lock" or is_part(path) for path in run.iterdir())


def write_settings(ranks: Ranks, run: Path, given: Settings) -> None:
    if ranks.rank == 0:
        settings = to_json(dataclasses.asdict(given) | {"torch": torch.__version__}, indent=1)
        replace_with(run / "settings.json", lambda half: half.write_text(settings + "\n"))


def capture(args: Settings, out: Path) -> None:
    """--capture: the target's states at all documents, for later runs with --data OUT."""
    if "WORLD_SIZE" in os.environ:
        raise ValueError("--capture runs as one process; give each its own --data and OUT")
    source = open_source(args, Ranks())
    if not isinstance(source.target, Target):
        raise ValueError(f"--capture needs a target that runs here and documents; {args.data} are states already")
    write_capture(out, source.target, [*source.training, *source.held_out], getattr(torch, args.capture_dtype))
    print(f"captured: {out}; next: train.py --data {out} --model {args.model or source.target.config.name_or_path}")


def send_conversations(args: Settings, url: str, out: str) -> None:
    """--send: those of --data, as --model's tokenizer and template make them, through a running vLLM."""
    if not (args.model and args.data):
        raise ValueError("conversations are sent from --data, with the tokenizer of --model; give both")
    documents = conversations(args, load_tokenizer(Path(args.model), args.trust_remote_code), Ranks())
    send(url.rstrip("/"), out, list(documents))
    print(f"sent: {out}; train meanwhile with --follow {out}, or now with --data {out}")


def plan(args: Settings, ranks: Ranks, source: Source, draft: nn.Module, rows: Rows | FollowedRows) -> str:
    """What the run will be, and what it needs by formula: rows, fill, steps, memory, hours at the matrix rate."""
    cfg, t, s = draft.config, args.row_tokens, args.ttt_steps
    trained, memory = parameters_of(draft, trained=True), step_bytes(args, draft)
    tokens, anchors = (sum(column) for column in zip(*rows.sizes, strict=True))
    learned = source.training.learned
    per_step, batches = args.accumulate * ranks.world, rows.per_epoch
    steps = args.steps or rows.steps_after(0, per_step)
    epochs, count = steps * per_step / batches, batches * args.batch_rows
    c = 2 if args.precision == "bfloat16" else 4
    width = len(source.aux_layers) * source.hidden_size + source.width
    keys = int(sum(a * s * (n - a / 2) for n, a in rows.sizes))  # answers end their documents
    flops = epochs * sum(model_flops(cfg, **even_workload(tokens, anchors, learned, keys, s)).values())
    rate = matrix_rate(args.device, getattr(torch, args.precision), 8192 if args.device.startswith("cuda") else 1024)
    hours = flops / rate / ranks.world / 3600
    warning = "" if is_servable(draft) else "warning: engines load no draft without q_lora_rank; no export\n"
    return warning + (
        f"draft: {type(draft).__name__}, {trained / 1e6:,.2f}M trained parameters, {cfg.draft_vocab_size:,} of "
        f"{cfg.vocab_size:,} tokens\n"
        f"rows: {count:,} of {t} slots an epoch, {tokens / (count * t):.0%} filled; chunks of {args.chunk} anchors "
        f"compute {rows.computed / max(anchors, 1):.2f} times the {anchors:,} needed; {steps:,} steps of "
        f"{args.batch_rows * per_step} rows\n"
        f"states: {width * c:,} bytes a token in {args.precision}, {width * c * tokens / 1e9:,.2f} GB an epoch\n"
        f"cost: about {memory / 1e9:,.1f} GB a rank besides the target, {flops:.1e} FLOP, {hours:,.2g} h if all ran "
        f"at the matrix rate of {args.device}"
    )


def parameters_of(draft: nn.Module, trained: bool) -> int:
    return sum(p.numel() for p in draft.parameters() if p.requires_grad == trained)


def step_bytes(args: Settings, draft: nn.Module) -> int:
    """Of an optimizer step at its peak; only the current micro-batch lies on the device."""
    t, c = args.row_tokens, 2 if args.precision == "bfloat16" else 4
    counts = [parameters_of(draft, x) for x in (True, False)]
    slots, chunk = args.batch_rows * t, args.batch_rows * args.chunk
    return sum(step_memory(draft.config, *counts, slots, chunk, c, steps=args.ttt_steps).values())


def check_memory(args: Settings, needed: int) -> None:
    """ValueError where a step cannot fit, even into all the memory of the device."""
    if needed > (there := memory_of(args.device)):
        shape = ("row_tokens", "batch_rows", "chunk", "ttt_steps")
        raise ValueError(
            f"a step needs about {needed / 1e9:,.1f} GB, {args.device} has {there / 1e9:,.1f}; take less of "
            f"{', '.join(f'{flag(name)} {getattr(args, name)}' for name in shape)}"
        )


def is_servable(draft: nn.Module) -> bool:
    return draft.config.q_lora_rank is not None


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


def compile_loss(loss: TTTLoss, mode: str | None, **options) -> None:
    """Make the keys of a row and the S-step loss of a chunk one static graph each, whatever the row's number of chunks;
    the only place that compiles. mode: off, or torch.compile's; its other options as they are.

    Chunks are captured as CUDA graphs by max-autotune. The keys are a few large kernels, which gain nothing by it.
    """
    if mode == "off":
        return
    plain = "max-autotune-no-cudagraphs" if mode == "max-autotune" else mode
    loss.keys = torch.compile(loss.keys, fullgraph=True, dynamic=False, mode=plain, **options)
    loss.chunk = torch.compile(loss.chunk, fullgraph=True, dynamic=False, mode=mode, **options)


def autocast(args: Settings):
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bfloat16")


# ------------------------------------------------------------------------------------------------------------- training


BAD_STEPS = 10  # so many in a row are skipped before a run gives up


def train(
    args: Settings, ranks: Ranks, run: Path, loss: TTTLoss, rows: Rows | FollowedRows, optimizer, begin, check: Callable
) -> None:
    """All optimizer steps that are left. SIGINT and SIGTERM end it after a checkpoint, by KeyboardInterrupt.

    begin: steps that are done and micro-batches that all ranks have consumed. check: the evaluation.
    """
    parameters = [p for p in loss.parameters() if p.requires_grad]
    done, consumed = begin
    steps = args.steps or done + rows.steps_after(consumed, args.accumulate * ranks.world)
    ranks.share(loss)
    log = Log(args, ranks, run, done, steps)
    saved = done
    with Interruption(rows.stop) as interruption, contextlib.closing(rows.windows(consumed, ranks)) as windows, log:
        for step in log.steps():
            window = next(windows)
            if not ranks.sum(torch.tensor(float(not window.ended), device=args.device)):
                break  # a stream that ended on all ranks
            consumed = window.consumed
            for group in optimizer.param_groups:
                group["lr"] = args.lr * learning_rate(step - 1, steps, args.warmup)
            line = optimizer_step(args, ranks, loss, window.batches, optimizer, parameters)
            rows.used(window)
            log.write(step, line | {"lr": optimizer.param_groups[0]["lr"]}, window.documents)
            if args.eval_every and step % args.eval_every == 0 and step < steps:
                log.evaluation(step, check())
            stop = bool(ranks.sum(torch.tensor(float(interruption.asked), device=args.device)) > 0)
            if stop or step % args.save_every == 0 or step == steps:
                saved = save(ranks, run, loss.draft, optimizer, step, consumed, args.keep)
            if stop:
                raise KeyboardInterrupt
        if log.last == 0:
            raise ValueError(f"{args.follow or args.data} brought nothing to train on; is {run} to go on, --resume it")
        if saved < log.last:
            save(ranks, run, loss.draft, optimizer, log.last, consumed, args.keep)
        if interruption.asked:
            raise KeyboardInterrupt


def save(ranks: Ranks, run: Path, draft: nn.Module, optimizer, step: int, consumed: int, keep: int) -> int:
    if ranks.rank == 0:
        save_checkpoint(run, draft, optimizer, step, consumed, keep)
    return step


class Log:
    """What a run says while it trains: a bar, a line a step in log.jsonl, a line an evaluation in eval.jsonl.

    ValueError after BAD_STEPS steps in a row whose gradient was not finite, with the data they were made from.
    """

    def __init__(self, args: Settings, ranks: Ranks, run: Path, done: int, steps: int):
        self.args, self.ranks, self.run, self.done, self.total, self.last = args, ranks, run, done, steps, done
        self.empty, self.bad, self.start, self.first = 0, 0, time.perf_counter(), ranks.rank == 0

    def __enter__(self):
        if self.first:
            self.files = [trimmed(self.run / name, self.done) for name in ("log.jsonl", "eval.jsonl")]
        return self

    def __exit__(self, *error):
        if self.first:
            for file in self.files:
                with contextlib.suppress(OSError):  # what a full disk did not take was said
                    file.close()

    def steps(self):
        """Step numbers to come, shown by a bar; without end where the data's length is not known for sure."""
        numbers = itertools.count(self.done + 1)
        if not self.args.follow or self.args.steps:
            numbers = range(self.done + 1, self.total + 1)
        how = {"desc": "training the draft", "unit": "step", "initial": self.done, "total": self.total}
        self.bar = tqdm(numbers, **how, disable=not self.first)
        return self.bar

    def write(self, step: int, line: dict, documents: list) -> None:
        self.last, self.empty = step, self.empty + (line["supervised"] == 0)
        self.bad = 0 if math.isfinite(line["grad_norm"]) else self.bad + 1
        if self.bad:
            line["skipped"] = self.ranks.gather([d.source for d in documents])
        now = time.perf_counter()
        line["tokens_per_second"], self.start = line["supervised"] / (now - self.start), now
        if self.first:
            self.append(0, {"step": step} | line)
            speed = f"{line['tokens_per_second']:,.0f}"
            self.bar.set_postfix(loss=f"{line['loss']:.3f}", accept=f"{line['accept_length']:.2f}", supervised_s=speed)
            seen = step - self.done
            if step in (self.done + 50, self.total) and 2 * self.empty > seen:
                tqdm.write(f"warning: {self.empty} of {seen} steps had nothing to learn; check the loss mask")
        if self.bad == BAD_STEPS:
            raise ValueError(
                f"loss or gradient was not finite for {self.bad} steps in a row, up to step {step}, whose data was "
                f"{', '.join(line['skipped'][:8])}; {self.run / 'log.jsonl'} names that of all of them"
            )

    def append(self, file: int, line: dict) -> None:
        try:
            print(to_json(line), file=self.files[file], flush=True)
        except OSError as error:
            name, reason = self.files[file].name, error.strerror
            raise OSError(f"{name} cannot be written ({reason}); --resume goes on from the last checkpoint") from error

    def evaluation(self, step: int, result: dict) -> None:
        if self.first:
            self.append(1, {"step": step} | result)
            tqdm.write(f"step {step}, held out: simulated {result['simulated']:.2f}, walked {result['walked']:.2f}")
        self.start = time.perf_counter()


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
    rise, step = max(1, round(warmup * steps)), min(step, steps - 1)  # a stream may be longer than was known
    if step < rise:
        return (step + 1) / rise
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def optimizer_step(args, ranks: Ranks, loss: TTTLoss, window: list[Batch], optimizer, parameters: list) -> dict:
    """Forward and backward of the window's micro-batches over the counts of all ranks' windows, then one update.

    With nothing supervised anywhere nothing moves: AdamW would, by its momentum, even on zero gradients.
    """
    supervised = ranks.sum(sum(batch.rows().supervised for batch in window))
    denominators, mean_alpha = supervised.clamp(min=1).float(), None
    if args.loss == "lambda":  # its weight is of the whole step, not of a micro-batch: one pass without gradients
        with autocast(args):
            mean_alpha = ranks.sum(sum(loss.alpha(batch.rows()) for batch in window)) / denominators
    sums = torch.zeros(3, args.ttt_steps, dtype=torch.float64, device=denominators.device)  # hits, prefix hits, valid
    total = torch.zeros((), dtype=torch.float64, device=denominators.device)
    for batch in window:
        rows = batch.rows()
        rows.denominators, rows.mean_alpha = denominators, mean_alpha
        with autocast(args):
            value, metrics = loss.learn(rows)
        total += value
        sums += torch.stack([metrics.step_hits, metrics.step_prefix_hits, metrics.step_valid])
    sum_gradients(ranks, parameters)
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


BUCKET = 64 * 2**20  # numbers summed over ranks at a time


def sum_gradients(ranks: Ranks, parameters: list) -> None:
    """The gathered gradients, once a step: several backwards made them, and none touches every parameter.

    The loss is a sum over the counts of all ranks, so gradients add up.
    """
    if ranks.world == 1:
        return
    buckets, room = [], 0
    for p in parameters:
        if p.grad.numel() > room:
            buckets.append([])
            room = max(BUCKET, p.grad.numel())
        buckets[-1].append(p.grad)
        room -= p.grad.numel()
    for bucket in buckets:
        flat = ranks.sum(torch.cat([x.flatten() for x in bucket]))
        for x, part in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
            x.copy_(part.view_as(x))


class Interruption:
    """Within it SIGINT and SIGTERM only ask to stop, and call `wake` for what may be waiting; a second one stops at
    once."""

    def __init__(self, wake: Callable):
        self.asked, self.wake = False, wake

    def __enter__(self):
        self.before = {s: signal.signal(s, self.ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def ask(self, number, frame):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.wake()

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)


# ----------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(args: Settings, ranks: Ranks, loss: TTTLoss, held_out: Rows | FollowedRows) -> dict:
    """Over held-out rows: accept lengths at S drafted tokens (simulated, walked), by position too, and accuracy per
    step, all pooled; `on_policy` is the share of learned tokens that are the teacher's own choice."""
    new = dict(dtype=torch.float64, device=args.device)
    walked, chains = torch.zeros(len(BUCKETS), 2, **new), torch.zeros(len(BUCKETS), 2, args.ttt_steps, **new)
    steps, own = torch.zeros(2, args.ttt_steps, **new), torch.zeros(2, **new)
    for rows in held_out.some(args.eval_rows, ranks):
        with autocast(args):
            _, m = loss.learn(rows)
        walked += torch.tensor(list(walk_by_bucket(rows, m).values()), **new)
        chains += chains_by_bucket(rows, m).to(args.device)
        steps += torch.stack([m.step_hits, m.step_supervised])
        own += torch.tensor(on_policy(rows), **new)
    walked, chains, (hits, supervised), (same, learned) = (ranks.sum(x) for x in (walked, chains, steps, own))
    return accept_lengths(walked.sum(0), chains.sum(0)) | {
        "accuracy": (hits / supervised.clamp(min=1)).tolist(),
        "on_policy": float(same / learned.clamp(min=1)),
        "by_position": {
            name: accept_lengths(w, c) for name, w, c in zip(BUCKETS, walked, chains, strict=True) if w[1] > 0
        },
    }


def accept_lengths(walked: Tensor, chains: Tensor) -> dict:
    """walked (tokens, rounds), chains [2,S] (right up to step s, valid up to s)."""
    hits, valid = chains
    simulated = 1 + float((hits / valid.clamp(min=1)).sum())
    return {"simulated": simulated, "walked": Accepted(*walked.tolist()).length, "slots": int(valid[0])}


def chains_by_bucket(rows: RowChunks, m: Metrics) -> Tensor:
    """[buckets,2,S]: chains right up to step s, and valid ones, by the position they start at."""
    position = rows.position.cpu().gather(1, rows.anchors.clamp(min=0))
    chains = torch.stack([m.hit.cpu() & rows.valid, rows.valid]).long().cumprod(1)  # [2,S,B,A]
    ends = [0, *BUCKETS.values()]
    inside = torch.stack([(position >= a) & (position < b) for a, b in itertools.pairwise(ends)])
    return torch.einsum("csba,kba->kcs", chains.double(), inside.double())


def on_policy(rows: RowChunks) -> tuple[int, int]:
    """How many learned tokens are what the target would have said greedily, and of how many."""
    document, tokens = (x.cpu() for x in (rows.document, rows.tokens))
    counted = rows.learned[:, :-1] & (document[:, 1:] == document[:, :-1])
    return int((counted & (rows.choice[:, :-1] == tokens[:, 1:])).sum()), int(counted.sum())


def decode_for_real(args: Settings, source: Source, draft: nn.Module) -> dict:
    """Greedy speculative decoding after held-out prompts, its tokens compared with the target's own greedy ones."""
    accepted, same, target = Accepted(0, 0), 0, source.target
    prompts = [d.tokens[: int(d.loss_mask.int().argmax())] for d in source.held_out[: args.decode_prompts]]
    prompts = [prompt for prompt in prompts if len(prompt)]
    if not isinstance(target, Target):
        prompts = []  # only its states were at hand
    verifier = choose_verifier(target) if prompts else None
    for prompt in tqdm(prompts, desc="decoding", unit="prompt", disable=not prompts):
        drafter = Drafter(draft, 1, len(prompt) + args.decode_tokens, args.ttt_steps)
        (decoded,) = speculative(drafter, target, [prompt], args.decode_tokens, verifier=verifier)
        accepted += decoded.accepted
        same += torch.equal(decoded.tokens, target.greedy(prompt, args.decode_tokens).cpu())
    return {"prompts": len(prompts), "identical": same, "rounds": accepted.rounds, "decoded": accepted.length}


def report(args: Settings, run: Path, result: dict) -> None:
    k = args.ttt_steps
    print(f"\nheld out, greedy, chains of {k}, {result['slots']:,} slots:")
    print(f"  accept length   simulated {result['simulated']:.2f}, walked {result['walked']:.2f}")
    if len(result["by_position"]) > 1:
        for name, x in result["by_position"].items():
            place = f"{name} ({x['slots']:,} slots)"
            print(f"    at {place:<24} simulated {x['simulated']:.2f}, walked {x['walked']:.2f}")
    print(f"  accuracy        {' '.join(f'{x:.1%}' for x in result['accuracy'])}  (steps 1..{k})")
    if result["prompts"]:
        what = f"{result['prompts']} prompts of {args.decode_tokens} new tokens, {result['rounds']} rounds"
        print(f"  decoded         {result['decoded']:.2f} tokens a round ({what})")
        print(
            f"                  {result['identical']} of {result['prompts']} identical to the target's greedy decoding"
        )
    if args.data and result["on_policy"] < 0.5:
        print(
            f"warning: the target would have said only {result['on_policy']:.0%} of the learned tokens itself; a draft "
            "learns more from answers that its target generated"
        )
    print(f"log: {run / 'log.jsonl'}; next: serve {run / 'draft'} beside its target, or train on with another --name")


def cli(argv=None) -> int:
    """main with its failures as one line and an exit code."""
    return ending("train.py", main, argv, "; --resume with the run's --name goes on, or --capture and --send again")


if __name__ == "__main__":
    sys.exit(cli())
