"""Train an EAGLE-3 draft with an MLA backbone against its frozen target.

    python train.py --target deepseek-v3                      # a tiny built-in target is made first; minutes on a CPU
    python train.py --target deepseek-v3 --model PATH         # a local Hugging Face model instead
    python train.py --name NAME --resume                      # go on after an interruption, exactly
    torchrun --nproc-per-node 8 train.py --target kimi-k3     # one process per GPU
    python train.py --export runs/NAME/checkpoints/step-00000300 OUT

`main` is the table of contents. Exit codes: 0 done, 1 the disk failed and 130 interrupted (both resumable), 2 a value
that cannot be used.
"""

import argparse
import contextlib
import dataclasses
import fcntl
import functools
import json
import math
import os
import random
import shutil
import signal
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

# OpenMP's threads must sleep while they wait: spinning ones make a step ten times slower, at random, when others work
# on the same cores. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm
from transformers.utils import logging as transformers_logging

from data import anchors_of, choose_capacity, cut_to, document, draft_vocabulary, lay_out, pack, python_documents
from decode import Accepted, speculative_greedy, walk
from draft_deepseek import (
    BLOCK,
    DeepseekV3Eagle3DraftModel,
    RowBatch,
    TTTLoss,
    anchor_mask,
    attend,
    block_index,
    build_rows,
    export_config,
    export_state,
)
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from target import Target, default_aux_layers, load_target, tiny_target

# ------------------------------------------------------------------------------------------------------------- settings

TINY = {"deepseek-v3": "deepseek-v3", "kimi-k2": "deepseek-v3", "kimi-k2.5": "deepseek-v3", "kimi-k3": "kimi-k3"}

# What a setting left at None becomes: with the built-in target (minutes on two cores; held-out accept length at 7 steps
# above 3.0 for deepseek-v3 and 2.5 for kimi-k3), and with a model of your own.
DEFAULTS = {
    "built-in": {"steps": 160, "lr": 2e-3, "draft_vocab": 96, "row_tokens": 2048},
    "model": {"epochs": 1, "lr": 1e-4, "draft_vocab": 32_000, "row_tokens": 4096},
}
LEAST = dict.fromkeys(("ttt_steps", "row_tokens", "batch_rows", "accumulate", "steps", "epochs", "eval_rows"), 1)
LEAST |= {
    "anchors": 1,
    "documents": 1,
    "save_every": 1,
    "keep": 1,
    "draft_vocab": 0,
    "decode_prompts": 0,
    "decode_tokens": 2,
}
DRAFTS = {"deepseek_v2": DeepseekV3Eagle3DraftModel, "kimi_k3": KimiK3Eagle3DraftModel}  # by config.model_type


def option(default, group: str, text: str, choices=None):
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


@dataclass
class Settings:
    target: str = option("deepseek-v3", "target", "preset", tuple(TINY))
    model: str | None = option(None, "target", "Hugging Face directory of the target; None: the built-in tiny one")
    aux_layers: str | None = option(None, "target", "three decoder layers to read, by output, as in 1,29,57")
    trust_remote_code: bool = option(False, "target", "run code that the model directory brings")

    name: str | None = option(None, "run", "the run lives in RUNS/NAME; None: preset, date and time")
    resume: bool = option(False, "run", "go on from the run's newest checkpoint, with its settings")
    runs: str = option("runs", "run", "folder of all runs and of the built-in targets")
    save_every: int = option(500, "run", "steps between checkpoints")
    keep: int = option(2, "run", "checkpoints kept")
    seed: int = option(0, "run", "of weights, data order and the built-in target")
    device: str = option("auto", "run", "cuda, cpu, ...; auto: cuda where there is one")
    precision: str = option("auto", "run", "of the compute; parameters stay float32", ("auto", "float32", "bfloat16"))
    compile: str = option(
        "auto", "run", "auto: max-autotune on cuda, else off", ("auto", "off", "default", "max-autotune")
    )

    ttt_steps: int = option(7, "draft", "TTT steps S, the longest chain it is trained for")
    draft_vocab: int | None = option(None, "draft", "tokens it can say, at most the target's; 0: all")
    fc_norm: bool = option(False, "draft", "norm each auxiliary state (EAGLE-3.1)")
    norm_output: bool = option(False, "draft", "carry normed states from step to step (EAGLE-3.1)")
    loss: str = option("ce", "draft", "soft cross-entropy, or the LK losses", ("ce", "alpha", "lambda"))

    row_tokens: int | None = option(None, "batch", "slots T of a packed row")
    anchors: int | None = option(None, "batch", "supervised slots A of a row; None: from the data")
    documents: int | None = option(None, "batch", "train on so many documents at most; None: all")
    batch_rows: int = option(1, "batch", "rows B of a micro-batch")
    accumulate: int = option(1, "batch", "micro-batches of an optimizer step, on each rank")
    recompute: str = option("none", "batch", "step: remake each TTT step in the backward, for memory", ("none", "step"))

    steps: int | None = option(None, "optimizer", "optimizer steps; None: as many as --epochs gives")
    epochs: int | None = option(None, "optimizer", "passes over the data, where --steps is not given")
    lr: float | None = option(None, "optimizer", "peak learning rate (AdamW)")
    warmup: float = option(0.05, "optimizer", "share of the steps that warm up, before a cosine to a tenth")
    weight_decay: float = option(0.0, "optimizer", "decoupled, on matrices")
    clip: float = option(1.0, "optimizer", "largest gradient norm")

    eval_rows: int = option(8, "evaluation", "held-out rows")
    decode_prompts: int = option(6, "evaluation", "held-out prompts decoded for real, 0 for none")
    decode_tokens: int = option(64, "evaluation", "new tokens of each")
    export_dtype: str = option("bfloat16", "evaluation", "of the saved draft", ("bfloat16", "float32"))


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"train.py: error: {message}\n")


def make_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--export", nargs=2, metavar=("CHECKPOINT", "OUT"), help="write what engines load, and stop")
    groups = {}
    for f in dataclasses.fields(Settings):
        group = f.metadata["group"]
        groups[group] = groups.get(group) or parser.add_argument_group(group)
        flag, text = "--" + f.name.replace("_", "-"), f"{f.metadata['help']} (default {f.default})"
        if f.type is bool:
            groups[group].add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            kind = next((t for t in getattr(f.type, "__args__", ()) if t is not types.NoneType), f.type)
            groups[group].add_argument(flag, type=kind, default=f.default, choices=f.metadata["choices"], help=text)
    return parser


def parse(argv=None) -> tuple[Settings, list[str] | None]:
    """Settings from the command line, over those of a run to resume; one line and exit code 2 on a bad value."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.resume:
        if not args.name:
            parser.error("--resume goes on with the run of --name; give its name")
        stored = Path(args.runs) / args.name / "settings.json"
        if stored.is_file():
            known = {f.name for f in dataclasses.fields(Settings)} - {"resume", "runs", "name"}
            parser.set_defaults(**{k: v for k, v in json.loads(stored.read_text()).items() if k in known})
            args = parser.parse_args(argv)
    values = vars(args)
    export = values.pop("export")
    args = Settings(**values)
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least {least}")
    for name in ("lr", "clip"):
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            parser.error(f"--{name} is {getattr(args, name)}; it must be a positive number")
    try:
        device = torch.device("cpu" if args.device == "auto" else args.device)
    except RuntimeError:
        parser.error(f"--device is {args.device!r}; auto, cpu, cuda or cuda:N is wanted")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, but PyTorch sees no CUDA device; use --device cpu")
    row_tokens = args.row_tokens or resolve(args).row_tokens
    if args.anchors and args.anchors > row_tokens:
        parser.error(f"--anchors is {args.anchors}; a row of --row-tokens {row_tokens} slots has no more")
    return args, export


def resolve(args: Settings) -> Settings:
    """What None and auto stand for here. The run keeps the settings as given, so that it resumes on another machine."""
    args = dataclasses.replace(args)
    defaults = DEFAULTS["model" if args.model else "built-in"]
    for name, value in defaults.items():
        given = args.epochs if name == "steps" else args.steps if name == "epochs" else None
        if getattr(args, name) is None and given is None:
            setattr(args, name, value)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    on_cuda = torch.device(args.device).type == "cuda"
    if args.precision == "auto":
        args.precision = "bfloat16" if on_cuda and torch.cuda.is_bf16_supported() else "float32"
    if args.compile == "auto":
        args.compile = "max-autotune" if on_cuda else "off"
    return args


# ----------------------------------------------------------------------------------------------------------------- main


def main(argv=None) -> None:
    given, to_export = parse(argv)
    if to_export:
        return export(load_draft(Path(to_export[0])), Path(to_export[1]), given.export_dtype)
    args = resolve(given)
    transformers_logging.disable_progress_bar()  # one for every file that is read or written
    signal.signal(signal.SIGTERM, interrupt)  # unwinds, whatever is being done
    with join_ranks(args) as ranks, open_run(given, ranks) as run:
        torch.manual_seed(args.seed)
        target = open_target(args, ranks)
        train_documents, held_out = load_documents(args, target, ranks)
        draft = make_draft(args, target, train_documents, ranks)
        rows = Rows(args, target, draft, train_documents)
        loss = TTTLoss(draft, args.ttt_steps, args.loss, recompute=args.recompute)
        compile_loss(loss, args.compile)
        train(args, ranks, run, loss, rows)
        result = evaluate(args, ranks, loss, Rows(args, target, draft, held_out, rows.anchors))
        if ranks.rank == 0:
            result |= decode_for_real(args, target, draft, held_out)
            export(draft, run / "draft", args.export_dtype)
            report(args, run, result)


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


def open_target(args: Settings, ranks: Ranks) -> Target:
    aux_layers = None
    if args.aux_layers is not None:
        try:
            aux_layers = [int(part) for part in args.aux_layers.split(",")]
        except ValueError:
            raise ValueError(f"--aux-layers is {args.aux_layers!r}; three layers are wanted, as in 1,29,57") from None
    if args.model:
        path, note = args.model, f"its config.json decides, not the preset {args.target}"
    else:
        with ranks.first_alone():
            path = tiny_target(TINY[args.target], Path(args.runs) / f"tiny-{TINY[args.target]}")
        note = "the built-in one"
    if ranks.rank == 0:
        print(f"target: {path} ({note})")
    return load_target(path, aux_layers, args.trust_remote_code, args.device)


def load_documents(args: Settings, target: Target, ranks: Ranks) -> tuple[list, list]:
    """Documents of at most a row with something to learn, for training and held out; prints what was left out."""
    if target.tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer, and the corpus is text; put tokenizer.json beside config.json"
        )
    result = []
    for held_out in (False, True):
        pairs = python_documents(held_out, args.seed)[: args.documents]
        documents = [document(target.tokenizer, *pair, f"corpus:{i}") for i, pair in enumerate(pairs)]
        cut = sum(len(d.tokens) > args.row_tokens for d in documents)
        kept = [d for d in (cut_to(d, args.row_tokens) for d in documents) if anchors_of(d.loss_mask, args.ttt_steps)]
        if not kept:
            raise ValueError(f"no document has a learned token within --row-tokens {args.row_tokens}; raise it")
        tokens, learned = sum(len(d.tokens) for d in kept), sum(int(d.loss_mask.sum()) for d in kept)
        if ranks.rank == 0:
            print(
                f"{'held out' if held_out else 'training'}: {len(kept):,} documents, {tokens:,} tokens, "
                f"{learned / tokens:.0%} learned; {cut} cut to a row, {len(documents) - len(kept)} without any"
            )
        result.append(kept)
    return tuple(result)


def make_draft(args: Settings, target: Target, documents: list, ranks: Ranks) -> nn.Module:
    """A fresh draft in the target's own widths: its embeddings (frozen), the chosen rows of its head to start from."""
    v, vocab = target.vocab_size, args.draft_vocab or target.vocab_size
    vocab = draft_vocabulary(documents, vocab, target.special_token_ids, v)
    is_default = target.aux_layers == default_aux_layers(len(target.layers))
    config = target.config.to_dict() | {
        "vocab_size": v,
        "draft_vocab_size": len(vocab),
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(target.aux_layers),
        "fc_norm": args.fc_norm,
        "norm_output": args.norm_output,
        "eagle_aux_hidden_state_layer_ids": None if is_default else [j + 1 for j in target.aux_layers],  # as engines do
    }
    draft = (KimiK3Eagle3DraftModel if config.get("mla_use_nope") else DeepseekV3Eagle3DraftModel)(config)
    draft = draft.to(args.device, torch.float32)
    draft.set_vocab_mapping(vocab)
    draft.copy_embeddings_from_target(target.embed_tokens)
    draft.freeze_embeddings()
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[draft.draft_ids.to(target.device)])
    if ranks.rank == 0:
        trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
        print(f"draft: {type(draft).__name__}, {trained / 1e6:.2f}M trained parameters, {len(vocab):,} of {v:,} tokens")
    return draft


class Rows:
    """The stream of micro-batches: number i of it, captured from the target when asked for, is the same every time."""

    def __init__(self, args: Settings, target: Target, draft: nn.Module, documents: list, anchors: int | None = None):
        self.args, self.target, self.draft, self.documents = args, target, draft, documents
        self.sizes = [(len(d.tokens), anchors_of(d.loss_mask, args.ttt_steps)) for d in documents]
        self.anchors = anchors or args.anchors or choose_capacity(documents, args.row_tokens, args.ttt_steps)
        self.lengths, self.latest = [], (-1, [])
        self.flex = args.compile != "off" and torch.device(args.device).type == "cuda" and flex_compiles(args.device)

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Micro-batches of rows of documents, in an order fixed by (seed, epoch); all rows of one have one capacity."""
        if self.latest[0] != number:
            b, rng = self.args.batch_rows, random.Random(f"{self.args.seed}/{number}")
            rows = pack(self.sizes, self.args.row_tokens, self.anchors, rng)
            kinds = [[r for r in rows if self.capacity(r) == a] for a in sorted({self.capacity(r) for r in rows})]
            batches = [kind[i : i + b] for kind in kinds for i in range(0, len(kind), b)]
            rng.shuffle(batches)
            self.latest = (number, batches)
        return self.latest[1]

    def capacity(self, row: list[int]) -> int:
        return self.anchors if sum(self.sizes[i][1] for i in row) <= self.anchors else self.args.row_tokens

    def count(self, epochs: int) -> int:
        while len(self.lengths) < epochs:
            self.lengths.append(len(self.epoch(len(self.lengths))))
        return sum(self.lengths[:epochs])

    def batch(self, i: int) -> list[list[int]]:
        """The documents of each row of micro-batch i; none past the last of `epochs` epochs."""
        epoch = 0
        while self.count(epoch + 1) <= i:
            epoch += 1
            if self.args.steps is None and epoch == self.args.epochs:
                return []
        return self.epoch(epoch)[i - self.count(epoch)]

    def __getitem__(self, i: int) -> RowBatch:
        return self.make(self.batch(i))

    def names(self, i: int) -> list[str]:
        return [self.documents[d].source for row in self.batch(i) for d in row]

    def make(self, batch: list[list[int]]) -> RowBatch:
        captured = iter(self.target.capture([self.documents[i].tokens for row in batch for i in row]))
        rows = [[(*self.documents[i][:2], *next(captured)) for i in row] for row in batch]
        rows += [[]] * (self.args.batch_rows - len(rows))  # the last of an epoch is filled up with padding
        width = self.target.hidden_size, len(self.target.aux_layers), self.target.dtype, self.target.device
        laid_out = lay_out(rows, self.args.row_tokens, *width)
        capacity = self.capacity(batch[0]) if batch else self.anchors
        made = build_rows(
            self.draft.draft_ids, **laid_out, head=self.target.head, steps=self.args.ttt_steps, anchors=capacity
        )
        return made if self.flex else made._replace(block_mask=None)


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


# ---------------------------------------------------------------------------------------------------------- checkpoints


def save_checkpoint(run: Path, draft: nn.Module, optimizer, step: int, consumed: int, keep: int) -> None:
    """checkpoints/step-<n>: the draft (float32) and all else that training goes on from; whole or absent.

    OSError: it cannot be written. What was saved before stays.
    """
    final = run / "checkpoints" / f"step-{step:08d}"
    half = final.with_suffix(".part")
    for stale in final.parent.glob("*.part"):
        shutil.rmtree(stale)
    state = {"step": step, "consumed": consumed, "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    try:
        draft.save_pretrained(half)
        torch.save(state, half / "training.pt")
    except Exception as error:  # a full disk is an OSError, a RuntimeError or a SafetensorError, by who met it
        shutil.rmtree(half, ignore_errors=True)
        reason = " ".join(str(error).split())[:200]
        raise OSError(
            f"the checkpoint of step {step} cannot be written ({reason}); --resume goes on from the last"
        ) from error
    os.replace(half, final) if not final.exists() else shutil.rmtree(half)
    for old in sorted(final.parent.glob("step-????????"))[:-keep]:
        shutil.rmtree(old)


def load_checkpoint(run: Path, draft: nn.Module, optimizer, device) -> tuple[int, int]:
    """Load the newest checkpoint of the run, if it has one; how many steps are done and micro-batches consumed."""
    newest = max((run / "checkpoints").glob("step-????????"), default=None)
    if newest is None:
        return 0, 0
    stored = load_draft(newest).state_dict()
    misfits = [k for k, x in draft.state_dict().items() if k not in stored or stored[k].shape != x.shape]
    if misfits:
        raise ValueError(f"{newest} is another draft's ({', '.join(misfits[:3])} differ); resume with its own settings")
    draft.load_state_dict(stored)
    state = torch.load(newest / "training.pt", map_location=device, weights_only=True)
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rng"].cpu())
    return state["step"], state["consumed"]


def load_draft(directory: Path) -> nn.Module:
    """The draft of a checkpoint directory; ValueError when it is none."""
    try:
        kind = DRAFTS[json.loads((directory / "config.json").read_text())["model_type"]]
        return kind.from_pretrained(directory, dtype=torch.float32)
    except (OSError, KeyError, ValueError) as error:
        raise ValueError(f"{directory} is no checkpoint of a draft ({type(error).__name__}: {error})") from error


def trimmed_log(path: Path, done: int):
    """The log opened to append, without the steps after the checkpoint, which come again."""
    lines = path.read_text().splitlines(keepends=True)[:done] if path.exists() else []
    path.write_text("".join(lines))
    return path.open("a")


def export(draft: nn.Module, directory: Path, dtype: str) -> None:
    """The directory that engines load; whole or absent. ValueError when there is one already."""
    if directory.exists():
        raise ValueError(f"{directory} exists already and nothing is overwritten; name another directory")
    half = directory.with_name(directory.name + ".part")
    shutil.rmtree(half, ignore_errors=True)
    config, state = export_config(draft, getattr(torch, dtype)), export_state(draft, getattr(torch, dtype))
    half.mkdir(parents=True)
    (half / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(state, half / "model.safetensors", metadata={"format": "pt"})
    os.replace(half, directory)
    print(f"draft: {directory} ({dtype})")


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
