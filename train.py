"""Train an EAGLE-3 draft with an MLA backbone against its frozen target.

    python train.py --target deepseek-v3        # a tiny built-in target is made first; minutes on two cores
    python train.py --target kimi-k3
    python train.py --target deepseek-v3 --model PATH    # a local Hugging Face model instead

`main` is the table of contents.
"""

import argparse
import dataclasses
import json
import math
import os
import random
import sys
import time
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from data import anchors_of, choose_capacity, cut_to, document, draft_vocabulary, lay_out, pack, python_documents
from decode import Accepted, speculative_greedy, walk
from draft_deepseek import DeepseekV3Eagle3DraftModel, TTTLoss, build_rows, export_config, export_state
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from target import Target, default_aux_layers, load_target, tiny_target

# ------------------------------------------------------------------------------------------------------------- settings

TINY = {"deepseek-v3": "deepseek-v3", "kimi-k2": "deepseek-v3", "kimi-k2.5": "deepseek-v3", "kimi-k3": "kimi-k3"}

# What a setting left at None becomes: with the built-in target (about 70 s of two cores; accept length above 3.0 at 7
# steps for deepseek-v3, 2.5 for kimi-k3), and with a model of your own.
DEFAULTS = {
    "built-in": {"steps": 300, "lr": 2e-3, "draft_vocab": 96, "row_tokens": 2048},
    "model": {"steps": 10_000, "lr": 1e-4, "draft_vocab": 32_000, "row_tokens": 4096},
}


def option(default, group: str, text: str, choices=None):
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


@dataclass
class Settings:
    target: str = option("deepseek-v3", "target", "preset", tuple(TINY))
    model: str | None = option(None, "target", "Hugging Face directory of the target; None: the built-in tiny one")
    aux_layers: str | None = option(None, "target", "three decoder layers to read, by output, as in 1,29,57")
    trust_remote_code: bool = option(False, "target", "run code that the model directory brings")

    name: str | None = option(None, "run", "the run lives in RUNS/NAME; None: preset, date and time")
    runs: str = option("runs", "run", "folder of all runs and of the built-in targets")
    seed: int = option(0, "run", "of weights, data order and the built-in target")
    device: str = option("auto", "run", "cuda, cpu, ...; auto: cuda where there is one")
    precision: str = option("auto", "run", "of the compute; parameters stay float32", ("auto", "float32", "bfloat16"))
    compile: str = option(
        "auto", "run", "auto: max-autotune on cuda, off on a cpu", ("auto", "off", "default", "max-autotune")
    )

    ttt_steps: int = option(7, "draft", "TTT steps S, the longest chain it is trained for")
    draft_vocab: int | None = option(None, "draft", "tokens it can say, at most the target's; 0: all")
    fc_norm: bool = option(False, "draft", "norm each auxiliary state (EAGLE-3.1)")
    norm_output: bool = option(False, "draft", "carry normed states from step to step (EAGLE-3.1)")
    loss: str = option("ce", "draft", "soft cross-entropy, or the LK losses", ("ce", "alpha", "lambda"))

    row_tokens: int | None = option(None, "batch", "slots T of a packed row")
    anchors: int | None = option(None, "batch", "supervised slots A of a row; None: from the data")
    batch_rows: int = option(1, "batch", "rows B of a micro-batch")
    accumulate: int = option(1, "batch", "micro-batches of an optimizer step")
    recompute: str = option(
        "none", "batch", "step: remake each TTT step in the backward, to save memory", ("none", "step")
    )

    steps: int | None = option(None, "optimizer", "optimizer steps")
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
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(argv=None) -> Settings:
    """Settings from the command line; exits with code 2 and one line on a bad value."""
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {}
    for f in dataclasses.fields(Settings):
        group = groups.setdefault(f.metadata["group"], parser.add_argument_group(f.metadata["group"]))
        flag, text = "--" + f.name.replace("_", "-"), f"{f.metadata['help']} (default {f.default})"
        if f.type is bool:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            kind = (
                next(t for t in f.type.__args__ if t is not types.NoneType) if hasattr(f.type, "__args__") else f.type
            )
            group.add_argument(flag, type=kind, default=f.default, choices=f.metadata["choices"], help=text)
    args = Settings(**vars(parser.parse_args(argv)))
    for name, value in DEFAULTS["model" if args.model else "built-in"].items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    for name in ("ttt_steps", "row_tokens", "batch_rows", "accumulate", "steps", "eval_rows", "anchors"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
    for name in ("lr", "clip"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name} is {getattr(args, name)}; it must be above 0")
    if args.anchors and args.anchors > args.row_tokens:
        parser.error(f"--anchors is {args.anchors}; a row of --row-tokens {args.row_tokens} slots has no more")
    args.device = ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else args.device
    on_cuda = torch.device(args.device).type == "cuda"
    if on_cuda and not torch.cuda.is_available():
        parser.error(f"--device is {args.device}, but PyTorch sees no CUDA device; use --device cpu")
    if args.precision == "auto":
        args.precision = "bfloat16" if on_cuda and torch.cuda.is_bf16_supported() else "float32"
    if args.compile == "auto":
        args.compile = "max-autotune" if on_cuda else "off"
    return args


# ----------------------------------------------------------------------------------------------------------------- main


def main(argv=None) -> None:
    args = parse(argv)
    run = open_run(args)
    torch.manual_seed(args.seed)
    target = open_target(args)
    train_documents, held_out = load_documents(args, target)
    draft = make_draft(args, target, train_documents)
    rows = Rows(args, target, draft, train_documents)
    loss = TTTLoss(draft, args.ttt_steps, args.loss, recompute=args.recompute)
    compile_loss(loss, args.compile)
    train(args, run, loss, rows)
    result = evaluate(args, loss, Rows(args, target, draft, held_out, rows.anchors))
    result |= decode_for_real(args, target, draft, held_out)
    export(args, draft, run / "draft")
    report(args, run, result)


def open_run(args: Settings) -> Path:
    """runs/<name>, with the settings and versions in it; ValueError when it exists."""
    run = Path(args.runs) / (args.name or f"{args.target}-{time.strftime('%Y%m%d-%H%M%S')}")
    if run.exists():
        raise ValueError(f"{run} exists already and nothing is overwritten; choose another --name or remove it")
    return run


def open_target(args: Settings) -> Target:
    aux_layers = None
    if args.aux_layers is not None:
        try:
            aux_layers = [int(part) for part in args.aux_layers.split(",")]
        except ValueError:
            raise ValueError(
                f"--aux-layers is {args.aux_layers!r}; three layer numbers are wanted, as in 1,29,57"
            ) from None
    if args.model:
        path = args.model
        print(f"target: {path} (its config.json decides, not the preset {args.target})")
    else:
        path = tiny_target(TINY[args.target], Path(args.runs) / f"tiny-{TINY[args.target]}")
        print(f"target: the built-in {path}")
    return load_target(path, aux_layers, args.trust_remote_code, args.device)


def load_documents(args: Settings, target: Target) -> tuple[list, list]:
    """Documents of at most a row with something to learn, for training and held out; prints what was left out."""
    if target.tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer, and the corpus is text; put tokenizer.json beside its config.json"
        )
    result = []
    for held_out in (False, True):
        documents = [document(target.tokenizer, *pair) for pair in python_documents(held_out, args.seed)]
        cut = sum(len(d.tokens) > args.row_tokens for d in documents)
        documents = [cut_to(d, args.row_tokens) for d in documents]
        kept = [d for d in documents if anchors_of(d.loss_mask, args.ttt_steps)]
        tokens, learned = sum(len(d.tokens) for d in kept), sum(int(d.loss_mask.sum()) for d in kept)
        if not kept:
            raise ValueError(
                f"none of {len(documents)} documents has a learned token within --row-tokens {args.row_tokens}"
            )
        print(
            f"{'held out' if held_out else 'training'}: {len(kept):,} documents, {tokens:,} tokens, {learned / tokens:.0%} "
            f"learned; {cut} cut to a row, {len(documents) - len(kept)} with nothing to learn left out"
        )
        result.append(kept)
    return tuple(result)


def make_draft(args: Settings, target: Target, documents: list) -> nn.Module:
    """A fresh draft in the target's own widths: its embeddings (frozen), the chosen rows of its head to start from."""
    config, v = target.config.to_dict(), target.vocab_size
    vocab = draft_vocabulary(documents, args.draft_vocab or v, target.special_token_ids, v)
    is_default = target.aux_layers == default_aux_layers(len(target.layers))
    config |= {
        "vocab_size": v,
        "draft_vocab_size": len(vocab),
        "target_hidden_size": target.hidden_size,
        "num_aux_hidden_states": len(target.aux_layers),
        "fc_norm": args.fc_norm,
        "norm_output": args.norm_output,
        "eagle_aux_hidden_state_layer_ids": None if is_default else [j + 1 for j in target.aux_layers],
    }
    kind = KimiK3Eagle3DraftModel if config.get("mla_use_nope") else DeepseekV3Eagle3DraftModel
    draft = kind(config).to(args.device, torch.float32)
    draft.set_vocab_mapping(vocab)
    draft.copy_embeddings_from_target(target.embed_tokens)
    draft.freeze_embeddings()
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head.weight[draft.draft_ids.to(target.device)])
    trained = sum(p.numel() for p in draft.parameters() if p.requires_grad)
    print(f"draft: {kind.__name__}, {trained / 1e6:.2f}M trained parameters, {len(vocab):,} of {v:,} tokens")
    return draft


class Rows:
    """Row batches of documents, captured from the target as they are needed, in an order that (seed, epoch) fixes."""

    def __init__(self, args: Settings, target: Target, draft: nn.Module, documents: list, anchors: int | None = None):
        self.args, self.target, self.draft, self.documents = args, target, draft, documents
        self.sizes = [(len(d.tokens), anchors_of(d.loss_mask, args.ttt_steps)) for d in documents]
        self.anchors = anchors or args.anchors or choose_capacity(documents, args.row_tokens, args.ttt_steps)

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Micro-batches of batch_rows rows of documents; all of one batch have the same capacity."""
        b, rng = self.args.batch_rows, random.Random(f"{self.args.seed}/{number}")
        rows = pack(self.sizes, self.args.row_tokens, self.anchors, rng)
        kinds = [[row for row in rows if self.capacity(row) == a] for a in sorted({self.capacity(row) for row in rows})]
        batches = [kind[i : i + b] for kind in kinds for i in range(0, len(kind), b)]
        batches = [batch for batch in batches if len(batch) == b] or batches[:1] * b  # one static shape
        rng.shuffle(batches)
        return batches

    def capacity(self, row: list[int]) -> int:
        return self.anchors if sum(self.sizes[i][1] for i in row) <= self.anchors else self.args.row_tokens

    def __iter__(self):
        number = 0
        while True:
            for batch in self.epoch(number):
                yield self.make(batch)
            number += 1

    def make(self, batch: list[list[int]]):
        documents = [self.documents[i] for row in batch for i in row]
        captured = iter(self.target.capture([d.tokens for d in documents]))
        rows = [[(*self.documents[i][:2], *next(captured)) for i in row] for row in batch]
        laid_out = lay_out(rows, self.args.row_tokens)
        capacity = self.capacity(batch[0])
        return build_rows(
            self.draft.draft_ids, **laid_out, head=self.target.head, steps=self.args.ttt_steps, anchors=capacity
        )


def compile_loss(loss: TTTLoss, mode: str) -> None:
    """Make the S-step loss one static graph; the only place that compiles. mode: off, default or max-autotune."""
    if mode != "off":
        torch._dynamo.config.recompile_limit = 16  # two capacities, for training and evaluation, and some to spare
        loss.compile(fullgraph=True, dynamic=False, mode=mode)


def autocast(args: Settings):
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bfloat16")


# ------------------------------------------------------------------------------------------------------------- training


def train(args: Settings, run: Path, loss: TTTLoss, rows: Rows) -> None:
    parameters = [p for p in loss.parameters() if p.requires_grad]
    matrices, vectors = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=torch.device(args.device).type == "cuda")
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, args))
    for p in parameters:
        p.grad = torch.zeros_like(
            p
        )  # for good: a gradient adopted from a captured graph is overwritten by its next replay
    print(
        f"rows of {args.row_tokens} slots and {rows.anchors} anchors, {args.batch_rows * args.accumulate} a step, on {args.device}"
    )
    run.mkdir(parents=True)
    (run / "settings.json").write_text(
        json.dumps(dataclasses.asdict(args) | {"torch": torch.__version__}, indent=1) + "\n"
    )
    batches, empty, start = iter(rows), 0, time.perf_counter()
    with (
        (run / "log.jsonl").open("a") as log,
        tqdm(range(1, args.steps + 1), desc="training the draft", unit="step") as bar,
    ):
        for step in bar:
            window = [next(batches) for _ in range(args.accumulate)]
            line = {"step": step, "lr": schedule.get_last_lr()[0]} | optimizer_step(
                args, loss, window, optimizer, parameters
            )
            schedule.step()
            empty += line["supervised"] == 0
            now = time.perf_counter()
            line["supervised_per_second"], start = line["supervised"] / (now - start), now
            print(json.dumps(line), file=log, flush=True)
            bar.set_postfix(
                loss=f"{line['loss']:.3f}",
                accept=f"{line['accept_length']:.2f}",
                tok_s=f"{line['supervised_per_second']:,.0f}",
            )
            if step in (50, args.steps) and 2 * empty > step:
                tqdm.write(f"warning: {empty} of {step} steps had nothing to learn; check the loss mask of the data")


def learning_rate(step: int, args: Settings) -> float:
    """Share of the peak: linear warm-up, then a cosine down to a tenth."""
    warmup = max(1, round(args.warmup * args.steps))
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, args.steps - warmup)))


def optimizer_step(args: Settings, loss: TTTLoss, window: list, optimizer, parameters) -> dict:
    """Forward and backward of the window's micro-batches over their common denominators, then one update.

    With nothing supervised in the whole window nothing moves: AdamW would, by its momentum, even on zero gradients.
    """
    supervised = sum((rows.teacher_index >= 0).sum((1, 2)) for rows in window)
    denominators = supervised.clamp(min=1).float()
    total, hits, prefix_hits, valid = 0.0, 0, 0, 0
    for rows in window:
        if rows.features.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        with autocast(args):
            part, m = loss(rows._replace(denominators=denominators))
        part.backward()
        total, hits = total + part.detach().clone(), hits + m.step_hits.sum()
        prefix_hits, valid = prefix_hits + m.step_prefix_hits, valid + m.step_valid
    count = int(supervised.sum())
    norm = nn.utils.clip_grad_norm_(parameters, args.clip)
    if count and norm.isfinite():
        optimizer.step()
    for p in parameters:
        p.grad.zero_()
    accept = 1 + (prefix_hits / valid.clamp(min=1)).sum()
    return {
        "loss": float(total),
        "accuracy": int(hits) / max(count, 1),
        "accept_length": float(accept),
        "supervised": count,
        "grad_norm": float(norm),
    }


# ----------------------------------------------------------------------------------------------------------- evaluation


@torch.no_grad()
def evaluate(args: Settings, loss: TTTLoss, rows: Rows) -> dict:
    """Over held-out rows: accept lengths at S drafted tokens (simulated, walked) and accuracy per step, all pooled."""
    walked, sums = Accepted(0, 0), []
    for batch in rows.epoch(0)[: max(1, args.eval_rows // args.batch_rows)]:
        made = rows.make(batch)
        with autocast(args):
            _, m = loss(made)
        walked += walk(made, m)
        sums.append(torch.stack([m.step_prefix_hits, m.step_valid, m.step_hits, m.step_supervised]))
    prefix_hits, valid, hits, supervised = torch.stack(sums).sum(0).double()
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


def export(args: Settings, draft: nn.Module, directory: Path) -> None:
    """The directory that engines load; whole or absent."""
    dtype, half = getattr(torch, args.export_dtype), directory.with_name(directory.name + ".part")
    half.mkdir(parents=True)
    (half / "config.json").write_text(json.dumps(export_config(draft, dtype), indent=2) + "\n")
    save_file(export_state(draft, dtype), half / "model.safetensors", metadata={"format": "pt"})
    os.replace(half, directory)


def report(args: Settings, run: Path, result: dict) -> None:
    (run / "result.json").write_text(json.dumps(result) + "\n")
    k = args.ttt_steps
    print(f"\nheld out, greedy, chains of {k}, {result['slots']:,} slots:")
    print(f"  accept length   simulated {result['simulated']:.2f}, walked {result['walked']:.2f}")
    print(f"  accuracy        {' '.join(f'{x:.1%}' for x in result['accuracy'])}  (steps 1..{k})")
    if result["prompts"]:
        print(
            f"  decoded         {result['decoded']:.2f} tokens a round in {result['rounds']} rounds, {result['prompts']} prompts of "
            f"{args.decode_tokens} new tokens; {result['identical']} identical to the target's own greedy decoding"
        )
    print(f"draft: {run / 'draft'} ({args.export_dtype}), log: {run / 'log.jsonl'}")


if __name__ == "__main__":
    try:
        main()
    except ValueError as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
