"""The frozen target: how it is loaded, and which of its states a draft learns from.

Shapes: L tokens of a document, B documents, H the target's hidden size, V its vocabulary, n its number of layers.
"""

import inspect
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from data.files import check_finite, naming, read_json, weight_map
from target import tiny_kimi_k3  # noqa: F401 (transformers learns its model type)

CAPTURE_TOKENS = 4096  # padded tokens of one batch of capture


class Target:
    """A frozen causal language model as a draft sees it: hidden states, output head, greedy decoding.

    `aux_layers` are output ids: j is the residual stream behind 0-based decoder layer j, Hugging Face's
    hidden_states[j+1]. `embed_tokens` is the embedding table, `stop_token_ids` end a generation; `tokenizer` or None.
    """

    def __init__(self, model: nn.Module, aux_layers=None, tokenizer=None):
        self.model = model.eval().requires_grad_(False)
        self.config, self.tokenizer = model.config.get_text_config(), tokenizer
        self.backbone, self.layers = find_layers(model, layer_count(self.config))
        self.aux_layers = check_aux_layers(aux_layers, len(self.layers))
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.hidden_size, self.vocab_size = self.config.hidden_size, self.lm_head.weight.shape[0]
        self.device, self.dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        generation = getattr(model, "generation_config", None)
        stops = self.config.eos_token_id if generation is None else generation.eos_token_id
        self.stop_token_ids = [stops] if isinstance(stops, int) else list(stops or [])
        names = inspect.signature(self.backbone.forward).parameters
        self.cache_name = next((name for name in ("cache", "past_key_values") if name in names), None)
        self.sees_no_padding = self.probe()

    @property
    def eos_token_id(self) -> int | None:
        return self.stop_token_ids[0] if self.stop_token_ids else None

    @property
    def special_token_ids(self) -> list[int]:
        """Pad, bos, eos and all added tokens (turns, think, tools, ...), ascending: a draft vocabulary holds them."""
        ids = {self.config.pad_token_id, self.config.bos_token_id, *self.stop_token_ids} - {None}
        if self.tokenizer is not None:
            ids |= {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return sorted(i for i in ids if 0 <= i < self.vocab_size)

    def capture(self, documents: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Of every document [L]: features [L,3H], the auxiliary layers ascending, and the last hidden state [L,H],
        after the final norm. They equal a run of that document alone.

        ValueError: an empty document, ids outside the vocabulary, states that are not finite.
        """
        for i, x in enumerate(documents):
            if x.ndim != 1 or len(x) == 0 or x.min() < 0 or x.max() >= self.vocab_size:
                found = f"{x.min()}..{x.max()}" if x.numel() else "none"
                raise ValueError(
                    f"document {i} is {list(x.shape)}, ids {found}; wanted is a row of ids in 0..{self.vocab_size - 1}"
                )
        captured = [None] * len(documents)
        for batch in self.batches([len(x) for x in documents]):
            states = self.states(pad_sequence([documents[i] for i in batch], batch_first=True).to(self.device))
            if not all(x.isfinite().all() for x in states):
                raise ValueError(
                    f"the target's states of documents {batch} hold NaN or Inf in {self.dtype}; try float32"
                )
            for i, *pair in zip(batch, *states, strict=True):
                captured[i] = tuple(x[: len(documents[i])].clone() for x in pair)  # the padded batch is let go
        return captured

    def batches(self, lengths: list[int]) -> Iterator[list[int]]:
        """Indices of documents of similar length, CAPTURE_TOKENS at most; single ones if the target sees padding."""
        batch = []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and not (self.sees_no_padding and lengths[i] * (len(batch) + 1) <= CAPTURE_TOKENS):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """tokens [B,L] -> features [B,L,3H], last hidden state [B,L,H]"""
        return self.run(tokens, use_cache=False)[:2]

    @torch.no_grad()  # not inference_mode: its tensors cannot enter the draft's graph
    def run(self, tokens: Tensor, cache=None, use_cache=True, **how) -> tuple[Tensor, Tensor, object]:
        """`states` of tokens [B,L] behind a cache, and that cache, grown by them. From the backbone: no logits are
        made."""
        found = {}

        def keep(j, module, args, output):
            output = output[0] if isinstance(output, tuple) else output
            found[j] = output.clone()  # a later layer may write into the same memory

        past = {} if cache is None else {self.cache_name: cache}
        handles = [self.layers[j].register_forward_hook(partial(keep, j)) for j in self.aux_layers]
        try:
            output = self.backbone(input_ids=tokens, use_cache=use_cache, **past, **how)
        finally:
            for handle in handles:
                handle.remove()
        features = torch.cat([found[j] for j in self.aux_layers], dim=-1)
        return features, output.last_hidden_state, output.get(self.cache_name)

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [..,H] after the final norm -> logits [..,V]"""
        return self.lm_head(hidden.to(self.dtype))

    @torch.no_grad()
    def greedy(self, prompt: Tensor, max_new_tokens: int, ignore_eos: bool = True) -> Tensor:
        """The tokens after prompt [L]: max_new_tokens, or up to and with a stop token unless `ignore_eos`."""
        tokens, cache = prompt.to(self.device), None
        for _ in range(max_new_tokens):
            unseen, past = (tokens, {}) if cache is None else (tokens[-1:], {self.cache_name: cache})
            output = self.backbone(input_ids=unseen[None], use_cache=self.cache_name is not None, **past)
            cache = output.get(self.cache_name)
            tokens = torch.cat([tokens, self.head(output.last_hidden_state[0, -1:]).argmax(-1)])
            if not ignore_eos and int(tokens[-1]) in self.stop_token_ids:
                break
        return tokens[len(prompt) :]

    @torch.no_grad()
    def probe(self) -> bool:
        """Does right padding change nothing? Also raises unless the head alone makes the model's own logits."""
        eps = max(1e-5, 4 * torch.finfo(self.dtype).eps)
        ids = torch.arange(8, device=self.device) % self.vocab_size
        alone = self.states(ids[None, :5])
        logits = self.model(input_ids=ids[None, :5], use_cache=False).logits
        gap = float((self.head(alone[1]) - logits).abs().max() / logits.abs().max().clamp(min=1e-9))
        if gap > max(1e-3, eps):
            raise ValueError(
                f"{type(self.model).__name__} does more to its logits than its head (a gap of {gap:.1%}; a soft cap or "
                "scale?), so the head cannot be the teacher; targets of this kind are not supported"
            )
        padded = self.states(torch.stack([F.pad(ids[:5], (0, 3)), ids]))
        return all(
            bool((p[0, :5] - a[0]).abs().max() <= eps * a.abs().max()) for p, a in zip(padded, alone, strict=True)
        )


def find_layers(model: nn.Module, n: int) -> tuple[nn.Module, nn.ModuleList]:
    """The text backbone (in a multimodal wrapper the `language_model`) and its n decoder layers, by any name."""
    backbone = model.get_decoder() if hasattr(model, "get_decoder") else nn.Module()
    for layers in backbone.children():
        if isinstance(layers, nn.ModuleList) and len(layers) == n:
            return backbone, layers
    raise ValueError(f"no list of {n} decoder layers in a {type(model).__name__}; a target is a decoder-only causal LM")


USUAL = {"num_layers": "num_hidden_layers", "ffn_hidden_size": "intermediate_size"}  # of LongCat-Flash


def usual_names(config: dict) -> dict:
    """A target's config.json with the names that most have."""
    return config | {name: config[own] for own, name in USUAL.items() if config.get(own) is not None}


def layer_count(config) -> int:
    """Decoder layers; LongCat-Flash's have two attentions each, which transformers counts as two hidden layers."""
    return getattr(config, "num_layers", None) or config.num_hidden_layers


def default_aux_layers(n: int) -> tuple[int, int, int]:
    """Output ids of what engines capture when a draft names no layers (they count by input: 2, n//2, n-3)."""
    return 1, n // 2 - 1, n - 4


def check_aux_layers(aux_layers, n: int) -> tuple[int, int, int]:
    """Three distinct output ids in 0..n-2, ascending; None: the default ones. ValueError otherwise."""
    ids = default_aux_layers(n) if aux_layers is None else tuple(aux_layers)
    which = f"the {'default ' if aux_layers is None else ''}auxiliary layers are {list(ids)} of {n} layers"
    if len(ids) != 3 or len(set(ids)) < 3 or any(type(j) is not int for j in ids):
        raise ValueError(
            f"{which}; wanted are three distinct numbers{'' if aux_layers else ': name them, or take 7 layers'}"
        )
    if not 0 <= min(ids) <= max(ids) <= n - 2:
        # The last layer's output is the last hidden state itself, which Hugging Face hands out after the final norm.
        raise ValueError(f"{which}; they must lie in 0..{n - 2}, below the last layer, whose output is captured anyway")
    return tuple(sorted(ids))


def load_target(path, aux_layers=None, trust_remote_code=False, device="cpu", dtype=None) -> Target:
    """A Target from a local Hugging Face causal-LM directory: config.json, weights, and a tokenizer where it has one.

    aux_layers: three output ids, None for the default ones. dtype None: float32 on a CPU, else the checkpoint's.
    Nothing is fetched, and no code of the directory runs unless `trust_remote_code`. ValueError, saying what to do: a
    directory that is missing, malformed or half-written, layers that do not exist.
    """
    path = Path(path)
    check_directory(path)
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else "auto")
    try:
        config = AutoConfig.from_pretrained(path, **local)
        layers = layer_count(config.get_text_config())
    except Exception as error:  # whatever a damaged file provokes in the readers of several formats
        raise unreadable(path, error) from error
    check_aux_layers(aux_layers, layers)  # before gigabytes are read
    own_code = trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    is_causal = own_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING  # else a multimodal wrapper
    auto = AutoModelForCausalLM if is_causal else transformers.AutoModelForImageTextToText
    try:
        model, info = auto.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **local)
    except Exception as error:
        raise unreadable(path, error) from error
    if missing := sorted(info["missing_keys"]):  # transformers makes them up at random and only warns
        raise ValueError(
            f"the weights in {path} lack {len(missing)} tensors ({', '.join(missing[:3])}); copy the directory again"
        )
    with naming(path, "copy the target again"):
        check_finite(model.named_parameters())
    tokenizer = load_tokenizer(path, trust_remote_code)
    try:
        return Target(model.to(device), aux_layers, tokenizer)
    except (TypeError, RuntimeError, IndexError) as error:  # a config.json that loads and does not run
        raise unreadable(path, error) from error


def check_directory(path: Path) -> None:
    """ValueError unless there is a target, whose config.json, generation_config.json and index name what can be."""
    if not (path / "config.json").is_file():
        found = "has no config.json" if path.is_dir() else "is no directory"
        raise ValueError(f"no target in {path}: it {found}; give a local Hugging Face model directory")
    for name in ("config.json", "generation_config.json"):
        if (path / name).is_file():
            config = read_json(path / name, ())
            with naming(path / name, "copy the target's own"):
                check_target_config(config)
    weight_map(path)


def check_target_config(config: dict) -> None:
    """ValueError: a size or token that cannot be, at the outer level or of the text model."""
    text = config.get("text_config")
    if not isinstance(text, dict | None):
        raise ValueError(f"text_config is {text!r}; a table is wanted")
    config = config | {key: x for key, x in (text or {}).items() if x is not None}
    check_counts(config, ("hidden_size", "vocab_size"))
    check_counts(config, ("num_hidden_layers",), most=10_000)
    stops = config.get("eos_token_id")
    stops = stops if isinstance(stops, list) else [stops]
    pad, bos, vocab = (config.get(key) for key in ("pad_token_id", "bos_token_id", "vocab_size"))
    if any(x is not None and type(x) is not int for x in (pad, bos, *stops)):
        raise ValueError(f"pad_token_id, bos_token_id, eos_token_id are {pad!r}, {bos!r}, {stops!r}; ids are wanted")
    if pad is not None and vocab is not None and not 0 <= pad < vocab:
        raise ValueError(f"pad_token_id is {pad}; it must lie in 0..{vocab - 1}, or be null")
    for key in ("mla_use_nope", "tie_word_embeddings"):
        if not isinstance(config.get(key), bool | None):
            raise ValueError(f"{key} is {config[key]!r}; true or false is wanted")
    eps = config.get("rms_norm_eps")
    if eps is not None and (type(eps) not in (int, float) or not 0 <= eps < 1):
        raise ValueError(f"rms_norm_eps is {eps!r}; a small number is wanted")


def check_counts(config: dict, keys, most: int = 2**31) -> None:
    """ValueError unless what a config.json says of these sizes are sizes; null is none."""
    for key in keys:
        x = config.get(key)
        if x is not None and (type(x) is not int or not 1 <= x <= most):
            raise ValueError(f"{key} is {x!r}; a whole number from 1 to {most} is wanted")


def load_tokenizer(path: Path, trust_remote_code=False):
    """That of a local model directory; None where it has none. ValueError: it cannot be read."""
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return ValueError(f"the target in {path} cannot be read ({reason}); is it whole, does it want --trust-remote-code?")
