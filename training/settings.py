"""What can be set, on the command line and in a run's settings.json; defaults are stated here alone."""

import argparse
import dataclasses
import math
import os
import types
from dataclasses import dataclass, field
from pathlib import Path

import torch

from data.files import read_json
from data.rendering import read_arguments
from data.server import AT_ONCE, address
from draft_deepseek import BLOCK, default_chunk
from states.read import is_captured
from training.sources import TINY
from training.tracking import MODULES, load

# What a setting left at None becomes: with the built-in target (minutes on two cores; held-out accept length at 7 steps
# above 3.0 for deepseek-v3 and 2.5 for kimi-k3), and with a model of your own.
DEFAULTS = {
    "built-in": {"steps": 160, "lr": 2e-3, "row_tokens": 2048},
    "model": {"epochs": 1, "lr": 1e-4, "row_tokens": 4096},
}
DRAFT_VOCAB = {"built-in": 96, "model": 32_000}  # where neither --draft-vocab nor the data says another
MOST = 1_000_000_000  # of every whole number that says nothing else
BOUNDS = {  # both ends are allowed
    "ttt_steps": (1, 64),
    "q_lora_rank": (0, 1 << 16),
    "heads": (1, 1 << 12),
    "intermediate_size": (1, 1 << 20),
    "row_tokens": (1, 1 << 20),  # the longest context of any preset
    "batch_rows": (1, 4096),
    "accumulate": (1, 1 << 16),
    "epochs": (1, 1000),
    "decode_prompts": (0, MOST),
    "decode_tokens": (2, 1 << 16),
    "seed": (0, (1 << 64) - 1),  # torch.manual_seed's, of which numpy takes what is not negative
    "at_once": (1, 4096),
    "temperature": (0, 10),
    "top_p": (0.001, 1),
    "warmup": (0, 1),
    "weight_decay": (0, 10),
}
BETWEEN = {"held_out": (0, 1), "lr": (0, 10), "clip": (0, math.inf), "follow_gb": (0, 1e9)}  # both ends are not
BETWEEN |= {"timeout": (0, 1e6)}
CHECKS = {"template_args": read_arguments, "render": address}
WANTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of texts"}
NAME_LENGTH = 200  # bytes; file systems take 255, and the run's own files add to it


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
    chat_template: str | None = option(None, "data", "file of a chat template to take instead of the target's")
    template_args: list | None = option(None, "data", "what the chat template is given, as in thinking=true")
    render: str | None = option(None, "data", "address of a running vLLM that renders the conversations instead")
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
    track: str = option("off", "run", "show the run's numbers there as well", ("off", *MODULES))
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
    q_lora_rank: int | None = option(
        None, "draft", "rank of its queries; None: the target's, else 1536; 0: none, which no engine loads"
    )
    heads: int | None = option(None, "draft", "attention heads; None: the target's")
    intermediate_size: int | None = option(None, "draft", "width of its MLP; None: that of the target's dense layers")
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
    decode_prompts: int = option(48, "evaluation", "held-out prompts decoded for real, a quarter greedily too; 0: none")
    decode_tokens: int = option(64, "evaluation", "new tokens of each")
    export_dtype: str = option("bfloat16", "evaluation", "of the saved draft", ("bfloat16", "float32"))


@dataclass
class Regeneration:
    """Of --regenerate, not of a run."""

    at_once: int = option(AT_ONCE, "regenerate", "conversations in flight")
    temperature: float | None = option(
        None, "regenerate", "None: of --model's generation_config.json, else the server's"
    )
    top_p: float | None = option(None, "regenerate", "as --temperature")
    max_new_tokens: int | None = option(None, "regenerate", "of a turn, which is cut there; None: the server's limit")
    drop_cut: bool = option(False, "regenerate", "drop turns cut by length, which are learned up to the cut otherwise")
    timeout: float = option(1800.0, "regenerate", "seconds for an answer, before it is asked for again")


FIELDS = {f.name: f for f in dataclasses.fields(Settings)}
OF_COMMANDS = {f.name: f for f in dataclasses.fields(Regeneration)}


class OneLineParser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def as_text(value: str) -> str:
    """The type of a flag that is a path or a name."""
    if complaint := unusable_text([value]):
        raise argparse.ArgumentTypeError(complaint)
    return value


def as_path(value: str) -> Path:
    return Path(as_text(value))


def make_parser(description: str | None = None) -> OneLineParser:
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_argument_group("instead of training").add_mutually_exclusive_group()
    commands.add_argument(
        "--export", nargs=2, type=as_text, metavar=("CHECKPOINT", "OUT"), help="write what engines load, and stop"
    )
    commands.add_argument(
        "--capture", type=as_text, metavar="OUT", help="write the target's states at the documents, and stop"
    )
    help_send = "have the vLLM at URL write those into DIR, and stop"
    commands.add_argument("--send", nargs=2, type=as_text, metavar=("URL", "DIR"), help=help_send)
    help_plot = "draw what runs logged into OUT.png, or else runs.png, and stop"
    commands.add_argument("--plot", nargs="+", type=as_path, metavar="RUN [OUT.png]", help=help_plot)
    help_regenerate = "have the server at URL answer --data anew, into the file OUT, and stop"
    commands.add_argument("--regenerate", nargs=2, type=as_text, metavar=("URL", "OUT"), help=help_regenerate)
    commands.add_argument("--dry-run", action="store_true", help="say what the run would need, and stop")
    groups = {}
    for f in (FIELDS | OF_COMMANDS).values():
        group = f.metadata["group"]
        groups[group] = groups.get(group) or parser.add_argument_group(group)
        text = f"{f.metadata['help']} (default {f.default})"
        kind, _ = kind_of(f)
        if kind is bool:
            groups[group].add_argument(
                flag(f.name), action=argparse.BooleanOptionalAction, default=f.default, help=text
            )
        else:
            many = {"nargs": "+"} if kind is list else {"type": kind}
            groups[group].add_argument(
                flag(f.name), default=f.default, choices=f.metadata["choices"], help=text, **many
            )
    return parser


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def kind_of(f: dataclasses.Field) -> tuple[type, bool]:
    """The type of a setting's values, and whether None is one of them."""
    kinds = getattr(f.type, "__args__", (f.type,))
    return next(kind for kind in kinds if kind is not types.NoneType), types.NoneType in kinds


def parse(argv=None, description: str | None = None) -> tuple[Settings, argparse.Namespace]:
    """Settings from the command line, over those of a run to resume, and what is to be done instead of training; one
    line and exit code 2 on a bad value."""
    parser = make_parser(description)
    args = parser.parse_args(argv)
    try:
        check_each(args)
        if args.resume and not args.name:
            raise ValueError("--resume goes on with the run of --name; give its name")
        stored = Path(args.runs) / (args.name or "") / "settings.json"
        if args.resume and stored.is_file():
            own = ("resume", "runs", "name")
            parser.set_defaults(**{name: x for name, x in read_settings(stored).items() if name not in own})
            args = parser.parse_args(argv)
        values = vars(args)
        given = Settings(**{name: values.pop(name) for name in FIELDS})
        args.regeneration = Regeneration(**{name: values.pop(name) for name in OF_COMMANDS})
        if args.regeneration != Regeneration() and not args.regenerate:
            raise ValueError(f"{', '.join(map(flag, OF_COMMANDS))} say how to --regenerate; give that as well")
        check_together(given)
    except ValueError as error:
        parser.error(str(error))
    return given, args


def read_settings(path: Path) -> dict:
    """Those that a run's settings.json gives. ValueError: one that does not exist, or a value that no flag takes."""
    stored = read_json(path, ())
    stored.pop("torch", None)  # the version that it ran with
    for name, value in stored.items():
        if name not in FIELDS:
            raise ValueError(f"{path} says {name[:60]!r}, which is no setting; remove that line")
        if complaint := misfit(FIELDS[name], value):
            raise ValueError(f"{path}: {name} {complaint}; correct it there")
    floats = {name: float(x) for name, x in stored.items() if kind_of(FIELDS[name])[0] is float and x is not None}
    return stored | floats


def check_each(args: argparse.Namespace) -> None:
    """ValueError: a flag whose value cannot be right, whatever the others say."""
    for name, f in (FIELDS | OF_COMMANDS).items():
        if complaint := misfit(f, getattr(args, name)):
            raise ValueError(f"{flag(name)} {complaint}")
    name = args.name
    if name is not None and (Path(name).name != name or name.startswith(("tiny-", "."))):
        raise ValueError(f"--name is {name!r}; a plain name is wanted, and tiny-... are the built-in targets' own")
    if name is not None and len(os.fsencode(name)) > NAME_LENGTH:
        raise ValueError(f"--name is {len(os.fsencode(name))} bytes long; it names a folder, {NAME_LENGTH} at most")
    if name == "tokens":
        raise ValueError("--name tokens is taken: that folder keeps the tokens of --data")


def misfit(f: dataclasses.Field, value) -> str | None:
    """What is wrong with a setting's value by itself, if anything is; said behind its name."""
    kind, optional = kind_of(f)
    if value is None:
        return None if optional else f"is null; {WANTED[kind]} is wanted"
    if type(value) is not kind and not (kind is float and type(value) is int):
        return f"is {short(value)}; {WANTED[kind]} is wanted"
    if f.metadata["choices"] and value not in f.metadata["choices"]:
        return f"is {short(value)}; one of {', '.join(f.metadata['choices'])} is wanted"
    if kind in (str, list) and (complaint := unusable_text([value] if kind is str else value or [""])):
        return complaint
    if f.name in CHECKS:
        try:
            CHECKS[f.name](value)
        except ValueError as error:
            return str(error)
    if kind in (str, list):
        return None
    if f.name in BETWEEN:
        low, high = BETWEEN[f.name]
        wanted = "a positive number" if high == math.inf else f"more than {low} and less than {high:g}"
        return None if low < value < high else f"is {short(value)}; it must be {wanted}"
    if kind is bool:
        return None
    low, high = BOUNDS.get(f.name, (1, MOST))
    if low <= value <= high:  # never with a NaN
        return None
    return f"is {short(value)}; it must be {f'at most {high:,}' if value > high else f'at least {low}'}"


def short(value) -> str:
    try:
        return f"{value!r:.60}"
    except ValueError:  # Python writes no whole number of thousands of digits
        return "a huge number"


def unusable_text(texts: list) -> str | None:
    """What keeps texts from being paths or names."""
    for text in texts:
        if not isinstance(text, str):
            return f"holds {short(text)}; text is wanted"
        if not text.strip() or "\0" in text:
            return f"is {short(text)}; {'it must not be empty' if not text.strip() else 'no path holds a zero byte'}"
    return None


def check_together(args: Settings) -> None:
    """ValueError: values that this machine or the other ones rule out."""
    if args.follow_gb and not args.follow:
        raise ValueError("--follow-gb bounds what waits in the folder of --follow; name that as well")
    if args.chat_template and not Path(args.chat_template).exists():
        raise ValueError(f"--chat-template {args.chat_template} does not exist; a file of a chat template is wanted")
    if args.chat_template and args.render:
        raise ValueError("--chat-template says how to render here, --render has a server do it by its own; give one")
    load(args.track)  # said before anything slow begins
    check_draft_vocab(args.draft_vocab)
    check_device(args.device)
    if resolve(args).device.startswith("cuda") and args.chunk and args.chunk % BLOCK:
        raise ValueError(f"--chunk is {args.chunk}; on a GPU a multiple of {BLOCK} is wanted")
    if args.follow and (args.epochs or 1) > 1:
        raise ValueError(f"--follow sees its data once, --epochs is {args.epochs}; capture them to go over them again")


def check_draft_vocab(asked: str | None) -> None:
    if asked is None:
        return
    if asked.isdecimal() and len(asked) > 9:
        raise ValueError(f"--draft-vocab is {asked[:20]}...; no target has so many tokens")
    if not asked.isdecimal() and not Path(asked).exists():
        raise ValueError(f"--draft-vocab is {asked}; a number of tokens, 0 for all, or the path of a map is wanted")


def check_device(name: str) -> None:
    """ValueError unless this PyTorch computes on it."""
    wanted = "auto, cpu, cuda or cuda:N is wanted"
    try:
        device = torch.device("cpu" if name == "auto" else name)
    except RuntimeError:
        raise ValueError(f"--device is {name!r}; {wanted}") from None
    if device.type == "meta":
        raise ValueError(f"--device meta computes nothing; {wanted}")
    if device.type == "cuda":  # asked without making a context, which every rank would have on the first GPU
        if not torch.cuda.is_available():
            raise ValueError(f"--device is {name}, but PyTorch sees no CUDA device; use --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise ValueError(f"--device is {name}, but there are {torch.cuda.device_count()}, counted from 0")
    elif device.type != "cpu":
        try:
            torch.zeros(1, device=device)
        except Exception as error:  # whatever its backend, or its absence, raises
            raise ValueError(f"--device is {name}, which this PyTorch cannot use ({short(error)}); {wanted}") from None


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
