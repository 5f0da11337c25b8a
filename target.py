"""The frozen target: how it is loaded, which of its states a draft learns from, and the built-in tiny targets.

Shapes: L tokens of a document, B documents, H the target's hidden size, V its vocabulary, n its number of layers.
"""

import inspect
import json
import math
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from conversations import answered
from data import Document, python_documents
from draft_deepseek import RMSNorm
from draft_kimi_k3 import KimiK3Eagle3Config, KimiK3Eagle3MLAAttention, KimiK3MLP
from files import check_finite, naming, read_json, replace_with, to_json, weight_map

CAPTURE_TOKENS = 4096  # padded tokens of one batch of capture

# ---------------------------------------------------------------------------------------------------------- any target


class Target:
    """A frozen causal language model as a draft sees it: hidden states, output head, greedy decoding.

    `aux_layers` are output ids: j is the residual stream behind 0-based decoder layer j, Hugging Face's
    hidden_states[j+1]. `embed_tokens` is the embedding table, `stop_token_ids` end a generation; `tokenizer` or None.
    """

    def __init__(self, model: nn.Module, aux_layers=None, tokenizer=None):
        self.model = model.eval().requires_grad_(False)
        self.config, self.tokenizer = model.config.get_text_config(), tokenizer
        self.backbone, self.layers = find_layers(model, self.config.num_hidden_layers)
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
        layers = config.get_text_config().num_hidden_layers
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


# ------------------------------------------------------------------------------------------------ built-in tiny targets

# Ids 256 and up, behind the bytes.
SPECIAL_TOKENS = ["<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD, BOS, EOS, _, _, END = range(256, 262)
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% elif message.role == 'user' %}<|user|>{{ message.content }}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZES = {"vocab_size": 262, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 7}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 64}
SIZES |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
SIZES |= {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "tie_word_embeddings": False}
TINY_STEPS = {"deepseek-v3": 200, "kimi-k3": 200}  # about 50 s on two cores


def tiny_target(preset: str, directory, seed: int = 0, progress: bool = True, steps: int | None = None) -> Path:
    """The directory of a built-in target, made when absent: a small model of the preset's architecture, trained on the
    standard library's sources for a minute of two cores and saved as a Hugging Face checkpoint.

    steps: of training, None for the preset's. ValueError: an unknown preset, a directory that holds anything else.
    """
    if preset not in TINY_MODELS:
        raise ValueError(f"no built-in target {preset!r}; there are {', '.join(TINY_MODELS)}")
    directory, recipe = Path(directory), {"preset": preset, "seed": seed, "steps": steps or TINY_STEPS[preset]}
    if directory.exists():
        return check_recipe(directory, recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_MODELS[preset]()
    tokenizer = byte_tokenizer()
    reached = train_tiny(model, tokenizer, recipe, progress)
    directory.parent.mkdir(parents=True, exist_ok=True)

    def write(half: Path) -> None:
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        (half / "tiny_target.json").write_text(to_json(recipe | reached) + "\n")

    try:
        replace_with(directory, write)
    except OSError:
        if not directory.exists():
            raise
        check_recipe(directory, recipe)  # another process was faster
    return directory


def check_recipe(directory: Path, recipe: dict) -> Path:
    try:
        found = json.loads((directory / "tiny_target.json").read_text())
    except (OSError, ValueError):
        raise ValueError(f"{directory} exists and holds no built-in target; name another one, or remove it") from None
    if found | recipe != found:
        have = {key: found.get(key) for key in recipe}
        raise ValueError(f"{directory} holds built-in target {have}, wanted is {recipe}; name another, or remove it")
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Ids 0..255 are the bytes, then SPECIAL_TOKENS; no merges, so any text survives the round trip."""
    stand_in = bytes_to_unicode()  # byte-level tokenizers name each byte by a printable character
    tokenizer = Tokenizer(models.BPE(vocab={stand_in[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    pad, bos, eos, *turns = SPECIAL_TOKENS
    named = {"pad_token": pad, "bos_token": bos, "eos_token": eos, "additional_special_tokens": turns}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, clean_up_tokenization_spaces=False, **named
    )


def tiny_deepseek_v3() -> nn.Module:
    """transformers' own DeepSeek-V3, small: MLA, yarn, and a mixture of experts in the last layer."""
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096}
    rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    experts = {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    experts |= {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0}
    # Not in transformers' config, but vLLM asks for them.
    engines = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0}
    config = transformers.DeepseekV3Config(
        **SIZES | experts | engines,
        first_k_dense_replace=SIZES["num_hidden_layers"] - 1,
        rope_parameters=rope,
        max_position_embeddings=163840,
    )
    return with_stops(transformers.DeepseekV3ForCausalLM(config))


def tiny_kimi_k3() -> nn.Module:
    situ = {"hidden_act": "situ", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}
    mla = {"mla_use_nope": True, "mla_use_output_gate": True, "rms_norm_eps": 1e-5, "max_position_embeddings": 1048576}
    return with_stops(TinyKimiK3ForCausalLM(TinyKimiK3Config(**SIZES | situ | mla)))


TINY_MODELS = {"deepseek-v3": tiny_deepseek_v3, "kimi-k3": tiny_kimi_k3}


def with_stops(model: nn.Module) -> nn.Module:
    model.generation_config.eos_token_id = [EOS, END]  # an answer ends with its turn
    return model


class TinyKimiK3Config(PretrainedConfig):
    model_type = "tiny_kimi_k3"


class TinyKimiK3ForCausalLM(PreTrainedModel, transformers.GenerationMixin):
    """A small causal model made of the K3 draft's own attention, MLP and norm, because transformers has no Kimi K3.

    It has what a K3 draft meets in K3: NoPE latent attention with an output gate, and SiTU. It lacks the linear
    attention, the experts and the attention residuals, so what order there is comes from the causal mask.
    """

    config_class, base_model_prefix = TinyKimiK3Config, "model"

    def __init__(self, config: TinyKimiK3Config):
        super().__init__(config)
        self.model = TinyKimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class TinyKimiK3Model(PreTrainedModel):
    config_class = TinyKimiK3Config

    def __init__(self, config: TinyKimiK3Config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        block = KimiK3Eagle3Config.from_any(config)
        self.layers = nn.ModuleList(TinyKimiK3Layer(block) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs) -> BaseModelOutput:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class TinyKimiK3Layer(nn.Module):
    def __init__(self, config: KimiK3Eagle3Config):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = CausalKimiK3Attention(config, fuse_input=False)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = KimiK3MLP(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalKimiK3Attention(KimiK3Eagle3MLAAttention):
    """The draft's attention at its step 0, through the fused kernel."""

    def forward(self, x: Tensor) -> Tensor:
        nowhere = x.new_zeros(x.shape[:2])  # NoPE: nothing is rotated by a position
        pre_q, pre_kv, pre_gate = self.project(x)
        q, (k, v) = self.queries(pre_q, nowhere), self.keys_values(self.latents(pre_kv, nowhere))
        return self.output(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling), pre_gate)


AutoConfig.register(TinyKimiK3Config.model_type, TinyKimiK3Config)
AutoModelForCausalLM.register(TinyKimiK3Config, TinyKimiK3ForCausalLM)

# ------------------------------------------------------------------------------------------------------ their training

BATCH_TOKENS, WARMUP, MUON_LR, ADAM_LR = 2048, 10, 0.02, 0.003


def train_tiny(model: nn.Module, tokenizer, recipe: dict, progress: bool) -> dict:
    """Next-token training in place, on whole documents; returns what it reaches on the answers of held-out files."""
    batches = length_batches(python_documents(held_out=False, seed=recipe["seed"]), random.Random(recipe["seed"]))
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        outer = any(part in name for part in ("embed_tokens", "lm_head", "gate.weight"))  # the latter routes to experts
        (others if outer or parameter.ndim < 2 else matrices).append(parameter)
    optimizers = [Muon(matrices, lr=MUON_LR), torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0)]
    steps = recipe["steps"]
    lrs = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / WARMUP, 1 - i / steps)) for o in optimizers]
    bar = tqdm(range(steps), desc=f"training the tiny {recipe['preset']} target", unit="step", disable=not progress)
    for _ in bar:
        loss, _, _ = next_token_loss(model, answered(tokenizer, next(batches)))
        loss.backward()
        for each in optimizers + lrs:
            each.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}")
    nats = hits = count = 0
    held_out = answered(tokenizer, python_documents(held_out=True)[:64])
    with torch.no_grad():
        for i in range(0, len(held_out), 8):
            loss, hit, n = next_token_loss(model.eval(), held_out[i : i + 8], answers_only=True)
            nats, hits, count = nats + loss.item() * n, hits + hit, count + n
    reached = {"bits_per_byte": nats / count / math.log(2), "top1": hits / count}
    if progress:
        bits, top1 = reached.values()
        print(f"tiny {recipe['preset']} target, held-out answers: {bits:.2f} bits per byte, {top1:.1%} of bytes right")
    return reached


def length_batches(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[list[tuple[str, str]]]:
    """Endless shuffled batches of (prompt, answer) pairs of similar length, of about BATCH_TOKENS bytes."""
    while True:
        batches, batch = [], []
        for pair in sorted(pairs, key=lambda pair: len("".join(pair)) + rng.randrange(32)):
            if (len(batch) + 1) * len("".join(pair)) > BATCH_TOKENS:
                batches.append(batch)
                batch = []
            batch.append(pair)
        rng.shuffle(batches)
        yield from batches


def next_token_loss(model: nn.Module, batch: list[Document], answers_only=False) -> tuple[Tensor, int, int]:
    """Mean cross-entropy in nats, top-1 hits, tokens counted. Padding is on the right, where no causal model looks."""
    tokens = pad_sequence([d.tokens for d in batch], batch_first=True, padding_value=PAD)
    counted = [d.loss_mask if answers_only else torch.ones_like(d.loss_mask) for d in batch]
    counted = pad_sequence(counted, batch_first=True)[:, 1:]
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    logits, labels = model.lm_head(hidden[counted]), tokens[:, 1:][counted]
    return F.cross_entropy(logits, labels), int((logits.argmax(-1) == labels).sum()), len(labels)


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton-Schulz before it is applied; for parameters [..,m,n] (.. are experts)."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            alike = {}  # matrices of one shape are orthogonalised together
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                nesterov = p.grad.lerp(buffer, group["momentum"])
                alike.setdefault(p.shape[-2:], []).append((p, nesterov.view(-1, *p.shape[-2:])))
            for (m, n), pairs in alike.items():
                updates = orthogonalise(torch.cat([u for _, u in pairs])) * max(1, m / n) ** 0.5
                for (p, _), update in zip(pairs, updates.split([len(u) for _, u in pairs]), strict=True):
                    p.sub_(update.view_as(p), alpha=group["lr"])


def orthogonalise(x: Tensor, rounds: int = 5) -> Tensor:
    """x [b,m,n] -> roughly U V^T of its singular value decomposition, by a quintic iteration on the singular values."""
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at 0: five rounds bring all of them near 1
    if x.shape[-2] > x.shape[-1]:
        return orthogonalise(x.mT, rounds).mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x
