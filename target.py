"""The frozen target: how it is loaded, which of its states a draft learns from, and the built-in tiny targets.

Shapes: L tokens of a document, H the target's hidden size, V its vocabulary, n its number of decoder layers.
"""

import inspect
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from einops import rearrange
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from data import document, python_documents
from draft_deepseek import RMSNorm
from draft_kimi_k3 import KimiK3Eagle3Config, KimiK3Eagle3MLAAttention, KimiK3MLP

CAPTURE_TOKENS = 4096  # padded tokens of one capture batch

# ------------------------------------------------------------------------------------------------------- any target


class Target:
    """A frozen causal language model, seen from a draft: its hidden states, its head, its greedy decoding.

    `aux_layers` are output ids: j is the residual stream after decoder layer j (0-based), Hugging Face's hidden_states[j+1].
    """

    def __init__(self, model: nn.Module, aux_layers=None, tokenizer=None):
        self.model = model.eval().requires_grad_(False)
        self.config, self.tokenizer = model.config.get_text_config(), tokenizer
        self.backbone, self.layers = find_layers(model, self.config.num_hidden_layers)
        self.aux_layers = check_aux_layers(aux_layers, len(self.layers))
        self.embed_tokens, self.lm_head = model.get_input_embeddings(), model.get_output_embeddings()
        self.hidden_size, self.vocab_size = self.config.hidden_size, self.lm_head.weight.shape[0]
        self.device, self.dtype = self.lm_head.weight.device, self.lm_head.weight.dtype
        parameters = inspect.signature(self.backbone.forward).parameters
        self.cache_name = next((name for name in ("cache", "past_key_values") if name in parameters), None)
        self.batches = self.check_probe()

    @property
    def eos_token_id(self) -> int | None:
        return next(iter(self.stop_token_ids), None)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a generation: the generation config's, else the config's."""
        ids = [getattr(self.model, "generation_config", None), self.config]
        ids = next((c.eos_token_id for c in ids if c is not None and c.eos_token_id is not None), [])
        return [ids] if isinstance(ids, int) else list(ids)

    @property
    def special_token_ids(self) -> list[int]:
        """Every special token (pad, bos, eos, turns, ...), ascending: a draft vocabulary always holds them."""
        ids = {self.config.pad_token_id, self.config.bos_token_id, *self.stop_token_ids} - {None}
        if self.tokenizer is not None:
            ids |= set(self.tokenizer.all_special_ids)
            ids |= {i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        return sorted(i for i in ids if 0 <= i < self.vocab_size)

    @torch.no_grad()  # not inference_mode: its tensors cannot enter the draft's graph
    def capture(self, documents: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """For every document [L]: features [L, 3H] (the auxiliary layers, ascending) and last hidden state [L, H], normed.

        Each equals a run of that document alone. Documents of similar length share a batch, right-padded, when the probe at
        loading showed that a causal model does not see its right. ValueError for an empty document, ids outside the
        vocabulary, or states that are not finite.
        """
        for i, tokens in enumerate(documents):
            if tokens.ndim != 1 or not len(tokens) or not 0 <= int(tokens.min()) <= int(tokens.max()) < self.vocab_size:
                raise ValueError(
                    f"document {i} is {tuple(tokens.shape)} tokens{f' from {tokens.min()} to {tokens.max()}' if tokens.numel() else ''}; "
                    f"a target wants one row of at least one token below its vocabulary {self.vocab_size}"
                )
        captured = [None] * len(documents)
        for batch in self.batch_by_length([len(tokens) for tokens in documents]):
            rows = nn.utils.rnn.pad_sequence([documents[i] for i in batch], batch_first=True).to(self.device)
            features, last = self.states(rows)
            for i, f, h in zip(batch, features, last, strict=True):
                n = len(documents[i])
                captured[i] = f[:n].clone(), h[:n].clone()  # clones: nothing keeps the padded batch alive
                if not (f[:n].isfinite().all() and h[:n].isfinite().all()):
                    raise ValueError(
                        f"the target's states of document {i} ({n} tokens) are not finite in {self.dtype}; load it as float32 or leave that document out"
                    )
        return captured

    def batch_by_length(self, lengths: list[int]) -> Iterator[list[int]]:
        batch = []
        for i in sorted(range(len(lengths)), key=lengths.__getitem__):
            if batch and (not self.batches or lengths[i] * (len(batch) + 1) > CAPTURE_TOKENS):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def states(self, tokens: Tensor, **kwargs) -> tuple[Tensor, Tensor]:
        """tokens [B, L] -> features [B, L, 3H], last hidden state after the final norm [B, L, H]; no logits are made."""
        with self.hooked() as found:
            last = self.backbone(input_ids=tokens, use_cache=False).last_hidden_state
        return torch.cat([found[j] for j in self.aux_layers], dim=-1), last

    @contextmanager
    def hooked(self) -> Iterator[dict[int, Tensor]]:
        found = {}

        def keep(j):
            def hook(module, args, output):
                output = output[0] if isinstance(output, tuple) else output
                found[j] = output.detach().clone()  # a model may reuse the buffer in its next layer

            return hook

        handles = [self.layers[j].register_forward_hook(keep(j)) for j in self.aux_layers]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @torch.no_grad()
    def head(self, hidden: Tensor) -> Tensor:
        """hidden [.., H] after the final norm -> logits [.., V]"""
        return self.lm_head(hidden)

    @torch.no_grad()
    def next_logits(self, tokens: Tensor) -> Tensor:
        """tokens [L] -> logits [L, V], row i over the token after i; no cache, so it may verify any rewritten chain."""
        return self.head(self.states(tokens.to(self.device)[None])[1][0])

    @torch.no_grad()
    def greedy(self, prompt: Tensor, max_new_tokens: int, ignore_eos: bool = True) -> Tensor:
        """The new tokens [<= max_new_tokens] after prompt [L]; unless `ignore_eos` a stop token ends them (and is kept)."""
        tokens, cache, new = prompt.to(self.device), None, []
        for _ in range(max_new_tokens):
            kwargs = {self.cache_name: cache} if cache is not None else {}
            unseen = tokens if cache is None else tokens[-1:]
            output = self.backbone(input_ids=unseen[None], use_cache=self.cache_name is not None, **kwargs)
            cache = output.get(self.cache_name) if self.cache_name else None
            new.append(int(self.head(output.last_hidden_state[0, -1]).argmax()))
            tokens = torch.cat([tokens, tokens.new_tensor(new[-1:])])
            if not ignore_eos and new[-1] in self.stop_token_ids:
                break
        return tokens[len(prompt) :]

    @torch.no_grad()
    def check_probe(self) -> bool:
        """Runs a few tokens: the head must give the model's own logits; returns whether right padding changes nothing."""
        ids = torch.arange(8, device=self.device) % self.vocab_size
        features, last = self.states(ids[None, :5])
        logits = self.model(input_ids=ids[None, :5], use_cache=False).logits
        eps = max(1e-5, 4 * torch.finfo(self.dtype).eps)
        gap = float((self.head(last) - logits).abs().max() / logits.abs().max().clamp(min=1e-9))
        if not gap < max(1e-3, eps):
            raise ValueError(
                f"{type(self.model).__name__} does more to its logits than its head does (relative gap {gap:.1e}; soft-capping or "
                "scaling?), so a teacher made by the head alone would be wrong; such targets are not supported"
            )
        padded = self.states(torch.stack([F.pad(ids[:5], (0, 3)), ids]))
        return all(
            bool((p[0, :5] - a[0]).abs().max() <= eps * a.abs().max())
            for p, a in zip(padded, (features, last), strict=True)
        )


def find_layers(model: nn.Module, n: int) -> tuple[nn.Module, nn.ModuleList]:
    """The text backbone (a wrapper's `language_model` included) and its n decoder layers, whatever they are called."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    for layers in decoder.children() if isinstance(decoder, nn.Module) else ():
        if isinstance(layers, nn.ModuleList) and len(layers) == n:
            return decoder, layers
    raise ValueError(
        f"no list of {n} decoder layers (num_hidden_layers) in {type(model).__name__}; a decoder-only causal LM is wanted"
    )


def default_aux_layers(n: int) -> tuple[int, int, int]:
    """Output ids that engines assume when a draft names none (they count inputs: 2, n//2, n-3)."""
    return 1, n // 2 - 1, n - 4


def check_aux_layers(aux_layers, n: int) -> tuple[int, int, int]:
    """Three ascending output ids below n-1, or ValueError; None: the default ones."""
    ids = default_aux_layers(n) if aux_layers is None else tuple(aux_layers)
    if aux_layers is None and not (0 <= ids[0] < ids[1] < ids[2]):
        raise ValueError(
            f"the default auxiliary layers of a target of {n} layers are {list(ids)}, not three distinct ones; it needs 7, or name three layers"
        )
    if len(ids) != 3 or any(isinstance(j, bool) or not isinstance(j, int) for j in ids):
        raise ValueError(f"auxiliary layers are {list(ids)}; three layer numbers are wanted")
    if len(set(ids)) < 3:
        raise ValueError(f"auxiliary layers {list(ids)} repeat; three distinct ones are wanted")
    if not all(0 <= j < n - 1 for j in ids):
        raise ValueError(
            f"auxiliary layers {list(ids)} must lie in 0..{n - 2}: the target has {n} layers, and layer {n - 1} is the last "
            "hidden state itself, which Hugging Face gives after the final norm"
        )
    return tuple(sorted(ids))


def load_target(path, aux_layers=None, trust_remote_code=False, device="cpu", dtype=None) -> Target:
    """A frozen Target from a local Hugging Face causal-LM directory (config.json, weights, a tokenizer where it has one).

    aux_layers: three output ids, None for the default. dtype None: float32 on a CPU, else what the checkpoint says.
    Nothing is fetched and no code of the directory runs unless `trust_remote_code`. ValueError, with what to do, for a
    directory that is missing, malformed or half-written, and for layers that do not exist.
    """
    path = Path(path)
    if not (path / "config.json").is_file():
        have = "holds no config.json" if path.is_dir() else "is no directory"
        raise ValueError(
            f"no target at {path}: it {have}; give a local Hugging Face model directory (config.json, *.safetensors, tokenizer)"
        )
    local = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    dtype = dtype or (torch.float32 if torch.device(device).type == "cpu" else "auto")
    try:
        config = AutoConfig.from_pretrained(path, **local)
        layers = config.get_text_config().num_hidden_layers
    except Exception as error:  # whatever a damaged file provokes in the readers of several formats
        raise unreadable(path, error) from error
    check_aux_layers(aux_layers, layers)  # before gigabytes are read
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in (
        getattr(config, "auto_map", None) or {}
    )
    auto = AutoModelForCausalLM if causal else AutoModelForImageTextToText
    try:
        model, info = auto.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **local)
        has_tokenizer = any((path / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json"))
        tokenizer = AutoTokenizer.from_pretrained(path, **local) if has_tokenizer else None
    except Exception as error:
        raise unreadable(path, error) from error
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise ValueError(
            f"the weights in {path} lack {len(missing)} tensors of its config.json ({', '.join(missing[:3])}, ...); copy the directory again"
        )
    return Target(model.to(device), aux_layers, tokenizer)


def unreadable(path: Path, error: Exception) -> ValueError:
    reason = " ".join(str(error).split())[:300]
    return ValueError(
        f"the target in {path} cannot be loaded: {type(error).__name__}: {reason}; copy the directory again, or see --trust-remote-code"
    )


# ------------------------------------------------------------------------------------------- the built-in tiny targets

SPECIAL_TOKENS = [
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
]  # ids 256..261, behind the bytes
VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
PAD, BOS, EOS, _, _, END = range(256, VOCAB_SIZE)
CHAT_TEMPLATE = (
    "<|bos|>{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{{ message.content }}<|end|>"
    "{% elif message.role == 'user' %}<|user|>{{ message.content }}"
    "{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TINY_STEPS = {"deepseek-v3": 210, "kimi-k3": 210}  # about 50 s each on two cores
BATCH_TOKENS, WARMUP, MUON_LR, ADAM_LR = 2048, 10, 0.02, 3e-3


def tiny_target(preset: str, directory, seed: int = 0, progress: bool = True, steps: int | None = None) -> Path:
    """The directory of the built-in target `preset`, made there when absent: a small model of the preset's architecture,
    trained on the standard library's sources for about a minute of two cores, saved as a Hugging Face checkpoint.

    `steps` replaces the preset's number of training steps. ValueError for an unknown preset, or a directory that holds
    anything else than that target.
    """
    if preset not in TINY_STEPS:
        raise ValueError(f"no built-in target {preset!r}; there are {', '.join(TINY_STEPS)}")
    directory = Path(directory)
    recipe = {"preset": preset, "seed": seed, "steps": steps or TINY_STEPS[preset]}
    if directory.exists():
        return check_recipe(directory, recipe)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = TINY_MODELS[preset]()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=BOS, eos_token_id=[EOS, END]
    )  # END: of a turn
    tokenizer = byte_tokenizer()
    reached = train_tiny(model, tokenizer, recipe, progress)
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as parts:
        half = Path(parts) / "target"
        model.save_pretrained(half)
        tokenizer.save_pretrained(half)
        (half / "tiny_target.json").write_text(json.dumps(recipe | reached) + "\n")
        try:
            os.rename(half, directory)  # whole or absent: a killed run leaves nothing that a later one would load
        except OSError:
            check_recipe(directory, recipe)  # another process was faster
    return directory


def check_recipe(directory: Path, recipe: dict) -> Path:
    try:
        found = json.loads((directory / "tiny_target.json").read_text())
    except (OSError, ValueError):
        found = {}
    if found | recipe != found:
        have = {key: found.get(key) for key in recipe} if found else "something else"
        raise ValueError(
            f"{directory} holds {have}, wanted is the built-in target {recipe}; name another directory or remove this one"
        )
    return directory


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Token id = byte for 0..255, then SPECIAL_TOKENS; no merges, so text of any kind survives the round trip."""
    letters = (
        bytes_to_unicode()
    )  # the printable stand-in of every byte, by which byte-level tokenizers name their tokens
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    pad, bos, eos, *turns = SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        additional_special_tokens=turns,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
    )


def tiny_deepseek_v3() -> nn.Module:
    """transformers' own DeepSeek-V3, small: eight layers, the last of them a mixture of experts, MLA, yarn on."""
    config = DeepseekV3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=64,
        kv_lora_rank=64,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=32,
        first_k_dense_replace=7,
        moe_intermediate_size=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        routed_scaling_factor=1.0,
        max_position_embeddings=163840,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        topk_method="noaux_tc",  # this and the next two are no keys of transformers' config; engines ask for them
        scoring_func="sigmoid",
        num_nextn_predict_layers=0,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return DeepseekV3ForCausalLM(config)


class TinyKimiK3Config(PretrainedConfig):
    """The sizes of the tiny Kimi K3; `KimiK3Eagle3Config` reads its own keys out of it."""

    model_type = "tiny_kimi_k3"

    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    num_key_value_heads: int = 4
    q_lora_rank: int | None = 64
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    initializer_range: float = 0.02
    pad_token_id: int | None = PAD
    bos_token_id: int | None = BOS
    eos_token_id: int | None = EOS
    tie_word_embeddings: bool = False


class CausalKimiK3Attention(KimiK3Eagle3MLAAttention):
    """The draft's attention as a target's: one causal block over plain H-wide input, no steps."""

    def forward(self, x: Tensor) -> Tensor:
        pre_q, pre_kv, pre_gate = self.project(x)
        k, v = self.keys_values(self.latents(pre_kv, None))  # NoPE: positions are for nobody
        o = F.scaled_dot_product_attention(
            self.queries(pre_q, x.new_zeros(x.shape[:2])), k, v, is_causal=True, scale=self.scaling
        )
        return self.output(o, pre_gate)


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


class TinyKimiK3ForCausalLM(PreTrainedModel):
    """A small causal model of the K3 draft's own attention, MLP and norm, since transformers has no Kimi K3.

    It shows a K3 draft what it would see of K3: NoPE multi-head latent attention with an output gate, and a SiTU MLP. Not
    in it: the linear-attention layers, the experts and the attention residuals. Order comes from the causal mask alone.
    """

    config_class, base_model_prefix = TinyKimiK3Config, "model"

    def __init__(self, config: TinyKimiK3Config):
        super().__init__(config)
        self.model = TinyKimiK3Model(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, **kwargs) -> CausalLMOutput:
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


AutoConfig.register(TinyKimiK3Config.model_type, TinyKimiK3Config)
AutoModelForCausalLM.register(TinyKimiK3Config, TinyKimiK3ForCausalLM)


def tiny_kimi_k3() -> nn.Module:
    return TinyKimiK3ForCausalLM(TinyKimiK3Config())


TINY_MODELS = {"deepseek-v3": tiny_deepseek_v3, "kimi-k3": tiny_kimi_k3}


def train_tiny(model: nn.Module, tokenizer, recipe: dict, progress: bool) -> dict:
    """Next-token training over whole documents, in place; returns what it reached on the answers of held-out files."""
    documents = [document(tokenizer, *pair) for pair in python_documents(held_out=False, seed=recipe["seed"])]
    muon, adam = split_parameters(model)
    optimizers = [Muon(muon, lr=MUON_LR), torch.optim.AdamW(adam, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]
    steps = recipe["steps"]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(o, lambda i: min((i + 1) / WARMUP, (steps - i) / steps)) for o in optimizers
    ]
    batches = length_batches(documents, random.Random(recipe["seed"]))
    model.train()
    bar = tqdm(range(steps), desc=f"training the tiny {recipe['preset']} target", unit="step", disable=not progress)
    for _ in bar:
        loss, _, _ = next_token_loss(model, next(batches), answers_only=False)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.3f}")
    model.eval()
    held_out = [document(tokenizer, *pair) for pair in python_documents(held_out=True, seed=0)[:128]]
    reached = evaluate(model, held_out)
    if progress:
        print(
            f"tiny {recipe['preset']} target, held-out answers: {reached['bits_per_byte']:.3f} bits per byte, top-1 {reached['top1']:.1%}"
        )
    return reached


def length_batches(documents, rng: random.Random) -> Iterator[list]:
    """Endless batches of about BATCH_TOKENS padded tokens, of documents of similar length, in random order."""
    while True:
        order = sorted(documents, key=lambda d: len(d.tokens) + rng.randrange(32))
        batches, batch = [], []
        for d in order:
            if (len(batch) + 1) * max(len(x.tokens) for x in [*batch, d]) > BATCH_TOKENS:
                batches.append(batch)
                batch = []
            batch.append(d)
        rng.shuffle(batches)
        yield from batches


def next_token_loss(model: nn.Module, batch: list, answers_only: bool) -> tuple[Tensor, Tensor, int]:
    """-> mean cross-entropy in nats, top-1 hits, tokens counted. Padding is on the right, which a causal model never sees."""
    tokens = nn.utils.rnn.pad_sequence([d.tokens for d in batch], batch_first=True, padding_value=PAD)
    counted = [d.loss_mask if answers_only else torch.ones_like(d.loss_mask) for d in batch]
    counted = nn.utils.rnn.pad_sequence(counted, batch_first=True)[:, 1:]
    hidden = model.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1]
    logits, labels = model.lm_head(hidden[counted]), tokens[:, 1:][counted]
    return F.cross_entropy(logits.float(), labels), (logits.argmax(-1) == labels).sum(), len(labels)


@torch.no_grad()
def evaluate(model: nn.Module, documents: list) -> dict:
    nats = hits = count = 0
    for start in range(0, len(documents), 8):
        loss, right, n = next_token_loss(model, documents[start : start + 8], answers_only=True)
        nats, hits, count = nats + loss.item() * n, hits + right.item(), count + n
    return {"bits_per_byte": nats / count / math.log(2), "top1": hits / count}


def split_parameters(model: nn.Module) -> tuple[list, list]:
    """Matrices that map hidden to hidden, for Muon; embedding, head, router and norms, for AdamW."""
    muon, adam = [], []
    for name, parameter in model.named_parameters():
        outer = any(part in name for part in ("embed_tokens", "lm_head", "mlp.gate.weight"))
        (adam if outer or parameter.ndim < 2 else muon).append(parameter)
    return muon, adam


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by Newton-Schulz; parameters [.., m, n], leading dimensions are a batch."""

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            same_shape = {}
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(buffer, group["momentum"])  # Nesterov
                same_shape.setdefault(p.shape[-2:], []).append((p, update.view(-1, *p.shape[-2:])))
            for (m, n), pairs in same_shape.items():
                updates = orthogonalise(torch.cat([update for _, update in pairs])) * max(1, m / n) ** 0.5
                for (p, _), update in zip(pairs, updates.split([len(u) for _, u in pairs]), strict=True):
                    p.sub_(update.view_as(p), alpha=group["lr"])


def orthogonalise(x: Tensor, rounds: int = 5) -> Tensor:
    """[b, m, n] -> nearly U V^T of its singular value decomposition, by a quintic iteration tuned for a steep start."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    x = rearrange(x, "b m n -> b n m") if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return rearrange(x, "b m n -> b n m") if tall else x
