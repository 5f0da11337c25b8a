"""Train an EAGLE-3 draft with an MLA backbone against its frozen target.

    python train.py --target deepseek-v3                      # a tiny built-in target is made first; minutes on a CPU
    python train.py --target deepseek-v3 --model PATH         # a local Hugging Face model instead
    python train.py --name NAME --resume                      # go on after an interruption, exactly
    torchrun --nproc-per-node 8 train.py --target kimi-k3     # one process per GPU
    python train.py --export runs/NAME/checkpoints/step-00000300 OUT
    python train.py --plot runs/A runs/B                      # runs over one another, in runs.png

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

from training.entry import ending, guard_loading, handle_signals, interrupt

# OpenMP's threads must sleep while they wait: spinning ones make a step ten times slower, at random, when others work
# on the same cores. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if __name__ in ("__main__", "__mp_main__"):  # what follows takes seconds to load
    guard_loading(__name__)

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from data.files import is_part, remove, remove_parts, replace_with, to_json
from data.regenerate import regenerate
from data.rendering import read_arguments
from data.send import send
from draft_deepseek import TTTLoss
from measuring.costs import even_workload, matrix_rate, memory_of, model_flops, step_memory
from states.write import write_capture
from target.model import Target, load_tokenizer
from training.compiling import autocast, compile_loss, flex_compiles
from training.drafts import export, load_checkpoint, load_draft, make_draft, newest_checkpoint, save_checkpoint, trimmed
from training.evaluation import decode_for_real, evaluate
from training.plotting import outputs, plot
from training.ranks import Ranks, join_ranks
from training.rows import Batch, FollowedRows, Rows, make_rows
from training.settings import DRAFT_VOCAB, Settings, flag, is_built_in, parse, resolve
from training.sources import Source, conversations, open_source
from training.tracking import Track

# ----------------------------------------------------------------------------------------------------------------- main


def main(argv=None) -> None:
    handle_signals(interrupt)  # unwinds, whatever is being done
    given, instead = parse(argv, __doc__)
    transformers_logging.disable_progress_bar()  # one for every file that is read or written
    if instead.export:
        return export(load_draft(instead.export[0]), Path(instead.export[1]), given.export_dtype)
    if instead.plot:
        return plot(*outputs(instead.plot))
    if instead.regenerate:
        return regenerate_conversations(given, instead.regeneration, *instead.regenerate)
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
        with Track(args.track if ranks.rank == 0 else "off", run, begin[0], dataclasses.asdict(given)) as track:
            train(args, ranks, run, loss, rows, optimizer, begin, check, track)
            result = check()
            source.report_unread(args, ranks)
            if ranks.rank == 0:
                result |= decode_for_real(args, source, draft)
                finish(args, run, draft, result)
                track.write("held_out", result)


def finish(args: Settings, run: Path, draft: nn.Module, result: dict) -> None:
    """The draft and, last, result.json: with both of them a run is complete, killed before it does this again."""
    for stale in (run / "result.json", run / "draft"):
        if stale.exists():
            remove(stale)
    if is_servable(draft):
        export(draft, run / "draft", args.export_dtype)
    replace_with(run / "result.json", lambda half: half.write_text(to_json(result) + "\n"))
    report(args, run, result)


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
    send(url, out, list(documents))
    print(f"sent: {out}; train meanwhile with --follow {out}, or now with --data {out}")


def regenerate_conversations(args: Settings, how, url: str, out: str) -> None:
    """--regenerate: those of --data, answered by the server at URL. how: `Regeneration`."""
    if not args.data or args.chat_template or args.render:
        raise ValueError("the server answers those of --data in its own template; give --data, and no other rendering")
    print("\n".join(regenerate(url, out, args.data, how, args.model, read_arguments(args.template_args))))
    print(f"regenerated: {out}; next: train.py --data {out}, or --send it")


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
        f"draft: {type(draft).__name__}, q_lora_rank {cfg.q_lora_rank}, {trained / 1e6:,.2f}M trained parameters, "
        f"{cfg.draft_vocab_size:,} of {cfg.vocab_size:,} tokens\n"
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


# ------------------------------------------------------------------------------------------------------------- training


BAD_STEPS = 10  # so many in a row are skipped before a run gives up


def train(
    args: Settings,
    ranks: Ranks,
    run: Path,
    loss: TTTLoss,
    rows: Rows | FollowedRows,
    optimizer,
    begin,
    check: Callable,
    track: Track,
) -> None:
    """All optimizer steps that are left. SIGINT and SIGTERM end it after a checkpoint, by KeyboardInterrupt.

    begin: steps that are done and micro-batches that all ranks have consumed. check: the evaluation.
    """
    parameters = [p for p in loss.parameters() if p.requires_grad]
    done, consumed = begin
    steps = args.steps or done + rows.steps_after(consumed, args.accumulate * ranks.world)
    ranks.share(loss)
    log = Log(args, ranks, run, done, steps, track)
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

    def __init__(self, args: Settings, ranks: Ranks, run: Path, done: int, steps: int, track: Track):
        self.args, self.ranks, self.run, self.done, self.total, self.last = args, ranks, run, done, steps, done
        self.track = track
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
            self.track.write("train", line, step)
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
            self.track.write("held_out", result, step)
            lengths = "; ".join(f"{kind} {found}" for kind, found in lengths_of(result).items())
            tqdm.write(f"step {step}, on held-out text: {lengths}")
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


# ----------------------------------------------------------------------------------------------------------- the report


def report(args: Settings, run: Path, result: dict) -> None:
    """Every accept length below the text that it was measured on."""
    of = f"{result['slots']:,} slots, chains of {args.ttt_steps}, sampled at temperature 1"
    print(f"\non the held-out documents' own text ({of}):")
    places = {f"at {name} ({x['slots']:,} slots) ": x for name, x in result["by_position"].items()}
    for place, x in {"": result, **(places if len(places) > 1 else {})}.items():
        for kind, lengths in lengths_of(x).items():
            print(f"  {kind:<9} {place}{lengths}")
    print(f"  accuracy  {' '.join(f'{x:.1%}' for x in result['accuracy'])}  (steps 1..{args.ttt_steps})")
    print(f"  on policy {result['on_policy']:.1%} of its tokens are what the target would have said greedily")
    if result["prompts"]:
        where = f"{result['prompts']} held-out prompts{'' if args.data else ' cut mid-text'}"
        print(f"on what the target says itself behind {where}, {args.decode_tokens} new tokens each:")
        for kind, prefix in (("sampled", ""), ("greedy", "greedy_")):
            of = f"{result[f'{prefix}rounds']:,} rounds, {result[f'{prefix}prompts']} prompts"
            length, bigrams = result[f"{prefix}decoded"], result[f"{prefix}bigrams"]
            print(f"  {kind:<9} decoded {length:.2f} tokens a round ({of}), {bigrams:.0%} distinct bigrams")
        print(f"            {result['identical']} of {result['greedy_prompts']} identical to its greedy decoding alone")
        print(f"            (the documents go on with {result['held_out_bigrams']:.0%} distinct bigrams)")
    if result["on_policy"] < 0.5:
        advice = "; a draft learns more from answers that its target generated (--regenerate)" if args.data else ""
        print(
            f"warning: the target would have said only {result['on_policy']:.0%} of the held-out tokens itself, so "
            f"accept lengths on its own text differ{advice}"
        )
    print(f"log: {run / 'log.jsonl'}; next: serve {run / 'draft'} beside its target, or train on with another --name")


def lengths_of(result: dict) -> dict[str, str]:
    """Those on held-out text, greedy and, where the data tell, of sampling at temperature 1."""
    return {
        kind: f"simulated {result[f'{prefix}simulated']:.2f}, walked {result[f'{prefix}walked']:.2f}"
        for kind, prefix in (("greedy", ""), ("sampled", "sampled_"))
        if f"{prefix}walked" in result
    }


def cli(argv=None) -> int:
    """main with its failures as one line and an exit code."""
    how = "; --resume with the run's --name goes on, or --capture, --send and --regenerate again"
    return ending("train.py", main, argv, how)


if __name__ == "__main__":
    sys.exit(cli())
