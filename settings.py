"""What can be set, on the command line and in a run's settings.json; defaults are stated here alone."""

import argparse
import dataclasses
import math
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch

from captured import is_captured
from draft_deepseek import BLOCK, default_chunk
from files import read_json
from sources import TINY

# What a setting left at None becomes: with the built-in target (minutes on two cores; held-out accept length at 7 steps
# above 3.0 for deepseek-v3 and 2.5 for kimi-k3), and with a model of your own.
DEFAULTS = {
    "built-in": {"steps": 160, "lr": 2e-3, "row_tokens": 2048},
    "model": {"epochs": 1, "lr": 1e-4, "row_tokens": 4096},
}
DRAFT_VOCAB = {"built-in": 96, "model": 32_000}  # where neither --draft-vocab nor the data says another
LEAST = dict.fromkeys(("ttt_steps", "row_tokens", "batch_rows", "accumulate", "steps", "epochs", "eval_rows"), 1)
LEAST |= dict.fromkeys(("chunk", "documents", "save_every", "eval_every", "keep"), 1)
LEAST |= {"decode_prompts": 0, "decode_tokens": 2}
POSITIVE = ("lr", "clip", "follow_gb")


def option(default, group: str, text: str, choices=None):
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


@dataclass
class Settings:
    target: str = option("deepseek-v3", "target", "preset", tuple(TINY))
    model: str | None = option(None, "target", "Hugging Face directory of the target; None: the built-in tiny one")
    aux_layers: str | None = option(None, "target", "three decoder layers to read, by output, as in 1,29,57")
    trust_remote_code: bool = option(False, "target", "run code that the model directory brings")

    data: list | None = option(None, "data", "conversations (files, folders) or a folder of captured states")
    reasoning: str = option("train", "data", "mask: thinking blocks are not learned", ("train", "mask"))
    held_out: float = option(0.05, "data", "share of the conversations that is evaluated on instead")
    documents: int | None = option(None, "data", "train on so many documents at most; None: all")
    skip_damaged: bool = option(False, "data", "leave out captured files that cannot be used, and count them")
    capture_dtype: str = option("bfloat16", "data", "of the states that --capture writes", ("bfloat16", "float32"))
    follow: str | None = option(None, "data", "folder that a running vLLM fills with the states of --data")
    follow_gb: float | None = option(None, "data", "ask vLLM's driver to pause (a file PAUSE) above so many GB there")

    name: str | None = option(None, "run", "the run lives in RUNS/NAME; None: preset, date and time")
    resume: bool = option(False, "run", "go on from the run's newest checkpoint, with its settings")
    runs: str = option("runs", "run", "folder of all runs and of the built-in targets")
    save_every: int = option(500, "run", "steps between checkpoints")
    keep: int = option(2, "run", "checkpoints kept")
    seed: int = option(0, "run", "of weights and data order")
    device: str = option("auto", "run", "cuda, cpu, ...; auto: cuda where there is one")
    precision: str = option("auto", "run", "of the compute; parameters stay float32", ("auto", "float32", "bfloat16"))
    compile: str = option(
        "auto", "run", "auto: max-autotune on cuda, else off", ("auto", "off", "default", "max-autotune")
    )

    ttt_steps: int = option(7, "draft", "TTT steps S, the longest chain it is trained for")
    draft: str = option("auto", "draft", "auto: as the target attends", ("auto", "deepseek", "kimi-k3"))
    init: str | None = option(None, "draft", "start from this draft: a directory or a .safetensors file")
    draft_vocab: str | None = option(None, "draft", "how many tokens it can say, 0 for all, or a file that maps them")
    fc_norm: bool = option(False, "draft", "norm each auxiliary state (EAGLE-3.1)")
    norm_output: bool = option(False, "draft", "carry normed states from step to step (EAGLE-3.1)")
    loss: str = option(
        "ce", "draft", "soft cross-entropy, or the LK losses (lambda: one forward more)", ("ce", "alpha", "lambda")
    )

    row_tokens: int | None = option(None, "batch", "slots T of a packed row")
    chunk: int | None = option(None, "batch", "anchors computed at a time; None: by row length and device")
    batch_rows: int = option(1, "batch", "rows B of a micro-batch")
    accumulate: int = option(1, "batch", "micro-batches of an optimizer step, on each rank")

    steps: int | None = option(None, "optimizer", "optimizer steps; None: as many as --epochs gives")
    epochs: int | None = option(None, "optimizer", "passes over the data, where --steps is not given")
    lr: float | None = option(None, "optimizer", "peak learning rate (AdamW)")
    warmup: float = option(0.05, "optimizer", "share of the steps that warm up, before a cosine to a tenth")
    weight_decay: float = option(0.0, "optimizer", "decoupled, on matrices")
    clip: float = option(1.0, "optimizer", "largest gradient norm")

    eval_rows: int = option(8, "evaluation", "held-out rows")
    eval_every: int | None = option(None, "evaluation", "steps between evaluations; None: at the end alone")
    decode_prompts: int = option(6, "evaluation", "held-out prompts decoded for real, 0 for none")
    decode_tokens: int = option(64, "evaluation", "new tokens of each")
    export_dtype: str = option("bfloat16", "evaluation", "of the saved draft", ("bfloat16", "float32"))


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> OneLineParser:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_argument_group("instead of training").add_mutually_exclusive_group()
    commands.add_argument("--export", nargs=2, metavar=("CHECKPOINT", "OUT"), help="write what engines load, and stop")
    commands.add_argument("--capture", metavar="OUT", help="write the target's states at the documents, and stop")
    help_send = "have the vLLM at URL write those into DIR, and stop"
    commands.add_argument("--send", nargs=2, metavar=("URL", "DIR"), help=help_send)
    commands.add_argument("--dry-run", action="store_true", help="say what the run would need, and stop")
    groups = {}
    for f in dataclasses.fields(Settings):
        group = f.metadata["group"]
        groups[group] = groups.get(group) or parser.add_argument_group(group)
        flag, text = "--" + f.name.replace("_", "-"), f"{f.metadata['help']} (default {f.default})"
        if f.type is bool:
            groups[group].add_argument(flag, action=argparse.BooleanOptionalAction, default=f.default, help=text)
        else:
            kind = next((t for t in getattr(f.type, "__args__", ()) if t is not types.NoneType), f.type)
            many = {"nargs": "+"} if kind is list else {"type": kind}
            groups[group].add_argument(flag, default=f.default, choices=f.metadata["choices"], help=text, **many)
    return parser


def parse(argv=None) -> tuple[Settings, argparse.Namespace]:
    """Settings from the command line, over those of a run to resume, and what is to be done instead of training; one
    line and exit code 2 on a bad value."""
    parser = make_parser()
    args = parser.parse_args(argv)
    names = [f.name for f in dataclasses.fields(Settings)]
    if args.resume:
        if not args.name:
            parser.error("--resume goes on with the run of --name; give its name")
        stored = Path(args.runs) / args.name / "settings.json"
        if stored.is_file():
            known = set(names) - {"resume", "runs", "name"}
            try:
                parser.set_defaults(**{k: v for k, v in read_json(stored, ()).items() if k in known})
            except ValueError as error:
                parser.error(str(error))
            args = parser.parse_args(argv)
    values = vars(args)
    given = Settings(**{name: values.pop(name) for name in names})
    if complaint := unusable(given):
        parser.error(complaint)
    return given, args


def unusable(args: Settings) -> str | None:
    """What is wrong with a value, if anything is."""
    for name, least in LEAST.items():
        value = getattr(args, name)
        if value is not None and value < least:
            return f"--{name.replace('_', '-')} is {value}; it must be at least {least}"
    for name in POSITIVE:
        if getattr(args, name) is not None and not 0 < getattr(args, name) < math.inf:
            return f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be a positive number"
    if not 0 <= args.warmup <= 1:
        return f"--warmup is {args.warmup}; a share of the steps is wanted, from 0 to 1"
    if not 0 <= args.weight_decay < math.inf:
        return f"--weight-decay is {args.weight_decay}; it must not be negative"
    if args.name is not None and (Path(args.name).name != args.name or args.name.startswith(("tiny-", "."))):
        return f"--name is {args.name!r}; a plain name is wanted, and tiny-... are the built-in targets' own"
    if args.name == "tokens":
        return "--name tokens is taken: that folder keeps the tokens of --data"
    if args.follow_gb and not args.follow:
        return "--follow-gb bounds what waits in the folder of --follow; name that as well"
    if not 0 < args.held_out < 1:
        return f"--held-out is {args.held_out}; it must lie between 0 and 1"
    vocab = args.draft_vocab
    if vocab is not None and not vocab.isdecimal() and not Path(vocab).exists():
        return f"--draft-vocab is {vocab}; a number of tokens, 0 for all, or the path of a map is wanted"
    try:
        device = torch.device("cpu" if args.device == "auto" else args.device)
    except RuntimeError:
        return f"--device is {args.device!r}; auto, cpu, cuda or cuda:N is wanted"
    if device.type == "meta":
        return "--device meta computes nothing; auto, cpu, cuda or cuda:N is wanted"
    if device.type == "cuda" and not torch.cuda.is_available():
        return f"--device is {args.device}, but PyTorch sees no CUDA device; use --device cpu"
    if resolve(args).device.startswith("cuda") and args.chunk and args.chunk % BLOCK:
        return f"--chunk is {args.chunk}; on a GPU a multiple of {BLOCK} is wanted"
    if args.follow and (args.epochs or 1) > 1:
        return f"--follow sees its data once, --epochs is {args.epochs}; capture them to go over them again"
    return None


def is_built_in(args: Settings) -> bool:
    """Does the built-in target train?"""
    return args.model is None and not any(is_captured(Path(path)) for path in args.data or ())


def resolve(args: Settings) -> Settings:
    """What None and auto stand for here. The run keeps the settings as given, so that it resumes on another machine."""
    args = dataclasses.replace(args)
    defaults = DEFAULTS["built-in" if is_built_in(args) else "model"]
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
    args.chunk = args.chunk or default_chunk(args.row_tokens, args.device)
    return args
