"""Embedding, final norm and output head of a target whose layers do not fit: all that captured states need of it."""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open
from torch import Tensor, nn

from data.files import INDEX, Damaged, check_finite, naming, read_json, shapes_in, weight_map
from draft_deepseek import RMSNorm
from target.model import Target, check_directory, load_tokenizer, usual_names

LAYOUTS = (  # how checkpoints name the text model, and its head
    ("model.", "lm_head."),
    ("language_model.model.", "language_model.lm_head."),  # Kimi K3 and K2.5
    ("model.language_model.", "lm_head."),
)
REQUIRED = ("hidden_size", "vocab_size", "num_hidden_layers", "rms_norm_eps")


class PlainConfig(SimpleNamespace):
    """A config.json as it stands, for model types that transformers does not know."""

    def to_dict(self) -> dict:
        return copy.deepcopy(vars(self))


class TargetEnds:
    """Embedding, final norm and output head of a target, with the names that `Target` has for them.

    All that training on captured states needs of a target whose layers do not fit.
    """

    def __init__(self, config: dict, embed: Tensor, norm: Tensor, head: Tensor, tokenizer, stop_token_ids: list[int]):
        self.config, self.tokenizer, self.stop_token_ids = PlainConfig(**config), tokenizer, stop_token_ids
        self.vocab_size, self.hidden_size = head.shape
        self.device, self.dtype = head.device, head.dtype
        self.embed_tokens = nn.Embedding.from_pretrained(embed)
        self.lm_head = nn.Linear(self.hidden_size, self.vocab_size, bias=False, device="meta").requires_grad_(False)
        self.lm_head.weight = nn.Parameter(head, requires_grad=False)
        self.final_norm = RMSNorm(self.hidden_size, self.config.rms_norm_eps).requires_grad_(False)
        self.final_norm.weight = nn.Parameter(norm, requires_grad=False)

    special_token_ids = Target.special_token_ids  # the same property, of the same names

    @torch.no_grad()
    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm of hidden [..,H], computed in float32, in hidden's dtype."""
        return self.final_norm(hidden.to(self.device))

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..,H] after the final norm -> logits [..,V]"""
        return self.lm_head(hidden.to(self.dtype))


def load_ends(path, device="cpu", dtype=None, trust_remote_code=False) -> TargetEnds:
    """The ends of a local Hugging Face target: three tensors by name out of its safetensors, whatever its size.

    dtype None: float32 on a CPU, else the checkpoint's. config.json is read as plain JSON, a nested text_config taken.
    ValueError: no such directory, keys or tensors that are missing, other shapes than the config's, a damaged file.
    """
    path = Path(path)
    check_directory(path)
    config = text_config(path)
    tensors = read_ends(path, config)
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else tensors[0].dtype)
    tokenizer = load_tokenizer(path, trust_remote_code)
    generation = path / "generation_config.json"
    stops = read_json(generation, ()).get("eos_token_id") if generation.is_file() else None
    stops = config["eos_token_id"] if stops is None else stops
    stops = [stops] if isinstance(stops, int) else list(stops or [])
    return TargetEnds(config, *(x.to(device, dtype) for x in tensors), tokenizer, stops)


def text_config(path: Path) -> dict:
    outer = read_json(path / "config.json", ())
    config = usual_names(dict(outer.get("text_config") or outer))
    if missing := [key for key in REQUIRED if config.get(key) is None]:
        raise ValueError(f"{path / 'config.json'} lacks {', '.join(missing)}; copy the target's own")
    # often at the outer level alone
    for key in ("pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings"):
        config[key] = outer.get(key) if config.get(key) is None else config[key]
    return config


def read_ends(path: Path, config: dict) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding [V,H], final norm [H], head [V,H]; the embedding again where they are tied."""
    files = weight_files(path)
    inner, outer = next((x for x in LAYOUTS if f"{x[0]}embed_tokens.weight" in files), LAYOUTS[0])
    wanted = {f"{inner}embed_tokens.weight": 2, f"{inner}norm.weight": 1}
    if not config["tie_word_embeddings"]:
        wanted[f"{outer}weight"] = 2
    if missing := [name for name in wanted if name not in files]:
        raise ValueError(
            f"{path} lacks {', '.join(missing)}; is it whole, does its config.json say tie_word_embeddings?"
        )
    found, sizes = [], [config["vocab_size"], config["hidden_size"]]
    for name, dims in wanted.items():
        with naming(files[name], "copy the target again"), safe_open(files[name], "pt") as file:
            if name not in shapes_in(file):  # or its own header would have named it
                raise Damaged(
                    f"{path / INDEX} says that {files[name].name} holds {name}, which it does not; copy it again"
                )
            x = file.get_tensor(name)
            if list(x.shape) != sizes[-dims:] or x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
                raise ValueError(f"{name} is {x.dtype} {list(x.shape)}; config.json says {sizes[-dims:]}, unquantised")
            check_finite([(name, x)])
            found.append(x)
    return (*found, found[0])[:3]


def weight_files(path: Path) -> dict[str, Path]:
    """The file that holds each tensor, by the index of a sharded checkpoint or by the headers of its files."""
    if (indexed := weight_map(path)) is not None:
        return indexed
    files = {}
    for each in sorted(path.glob("*.safetensors")):
        with naming(each, "copy the target again"), safe_open(each, "pt") as file:
            files |= dict.fromkeys(shapes_in(file), each)
    return files
