"""EAGLE-3 draft with a Multi-head Latent Attention (MLA) backbone for DeepSeek-V3 and Kimi K2 targets, and its exact
loss.

Self-contained: torch, transformers and einops. `DeepseekV3Eagle3DraftModel` is the draft, `build_rows` makes its
batches, `TTTLoss` is the whole S-step training-time test (EAGLE-3, arXiv 2503.01840, section 3) of such a batch as one
static graph.

    x token ids, g projected target features, a[t, s] the draft's state of slot t after step s, p the target's softmax
    over the draft ids.  Slot t at step s reads token x[t+1+s] and state a[t, s-1], with a[t, -1] = g[t], at position[t]
    + s. Its query sees the step-0 keys of slots j <= t of its document and its own keys of steps 1..s (the "diagonal"):

        step 0 keys:   k0 k1 k2 k3 .      own keys of steps 1..s:  . . . | t,1 t,2
        slot t = 3 sees [x  x  x  x]      and nothing of any other slot:   [ x   x ]

    So after step 0 no slot reads another: steps >= 1 run at the supervised slots ("anchors") alone, over a cache of
    latents.

Shapes: B rows, T slots, A anchors, S steps, H hidden, n heads, R kv_lora_rank, Dn/Dr/Dv nope, rope and value widths,
V target vocabulary, Vd draft vocabulary; in einops patterns b t a s h n r d v, and j for the diagonal's steps.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import partial
from itertools import accumulate, pairwise
from operator import mul
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import einsum, rearrange, repeat
from torch import Tensor, nn
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, PreTrainedModel

# All that a draft rotates by. A target's config may say more (`partial_rotary_factor` of whole heads, scaling of its
# own queries), which engines would apply to the draft, or would not.
ROPE = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
ROPE += ("mscale", "mscale_all_dim", "attention_factor")


class Eagle3MLAConfig(PretrainedConfig):
    """Every key an MLA EAGLE-3 draft is served with. Sizes are required; RoPE is read from `rope_parameters` alone.

    `rope_theta`/`rope_scaling` of older configs are folded into `rope_parameters`. ValueError: a size that is missing,
    no rope_theta anywhere, `mla_use_nope` true, a rope type other than default and yarn, a draft vocabulary outside
    1..vocab_size.
    """

    model_type = "deepseek_v2"
    has_no_defaults_at_init = True

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    q_lora_rank: int | None = None
    num_key_value_heads: int | None = None  # None: num_attention_heads
    target_hidden_size: int | None = None  # None: hidden_size
    draft_vocab_size: int | None = None  # None: vocab_size
    num_aux_hidden_states: int = 3
    fc_norm: bool = False
    norm_output: bool = False
    rope_parameters: dict | None = None
    eagle_aux_hidden_state_layer_ids: list[int] | None = None  # as engines number them; None: their defaults
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02

    def __post_init__(self, **kwargs):
        if kwargs.pop("mla_use_nope", False):  # a key of the subclass that has no RoPE
            raise ValueError("mla_use_nope is true, but this draft has RoPE; the one without is in draft_kimi_k3.py")
        rope_scaling, rope_theta = kwargs.pop("rope_scaling", None), kwargs.pop("rope_theta", None)
        self.rope_parameters = self.resolve_rope(self.rope_parameters, rope_scaling, rope_theta)
        self.num_key_value_heads = self.num_key_value_heads or self.num_attention_heads
        self.target_hidden_size = self.target_hidden_size or self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        if isinstance(self.draft_vocab_size, bool) or not isinstance(self.draft_vocab_size, int):
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size!r}; it must be an integer")
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size is {self.draft_vocab_size}; it must lie in 1..vocab_size {self.vocab_size}"
            )
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; RoPE rotates pairs, so it must be even")
        super().__post_init__(**kwargs)

    def convert_rope_params_to_dict(self, **kwargs):
        return kwargs  # resolve_rope did it, without transformers' default theta

    def standardize_rope_params(self):
        pass

    def validate_rope(self, *args, **kwargs):
        pass

    @staticmethod
    def resolve_rope(parameters, scaling, theta) -> dict:
        """One dict with rope_type and rope_theta out of any config's form; ValueError when it cannot be rotated."""
        forms = [{"rope_type": form.get("type"), **form} for form in (parameters, scaling) if form]
        rope = {"rope_type": None, "rope_theta": theta}
        for form in sorted(forms, key=lambda form: form["rope_type"] not in (None, "default")):  # a scaled one wins
            rope |= {key: form[key] for key in ROPE if form.get(key) is not None}
        rope["rope_type"] = rope["rope_type"] or "default"
        if rope["rope_type"] not in ("default", "yarn"):
            raise ValueError(f"rope_type is {rope['rope_type']!r}; a draft rotates by 'default' or 'yarn'")
        if rope["rope_theta"] is None:
            raise ValueError(
                "no rope_theta, neither at the config's top level nor in rope_parameters; copy the target's"
            )
        if rope["rope_type"] == "yarn":
            if rope.get("attention_factor") == 1.0:  # Mistral: nothing but the frequencies is scaled
                rope |= {"mscale": 0.0, "mscale_all_dim": 0.0}
                del rope["attention_factor"]
            missing = [key for key in ("factor", "original_max_position_embeddings") if rope.get(key) is None]
            if missing or rope.get("attention_factor") is not None:
                raise ValueError(
                    f"yarn needs {missing or 'mscale and mscale_all_dim, no attention_factor'}; got {rope}"
                )
        return rope

    @classmethod
    def from_any(cls, config) -> "Eagle3MLAConfig":
        """From this class, any Hugging Face config, a `config.json` dict or a path; unknown keys are left out."""
        if type(config) is cls:  # a subclass has other rules
            return config
        if isinstance(config, str | Path):
            path = Path(config)
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        values = config if isinstance(config, dict) else config.to_dict()
        values = values.get("text_config") or values
        known = {field.name for field in fields(cls)} - {field.name for field in fields(PretrainedConfig)}
        known |= {"rope_theta", "rope_scaling", "mla_use_nope"}
        missing = [name for name in cls.required_keys() if values.get(name) is None]
        if missing:
            raise ValueError(f"the draft's config lacks {', '.join(missing)}; an MLA target's config.json has them")
        return cls(**{key: value for key, value in values.items() if key in known})

    @classmethod
    def required_keys(cls) -> list[str]:
        return [field.name for field in fields(cls) if field.default is MISSING and field.default_factory is MISSING]

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim


# ---------------------------------------------------------------------------------------------------------- the draft


class DeepseekV3Eagle3DraftModel(PreTrainedModel):
    """EAGLE-3 draft of a DeepSeek-V3-family or Kimi K2 target: one fused MLA layer over [embedding, target features].

    `config` is an `Eagle3MLAConfig`, any Hugging Face config object or a `config.json` dict of an MLA model.
    """

    config_class = Eagle3MLAConfig
    base_model_prefix = "model"
    engine_architecture, hidden_act = "Eagle3DeepseekV2ForCausalLM", "silu"  # what vLLM and SGLang register

    def __init__(self, config):
        super().__init__(self.config_class.from_any(config))
        cfg = self.config
        self.model = self.inner_model(cfg)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.draft_vocab_size, bias=False)
        if cfg.draft_vocab_size < cfg.vocab_size:
            self.register_buffer("d2t", torch.zeros(cfg.draft_vocab_size, dtype=torch.long))
            self.register_buffer("t2d", torch.zeros(cfg.vocab_size, dtype=torch.bool))
        self.post_init()

    @staticmethod
    def inner_model(config) -> nn.Module:
        return Eagle3DeepseekModel(config)

    def forward(
        self, input_ids, projected_hidden_states, attention_mask, position_ids=None, cache_hidden=None, seq_lens=None
    ):
        """One TTT step over all T slots, dense and simple: the states a[t, s], [B,T,H] (normed with `norm_output`).

        input_ids [B,T] the tokens slots feed at this step, projected_hidden_states [B,T,H] the features (step 0) or the
        last step's result, attention_mask [B,T] (1 real, 0 padding, whose states count as zeros). cache_hidden: `[[],
        []]` or a `TTTCache`, the same object for every step of an unroll; None is a fresh one. seq_lens [B, documents],
        padded with zeros, packs documents and needs position_ids [B,T] counted per document. ValueError: seq_lens that
        do not sum to T in a row, or come without position_ids.
        """
        b, t = input_ids.shape
        device = input_ids.device
        document = torch.where(attention_mask.bool(), 0, -1)
        if seq_lens is not None:
            if position_ids is None:
                raise ValueError("seq_lens packs documents and needs position_ids that restart with each; got None")
            if (seq_lens.sum(1) != t).any():
                raise ValueError(f"seq_lens must sum to the row's {t} slots; got sums {seq_lens.sum(1).tolist()}")
            ends = seq_lens.cumsum(1)
            document = (torch.arange(t, device=device)[None, :, None] >= ends[:, None, :]).sum(-1)
        if position_ids is None:
            position_ids = torch.arange(t, device=device).expand(b, t)
        causal = torch.ones(t, t, dtype=torch.bool, device=device).tril()
        visible = causal & (document[:, :, None] == document[:, None, :]) & (document >= 0)[:, None, :]
        mask = torch.zeros(b, 1, t, t, dtype=torch.float32, device=device)
        mask = mask.masked_fill(~visible[:, None], float("-inf"))
        cache = [[], []] if cache_hidden is None else cache_hidden
        embeds = self.embed_input_ids(input_ids)
        states = projected_hidden_states.masked_fill(~attention_mask.bool()[..., None], 0.0)  # whatever padding holds
        hidden = self.model.layers[0](embeds, states, mask, position_ids, cache)
        return self.model.norm(hidden) if self.config.norm_output else hidden

    def project_hidden_states(self, aux_hidden_states: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """g [B,T,H] of the target's auxiliary states [B,T,num_aux*H_target], lowest layer first.

        attention_mask [B,T]: states where it is 0 are taken as zeros. Give it where padding may hold NaN: even without
        a gradient of its own it would reach that of `fc` (0 x NaN).
        """
        n_aux, width = self.config.num_aux_hidden_states, self.config.target_hidden_size
        if aux_hidden_states.shape[-1] != n_aux * width:
            raise ValueError(
                f"features are {aux_hidden_states.shape[-1]} wide, this draft wants {n_aux} x target_hidden_size "
                f"{width} = {n_aux * width}; is --model the target they were captured from?"
            )
        x = aux_hidden_states
        if attention_mask is not None:
            x = x.masked_fill(~attention_mask.bool()[..., None], 0.0)
        if not torch.is_autocast_enabled(x.device.type):
            x = x.to(self.model.fc.weight.dtype)
        if self.config.fc_norm:
            parts = zip(self.model.fc_norm, x.chunk(n_aux, dim=-1), strict=True)
            x = torch.cat([norm(part) for norm, part in parts], dim=-1)
        return self.model.fc(x)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Logits over the draft vocabulary [..,Vd] of states [..,H] as `forward` returns them."""
        return self.lm_head(hidden_states if self.config.norm_output else self.model.norm(hidden_states))

    @property
    def draft_ids(self) -> Tensor:
        """Target id of every draft id [Vd]; ValueError when a reduced vocabulary was never mapped."""
        cfg = self.config
        ids = torch.arange(cfg.draft_vocab_size, device=self.lm_head.weight.device)
        if cfg.draft_vocab_size == cfg.vocab_size:
            return ids
        if int(self.t2d.sum()) != cfg.draft_vocab_size:
            raise ValueError(
                f"a draft of {cfg.draft_vocab_size} of {cfg.vocab_size} tokens needs set_vocab_mapping first"
            )
        return ids + self.d2t

    def set_vocab_mapping(self, selected_token_ids: Tensor) -> None:
        """Draft id i stands for target id `selected_token_ids[i]`, in any order; ValueError: not Vd distinct ids."""
        cfg, ids = self.config, torch.as_tensor(selected_token_ids, dtype=torch.long).flatten().cpu()
        if ids.numel() != cfg.draft_vocab_size or ids.unique().numel() != ids.numel():
            raise ValueError(
                f"{ids.numel()} ids, {ids.unique().numel()} distinct; want {cfg.draft_vocab_size} distinct"
            )
        if ids.min() < 0 or ids.max() >= cfg.vocab_size:
            raise ValueError(f"ids span {ids.min()}..{ids.max()}; they must lie in 0..{cfg.vocab_size - 1}")
        if cfg.draft_vocab_size < cfg.vocab_size:
            self.d2t.copy_(ids - torch.arange(len(ids)))
            self.t2d.copy_(torch.zeros(cfg.vocab_size, dtype=torch.bool).index_fill(0, ids, True))
        elif not torch.equal(ids, torch.arange(len(ids))):
            raise ValueError("at full vocabulary draft ids are target ids; reduce draft_vocab_size to choose them")

    def copy_embeddings_from_target(self, target_embedding: nn.Embedding) -> None:
        """Copy the target's table [V,H] (a sharded DTensor is gathered); engines share it, so it must stay equal."""
        source, own = target_embedding.weight, self.model.embed_tokens.weight
        source = source.full_tensor() if hasattr(source, "full_tensor") else source
        if source.shape != own.shape:
            raise ValueError(f"target embeddings are {tuple(source.shape)}, the draft's must equal {tuple(own.shape)}")
        with torch.no_grad():
            own.copy_(source)

    def freeze_embeddings(self) -> None:
        self.model.embed_tokens.weight.requires_grad_(False)


class Eagle3DeepseekModel(nn.Module):
    """embed_tokens, the `fc` projection of the auxiliary states, the one fused layer and the final norm."""

    def __init__(self, config):
        super().__init__()
        h, h_target, n_aux = config.hidden_size, config.target_hidden_size, config.num_aux_hidden_states
        self.embed_tokens = nn.Embedding(config.vocab_size, h, config.pad_token_id)
        self.fc = nn.Linear(n_aux * h_target, h, bias=False)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(h_target, config.rms_norm_eps) for _ in range(n_aux))
        self.layers = nn.ModuleList([self.decoder_layer(config)])
        self.norm = RMSNorm(h, config.rms_norm_eps)

    @staticmethod
    def decoder_layer(config) -> nn.Module:
        return Eagle3DeepseekDecoderLayer(config)


class Eagle3DeepseekDecoderLayer(nn.Module):
    """[norm(embedding), norm(state)] -> MLA -> MLP, the state being the residual stream."""

    def __init__(self, config, layer_id: int = 0):
        super().__init__()
        h, eps = config.hidden_size, config.rms_norm_eps
        self.layer_id = layer_id
        self.input_layernorm = RMSNorm(h, eps)
        self.hidden_norm = RMSNorm(h, eps)
        self.post_attention_layernorm = RMSNorm(h, eps)
        self.self_attn, self.mlp = self.blocks(config)

    @staticmethod
    def blocks(config) -> tuple[nn.Module, nn.Module]:
        return Eagle3DeepseekMLAAttention(config), Eagle3DeepseekMLP(config)

    def forward(self, input_embeds, hidden_states, attention_mask, position_ids, cache_hidden):
        fused = torch.cat([self.input_layernorm(input_embeds), self.hidden_norm(hidden_states)], dim=-1)
        return self.finish(hidden_states, self.self_attn(fused, attention_mask, position_ids, cache_hidden))

    def finish(self, hidden_states, attention_output):
        hidden_states = hidden_states + attention_output
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class Eagle3DeepseekMLAAttention(nn.Module):
    """MLA of DeepSeek-V3 (arXiv 2412.19437, section 2.1.1); its input is 2H wide, or H without `fuse_input`."""

    def __init__(self, config, fuse_input: bool = True):
        super().__init__()
        self.config, n, r = config, config.num_attention_heads, config.kv_lora_rank
        width = config.hidden_size * (2 if fuse_input else 1)
        if config.num_key_value_heads != n:
            raise ValueError(f"num_key_value_heads is {config.num_key_value_heads}; MLA has one key per head, {n}")
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(width, n * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, config.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
            self.q_b_proj = nn.Linear(config.q_lora_rank, n * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, r + config.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(r, config.rms_norm_eps)
        self.kv_b_proj = nn.Linear(r, n * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.o_proj = nn.Linear(n * config.v_head_dim, config.hidden_size, bias=False)
        self.scaling = self.softmax_scale(config)

    def forward(self, combined_states, attention_mask, position_ids, cache_hidden):
        """One dense step: the causal scores of the step-0 keys beside each slot's own keys of later steps, one softmax.

        combined_states [B,T,2H], attention_mask additive [B,1,T,T]; rows that see nothing give zeros. -> [B,T,H]
        """
        pre_q, pre_kv, pre_gate = self.project(combined_states)
        step = cache_hidden.step if isinstance(cache_hidden, TTTCache) else len(cache_hidden[0])
        q = self.queries(pre_q, position_ids + step)
        first, *own = self.remember(cache_hidden, self.latents(pre_kv, position_ids + step))
        k0, v0 = self.keys_values(first)
        scores = [einsum(q, k0, "b n t d, b n j d -> b n t j") * self.scaling + attention_mask]
        keys_values = [self.keys_values(latent) for latent in own]
        scores += [einsum(q, k, "b n t d, b n t d -> b n t")[..., None] * self.scaling for k, _ in keys_values]
        scores = upcast(torch.cat(scores, dim=-1))
        blind = scores.amax(-1, keepdim=True) == float("-inf")  # left to the softmax, its NaN would be in the backward
        p = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0).to(v0.dtype)
        o = einsum(p[..., : k0.shape[2]], v0, "b n t j, b n j v -> b n t v")
        for j, (_, v) in enumerate(keys_values, start=-len(keys_values)):  # from the end: T may be a symbol
            o = o + p[..., j, None] * v
        return self.output(o, pre_gate)

    @staticmethod
    def remember(cache_hidden, latent: Tensor) -> list[Tensor]:
        """Append this step's latent [B,T,R+Dr] and return those of all steps so far."""
        if isinstance(cache_hidden, TTTCache):
            return cache_hidden.append(latent)
        cache_hidden[0].append(latent)
        cache_hidden[1].append(latent.new_empty(0))  # other trainers keep values here; our latents carry both
        return cache_hidden[0]

    def input_projections(self) -> list[nn.Linear | None]:
        """The linear maps of the layer's input: of the query, of the latent, of the output gate (Kimi K3)."""
        return [self.q_proj if self.config.q_lora_rank is None else self.q_a_proj, self.kv_a_proj_with_mqa, None]

    def project(self, x: Tensor) -> list[Tensor | None]:
        return [None if linear is None else linear(x) for linear in self.input_projections()]

    def queries(self, pre_q: Tensor, position: Tensor) -> Tensor:
        """[B,n,T,Dn+Dr] of the query projection's output, rotated at position [B,T]."""
        cfg = self.config
        q = pre_q if cfg.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(pre_q))
        q = rearrange(q, "b t (n d) -> b n t d", n=cfg.num_attention_heads)
        q_nope, q_rope = q.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)
        return torch.cat([q_nope, self.rotate(q_rope, position[:, None])], dim=-1)

    def latents(self, pre_kv: Tensor, position: Tensor) -> Tensor:
        """[B,T,R+Dr] of the latent projection's output: the normed latent and the rotated key slice all heads share."""
        c, k_rope = pre_kv.split([self.config.kv_lora_rank, self.config.qk_rope_head_dim], dim=-1)
        return torch.cat([self.kv_a_layernorm(c), self.rotate(k_rope, position)], dim=-1)

    def keys_values(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """Up-project latents [B,T,R+Dr] to keys [B,n,T,Dn+Dr] and values [B,n,T,Dv]."""
        cfg = self.config
        c, k_rope = latent.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        kv = rearrange(self.kv_b_proj(c), "b t (n d) -> b n t d", n=cfg.num_attention_heads)
        k_nope, v = kv.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=-1)
        return torch.cat([k_nope, repeat(k_rope, "b t d -> b n t d", n=cfg.num_attention_heads)], dim=-1), v

    def latent_attention(self, q: Tensor, latents: Tensor, of: str = "j b a", hidden: Tensor | None = None):
        """Attention of q [B,n,A,Dn+Dr] to latents: (o [B,n,A,Dv], log-sum-exp [B,n,A]).

        latents [j,B,A,R+Dr] are each query's own; `of` "b j" reads [B,j,R+Dr], the same for all queries of a row, where
        `hidden` [B,1,A,j] masks. Up-projections are absorbed into query and context (DeepSeek-V2, arXiv 2405.04434,
        section 2.1.2): no key or value exists. q W_uk and the context are 2nR wide; training remakes them.
        """
        cfg = self.config
        # "(n d) r -> n d r", but einops notes a Parameter's type in a dict of its own: no compiled checkpoint allows it
        w = self.kv_b_proj.weight.to(q.dtype).unflatten(0, (cfg.num_attention_heads, -1))
        w_uk, w_uv = w.split([cfg.qk_nope_head_dim, cfg.v_head_dim], dim=1)
        q_nope, q_rope = q.split([cfg.qk_nope_head_dim, cfg.qk_rope_head_dim], dim=-1)
        c, k_rope = latents.split([cfg.kv_lora_rank, cfg.qk_rope_head_dim], dim=-1)
        q_latent = einsum(q_nope, w_uk, "b n a d, n d r -> b n a r")
        scores = einsum(q_latent, c, f"b n a r, {of} r -> b n a j")
        scores = upcast(scores + einsum(q_rope, k_rope, f"b n a d, {of} d -> b n a j")) * self.scaling
        if hidden is not None:
            scores = scores.masked_fill(hidden, float("-inf"))
        context = einsum(scores.softmax(-1).to(q.dtype), c, f"b n a j, {of} r -> b n a r")
        return einsum(context, w_uv, "b n a r, n v r -> b n a v"), scores.logsumexp(-1)

    def output(self, o: Tensor, pre_gate: Tensor | None) -> Tensor:
        return self.o_proj(rearrange(o, "b n t v -> b t (n v)"))

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        return rotate_interleaved(x, position, self.config)

    @staticmethod
    def softmax_scale(config) -> float:
        """Dk**-0.5, times m*m with yarn, m = 0.1 mscale_all_dim ln(factor) + 1, as engines serve it."""
        rope = config.rope_parameters
        m = yarn_mscale(rope["factor"], rope.get("mscale_all_dim") or 0.0) if rope["rope_type"] == "yarn" else 1.0
        return config.qk_head_dim**-0.5 * m * m


class Eagle3DeepseekMLP(nn.Module):
    """Dense SwiGLU; the draft does not copy the target's experts."""

    def __init__(self, config):
        super().__init__()
        h, i = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(h, i, bias=False)
        self.up_proj = nn.Linear(h, i, bias=False)
        self.down_proj = nn.Linear(i, h, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32 (float64 stays float64), returned in x's dtype."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        y = upcast(x)
        return F.rms_norm(y, self.weight.shape, self.weight.to(y.dtype), self.eps).to(x.dtype)


def upcast(x: Tensor) -> Tensor:
    return x.to(at_least_float32(x))


def at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


# --------------------------------------------------------------------------------------------------------------- RoPE


def rotate_interleaved(x: Tensor, position: Tensor, config) -> Tensor:
    """Rotate the pairs (0,1), (2,3), ... of x [..,T,Dr] at position [..,T].

    Angles are made here from the config, in float32: a buffer of frequencies would be rounded by `.to(bfloat16)` (1.8
    rad off at position 4096) and left uninitialised by `to_empty` and `from_pretrained`.
    """
    freqs, amplitude = rope_frequencies(config, x.device)
    angle = position[..., None].float() * freqs
    cos, sin = angle.cos() * amplitude, angle.sin() * amplitude
    even, odd = rearrange(upcast(x), "... (d two) -> two ... d", two=2)
    return rearrange([even * cos - odd * sin, even * sin + odd * cos], "two ... d -> ... (d two)").to(x.dtype)


def rope_frequencies(config, device=None) -> tuple[Tensor, float]:
    """Radians per position of each pair, float32 [Dr/2], and the amplitude of cos and sin (yarn; mostly 1.0).

    yarn (arXiv 2309.00071): pairs that turn more than beta_fast times within the original context stay as they are,
    those under beta_slow are slowed down by `factor`, a linear ramp between. Powers are taken in float64: exact float32
    results.
    """
    rope, d = config.rope_parameters, config.qk_rope_head_dim
    theta = float(rope["rope_theta"])
    exponent = torch.arange(0, d, 2, dtype=torch.float64, device=device) / d
    freqs = torch.exp(exponent * -math.log(theta))
    if rope["rope_type"] != "yarn":
        return freqs.float(), 1.0
    context, factor = rope["original_max_position_embeddings"], rope["factor"]

    def pair_that_turns(times: float) -> float:
        return d * math.log(context / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(rope.get("beta_fast") or 32)), 0)
    high = min(math.ceil(pair_that_turns(rope.get("beta_slow") or 1)), d - 1)
    ramp = (torch.arange(d // 2, dtype=torch.float64, device=device) - low) / max(high - low, 0.001)
    slowed = ramp.clamp(0, 1)
    mscale = 1.0 if rope.get("mscale") is None else rope["mscale"]
    amplitude = yarn_mscale(factor, mscale) / yarn_mscale(factor, rope.get("mscale_all_dim") or 0.0)
    return (freqs * (1 - slowed) + freqs / factor * slowed).float(), amplitude


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


# ---------------------------------------------------------------------------------------------- the cache of TTT steps


class TTTCache:
    """Latents [S-1,B,A,R+Dr] of steps 1..S-1 in one static buffer: 576 numbers per slot and step for DeepSeek-V3.

    `append`/`step` serve `forward`, which also keeps the latent of step 0; `TTTLoss` writes steps 1.. alone.
    """

    def __init__(self, buffer: Tensor):
        self.buffer, self.first, self.step = buffer, None, 0

    @classmethod
    def allocate(cls, steps: int, batch: int, slots: int, width: int, dtype=torch.float32, device=None) -> "TTTCache":
        return cls(torch.zeros(steps - 1, batch, slots, width, dtype=dtype, device=device))

    def write(self, step: int, latent: Tensor) -> None:
        """Out of place while gradients are on, where slice assignment breaks autograd; Inductor undoes the copy."""
        if torch.is_grad_enabled():
            self.buffer = torch.slice_scatter(self.buffer, latent[None], dim=0, start=step - 1, end=step)
        else:
            self.buffer[step - 1] = latent

    def own(self, step: int) -> Tensor:
        """The latents [step,B,A,R+Dr] that step `step` sees of its own slot, itself included."""
        return self.buffer[:step]

    def append(self, latent: Tensor) -> list[Tensor]:
        if self.step > len(self.buffer):
            raise ValueError(f"this TTTCache is full with its {len(self.buffer) + 1} steps; allocate one for more")
        if self.step == 0:
            self.first = latent
        else:
            self.write(self.step, latent)
        self.step += 1
        return [self.first, *self.own(self.step - 1)]


# ----------------------------------------------------------------- attention to the step-0 keys: (output, log-sum-exp)


class AnchorMask(NamedTuple):
    """Anchor a of row b sees slots first[b,a]..last[b,a]: from its document's first slot to itself. Unused: last = -1.

    Slots 0..5 of documents 0 0 0 1 1 -1, anchors 1, 4 and an unused one: first = 0, 3, 0 and last = 1, 4, -1.
    """

    first: Tensor  # [B,A]
    last: Tensor  # [B,A]
    blocks: "BlockIndex | None" = None  # for FlexAttention, see block_mask


class BlockIndex(NamedTuple):
    """The tensors of FlexAttention's BlockMask, built outside the compiled graph, where they are plain inputs."""

    kv_num: Tensor
    kv: Tensor
    full_kv_num: Tensor
    full_kv: Tensor
    q_num: Tensor
    q: Tensor
    full_q_num: Tensor
    full_q: Tensor


BLOCK = 128  # queries and keys per FlexAttention block

# At query width 192, padded to 256, FlexAttention's own backward tiles spill 1,100 bytes a thread on Hopper, and so do
# all but one of max-autotune's candidates. These neither spill nor outgrow shared memory, forward and backward.
HOPPER = {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 8, "fwd_num_stages": 3}
HOPPER |= {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64}
HOPPER |= {"bwd_num_warps": 8, "bwd_num_stages": 2}


def anchor_mask(anchors: Tensor, document: Tensor) -> AnchorMask:
    """The mask of anchors [B,A] (-1 unused) over rows of contiguous documents [B,T] (-1 padding)."""
    slot = torch.arange(document.shape[1], device=document.device).expand_as(document)
    begins = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True)
    start = torch.where(begins, slot, 0).cummax(dim=1).values
    at = anchors.clamp(min=0)
    used = (anchors >= 0) & (document.gather(1, at) >= 0)
    return AnchorMask(torch.where(used, start.gather(1, at), 0), torch.where(used, anchors, -1))


def block_mask(anchors: Tensor, document: Tensor) -> AnchorMask:
    """The same with its block index. Made outside of compiled graphs: without a backward, Inductor compiles no
    FlexAttention whose mask reads what its own graph made."""
    mask = anchor_mask(anchors, document)
    return mask._replace(blocks=block_index(mask, document.shape[1]))


def block_index(mask: AnchorMask, slots: int) -> BlockIndex:
    """Which key blocks each block of anchors reads in part or in full, without a tensor of A*T elements.

    Anchors ascend and documents are contiguous, so 128 anchors read slots first[0]..last[-1] and share last[-1]'s
    document from first[-1] to last[0] on: two intervals per block decide everything.
    """
    pad = -mask.last.shape[1] % BLOCK
    last = rearrange(F.pad(mask.last, (0, pad), value=-1), "b (q a) -> b q a", a=BLOCK)
    first = rearrange(F.pad(mask.first, (0, pad), value=0), "b (q a) -> b q a", a=BLOCK)
    used = last >= 0
    low = torch.where(used, first, slots).amin(-1, keepdim=True)
    high = last.amax(-1, keepdim=True)
    begin = torch.arange(0, slots, BLOCK, device=last.device)
    touched = (begin <= high) & (begin + BLOCK > low)
    common_low = torch.where(used, first, slots).amax(-1, keepdim=True)
    full = (begin >= common_low) & (begin + BLOCK - 1 <= last.amin(-1, keepdim=True)) & touched

    def order(active: Tensor) -> tuple[Tensor, Tensor]:
        active = active[:, None]
        found = active.sum(-1), active.int().argsort(dim=-1, descending=True, stable=True)
        # FlexAttention's backward takes the strides of a new tensor for granted, and argsort keeps those of its input
        return tuple(x.to(torch.int32, memory_format=torch.contiguous_format) for x in found)

    part = touched & ~full
    return BlockIndex(*order(part), *order(full), *order(part.mT), *order(full.mT))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: AnchorMask, scale: float) -> tuple[Tensor, Tensor]:
    """(o [B,n,A,Dv], natural log-sum-exp [B,n,A]) of q [B,n,A,D] over keys [B,n,T,D] and values [B,n,T,Dv].

    Both carry gradient. Rows that see nothing give o = 0 and -inf.
    """
    if mask.blocks is not None:
        return attend_flex(q, k, v, mask, scale)
    if q.device.type == "cpu":
        return attend_cpu(q, k, v, mask.first, mask.last, scale)
    return attend_dense(q, k, v, mask, scale)


def attend_flex(q, k, v, mask: AnchorMask, scale: float):
    first, last, blocks = mask
    if misplaced := [name for name, x in zip(blocks._fields, blocks, strict=True) if not has_fresh_strides(x)]:
        raise ValueError(f"{', '.join(misplaced)} of the block index are not laid out as new tensors; use block_index")
    if blocks.kv.shape[-1] != -(-k.shape[2] // BLOCK) or blocks.q.shape[-1] != -(-q.shape[2] // BLOCK):
        built = f"{blocks.q.shape[-1]} x {blocks.kv.shape[-1]} blocks of {BLOCK}"
        raise ValueError(f"the block mask is for {built}, not for {q.shape[2]} anchors x {k.shape[2]} slots")

    def visible(b, h, q_index, kv_index):
        return (kv_index >= first[b, q_index]) & (kv_index <= last[b, q_index])

    mask = BlockMask((q.shape[2], k.shape[2]), *blocks, BLOCK_SIZE=(BLOCK, BLOCK), mask_mod=visible)
    on_hopper = q.is_cuda and torch.cuda.get_device_capability(q.device) == (9, 0)
    options = HOPPER if on_hopper and 128 < q.shape[-1] <= 256 else None
    o, aux = flex_attention(
        q, k, v, block_mask=mask, scale=scale, return_aux=AuxRequest(lse=True), kernel_options=options
    )
    return o, aux.lse


def has_fresh_strides(x: Tensor) -> bool:
    """Is x laid out as a new tensor of its shape? `is_contiguous` looks past the strides of dimensions of one."""
    return list(x.stride()) == list(accumulate(reversed(x.shape[1:]), mul, initial=1))[::-1]


def attend_dense(q, k, v, mask: AnchorMask, scale: float, rows: int = 512):
    """Plain masked softmax, `rows` anchors at a time, recomputed in the backward: runs where nothing else does."""

    def block(q, first, last):
        slot = torch.arange(k.shape[2], device=k.device)
        visible = ((slot >= first[..., None]) & (slot <= last[..., None]))[:, None]
        scores = upcast(einsum(q, k, "b n a d, b n t d -> b n a t")) * scale
        scores = scores.masked_fill(~visible, -1e30)  # not -inf, which makes NaN of a row that sees nothing
        p = scores.softmax(-1).masked_fill(~visible, 0.0).to(v.dtype)
        lse = scores.logsumexp(-1).masked_fill(~visible.any(-1), float("-inf"))
        return einsum(p, v, "b n a t, b n t v -> b n a v"), lse

    parts = zip(q.split(rows, 2), mask.first.split(rows, 1), mask.last.split(rows, 1), strict=True)
    done = [remade(block, *part) for part in parts]
    return torch.cat([o for o, _ in done], dim=2), torch.cat([lse for _, lse in done], dim=2)


NAMESPACE = __name__.replace(".", "_")  # two copies of this file may live in one process


@torch.library.custom_op(f"{NAMESPACE}::attend_cpu", mutates_args=())
def attend_cpu(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """CPU backend: PyTorch's flash kernel for blocks of anchors, each over the span of slots that it sees.

    An operator of its own, because those spans are read from the data: compiled graphs call it as it is.
    """
    pad, dv = padding_for(q, v), v.shape[-1]
    o, lse = v.new_zeros(*q.shape[:3], dv), upcast(q[..., 0]).new_full(q.shape[:3], float("-inf"))
    for b, a, t, mask in anchor_blocks(first, last, q.dtype):
        found, lse[b, :, a] = flash(pad(q[b, :, a]), pad(k[b, :, t]), pad(v[b, :, t]), attn_mask=mask, scale=scale)
        o[b, :, a] = found[..., :dv]
    return o, lse


@torch.library.custom_op(f"{NAMESPACE}::attend_cpu_backward", mutates_args=())
def attend_cpu_backward(
    d_o: Tensor, d_lse: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, o: Tensor, lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The kernel's backward forms dS = P (dO V' - sum(dO O)). A spare channel with V = 0, dO = 1, O = -dlse makes that
    dS = P (dO V' - sum(dO O) + dlse): the gradient of the log-sum-exp, at no cost."""
    pad, d, dv = padding_for(q, v), q.shape[-1], v.shape[-1]
    dq, dk, d_v = (x.new_zeros(x.shape) for x in (q, k, v))
    for b, a, t, mask in anchor_blocks(first, last, q.dtype):
        d_out = pad(torch.cat([d_o[b, :, a], torch.ones_like(d_o[b, :, a, :1])], -1))
        out = pad(torch.cat([o[b, :, a], -d_lse[b, :, a, None].to(o.dtype)], -1))
        at = (d_out, pad(q[b, :, a]), pad(k[b, :, t]), pad(v[b, :, t]), out, lse[b, :, a])
        grads = flash_backward(*at, 0.0, False, attn_mask=mask, scale=scale)
        dq[b, :, a] = grads[0][..., :d]
        dk[b, :, t] += grads[1][..., :d]
        d_v[b, :, t] += grads[2][..., :dv]
    return dq, dk, d_v


def anchor_blocks(first: Tensor, last: Tensor, dtype: torch.dtype, rows: int = 256):
    """(row slice, anchor slice, slot slice, additive mask [1,1,a,t]) of runs of used anchors, which ascend.

    A run ends with its document, so that no other document's keys are read.
    """
    for b in range(len(first)):
        used = int((last[b] >= 0).sum())
        low, high = first[b, :used], last[b, :used]
        assert (high[1:] > high[:-1]).all(), "anchors ascend"  # else the kernel would read outside
        borders = 1 + (low[1:] != low[:-1]).nonzero().flatten()
        for begin, end in pairwise([0, *borders.tolist(), used]):
            for a in range(begin, end, rows):
                anchors = slice(a, min(a + rows, end))
                slots = slice(int(low[a]), int(high[anchors.stop - 1]) + 1)
                later = torch.arange(slots.start, slots.stop) > high[anchors, None]
                mask = torch.zeros(later.shape, dtype=dtype).masked_fill_(later, float("-inf"))
                yield slice(b, b + 1), anchors, slots, mask[None, None]


flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def padding_for(q: Tensor, v: Tensor):
    """Pads to the equal widths that the kernel wants, with one spare value channel for its backward."""
    width = max(q.shape[-1], v.shape[-1] + 1)
    return lambda x: F.pad(x, (0, width - x.shape[-1]))


@attend_cpu.register_fake
def _(q, k, v, first, last, scale):
    return q.new_empty(*q.shape[:3], v.shape[-1]), upcast(q[..., 0]).new_empty(q.shape[:3])


@attend_cpu_backward.register_fake
def _(d_o, d_lse, q, k, v, first, last, o, lse, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx, inputs, output):
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, d_o, d_lse):
    return *attend_cpu_backward(d_o, d_lse, *ctx.saved_tensors, ctx.scale), None, None, None


attend_cpu.register_autograd(_backward, setup_context=_save)


# --------------------------------------------------------------------------------------------------------- row batches


class RowBatch(NamedTuple):
    """What the S-step loss reads: rows and some of their anchors. Unshifted, tensors only, static in B, T and A."""

    tokens: Tensor  # [B,T]
    document: Tensor  # [B,T] documents are contiguous; -1 padding
    position: Tensor  # [B,T] of step 0
    features: Tensor  # [B,T,num_aux*H_target]
    anchors: Tensor  # [B,A] ascending slots; -1 unused
    teacher: Tensor  # [B,U,Vd] p of the learned tokens that these anchors feed, in order
    teacher_index: Tensor  # [S,B,A] row of teacher; -1 not supervised
    valid: Tensor  # [S,B,A]
    denominators: Tensor  # [S] supervised slots of each step in the whole optimizer step
    block_mask: AnchorMask | None = None  # None: made in the graph, without blocks
    mean_alpha: Tensor | None = None  # [S] mean acceptance over them, for "lambda"; None: over this batch's


def build_rows(
    draft_ids,
    tokens,
    document,
    position,
    features,
    loss_mask,
    last_hidden,
    head,
    *,
    steps=7,
    anchors=None,
    denominators=None,
) -> RowBatch:
    """One batch of all anchors of the rows, for `TTTLoss.forward`; arguments and errors are those of `RowChunks`.

    anchors: the capacity A, None for the most of any row; denominators [S]: supervised slots of each step over the
    whole optimizer step, None for this batch's. ValueError: more anchors than capacity.
    """
    rows = RowChunks(
        draft_ids, tokens, document, position, features, loss_mask, last_hidden, head, steps=steps, chunk=anchors
    )
    if len(rows) > 1:
        raise ValueError(f"a row needs {rows.most} anchors, the capacity is {anchors}; raise it or leave it out")
    if denominators is not None:
        rows.denominators = denominators.to(features.device, torch.float32)
    return next(iter(rows))


def default_chunk(slots: int, device) -> int:
    """Anchors of a chunk, a multiple of 128, for rows of so many slots.

    Each step of each chunk writes gradients of all keys and values of the row, so chunks grow with it. A GPU is busy
    with 512 anchors, a CPU with 256; more of them leave more of a row's last chunk empty.
    """
    least, share = (512, 128) if torch.device(device).type == "cuda" else (256, 8)
    return BLOCK * -(-min(max(least, slots // share), slots) // BLOCK)


class RowChunks:
    """Rows of any length as batches of `chunk` anchors a row each, for `TTTLoss.learn`: which slots are anchors, what
    each learns at each step, and the teacher of a chunk when the chunk is asked for.

    draft_ids [Vd] target ids of the draft vocabulary (`draft.draft_ids`); tokens, document, position, loss_mask [B,T]
    and features [B,T,num_aux*H_target], all unshifted; last_hidden [B,T,H_target] after the target's final norm, and
    `head` its output head, [m,H_target] -> logits [m,V]. loss_mask[u] says that what the target says after token u is
    learned. Slots valid at one step at least become anchors, so that metrics count them all. chunk: None for all
    anchors in one. choice [B,T]: the target's at learned tokens where it is known already, None to ask its head.
    make_mask: with FlexAttention's block mask on CUDA. even: as many chunks, all as small as they can be; their size
    then differs from row to row, which a compiled graph would be made anew for.

    `anchors` [B,all chunks'] and `valid` [S,B,the same] are on the CPU, `choice` [B,T] is -1 at tokens not learned.
    `supervised` [S] counts supervised slots; `denominators` [S] (those of this batch) and `mean_alpha` are handed to
    every chunk and may be set to those of a whole optimizer step. ValueError: shapes that differ, a document in two
    pieces, token ids outside 0..V-1.
    """

    @torch.no_grad()
    def __init__(
        self, draft_ids, tokens, document, position, features, loss_mask, last_hidden, head, *, steps=7, chunk=None,
        choice=None, make_mask=True, even=False,
    ):  # fmt: skip
        tokens, document, position, loss_mask = (x.cpu() for x in (tokens, document, position, loss_mask))
        check_rows(tokens, document, position, features, loss_mask, last_hidden)
        device, t = features.device, tokens.shape[1]
        padding = (document < 0).to(device)
        if (features[padding] != 0).any():  # NaN too: it would reach the gradient of `fc`; a copy only where it must be
            features = features.masked_fill(padding[..., None], 0.0)
        self.features, self.last_hidden, self.head, self.draft_ids = features, last_hidden, head, draft_ids
        self.make_mask = make_mask and device.type == "cuda"
        valid = valid_slots(document, loss_mask, steps)
        needed = valid.any(0)
        self.most, self.learned = int(needed.sum(1).max()), F.pad(valid[0, :, :-1], (1, 0))  # slot u - 1 feeds token u
        self.chunk = chunk or max(self.most, 1)
        if even:
            self.chunk = max(1, -(-self.most // max(1, -(-self.most // self.chunk))))
        slots = first_true(needed, max(1, -(-self.most // self.chunk)) * self.chunk)
        at = slots.clamp(min=0)
        fed = (at + torch.arange(1, steps + 1)[:, None, None]).clamp(max=t - 1)
        self.valid = valid.gather(2, at.expand(steps, -1, -1)) & (slots >= 0)
        self.anchors, self.rank, self.largest_id = slots, self.learned.long().cumsum(1) - 1, int(tokens.max())
        self.fed_rank = self.rank.clamp(min=0).expand(steps, -1, -1).gather(2, fed)
        self.kept = self.empty_table() if len(self) == 1 and choice is None else None  # one pass of the head is enough
        self.choice = self.ask() if choice is None else choice.cpu()
        drafted = torch.zeros(1 + max(int(self.choice.max()), int(draft_ids.max())), dtype=torch.bool)
        drafted[draft_ids.cpu()] = True
        covered = self.learned & drafted[self.choice.clamp(min=0)]
        self.is_supervised = self.valid & covered.expand(steps, -1, -1).gather(2, fed)
        self.tokens, self.document, self.position = (
            x.to(device, non_blocking=True) for x in (tokens, document, position)
        )
        self.supervised = self.is_supervised.sum((1, 2)).to(device)
        self.denominators, self.mean_alpha = self.supervised.clamp(min=1).float(), None

    def __len__(self) -> int:
        return self.anchors.shape[1] // self.chunk

    @torch.no_grad()
    def __iter__(self) -> Iterator[RowBatch]:
        device, t = self.features.device, self.features.shape[1]
        for begin in range(0, self.anchors.shape[1], self.chunk):
            at = slice(begin, begin + self.chunk)
            slots, valid, index = self.anchors[:, at], self.valid[..., at], self.fed_rank[..., at]
            first = self.rank.gather(1, slots[:, :1].clamp(min=0)) + 1  # learned token that it feeds
            first = torch.where(slots[:, :1] < 0, t, first)  # none in a row that has no anchors left
            teacher = self.teacher(first) if self.kept is None else self.kept
            index = torch.where(self.is_supervised[..., at], index - first, -1)
            slots, valid, index = (  # laid out alike in every chunk: a compiled graph is made for strides as well
                x.to(device, memory_format=torch.contiguous_format, copy=True) for x in (slots, valid, index)
            )
            mask = block_mask(slots, self.document) if self.make_mask else None
            shared = (self.tokens, self.document, self.position, self.features)
            yield RowBatch(*shared, slots, teacher, index, valid, self.denominators, mask, self.mean_alpha)

    def teacher(self, first: Tensor) -> Tensor:
        """p [B,U,Vd] of the learned tokens number first[b].. of each row: no more than a chunk of anchors feeds."""
        p = self.empty_table()
        last = first + p.shape[1]
        for row, token, logits in self.logits(self.learned & (self.rank >= first) & (self.rank < last)):
            found = teach(logits, self.draft_ids.to(logits.device))
            p[row.to(p.device), (self.rank - first)[row, token].to(p.device)] = found.to(p)
        return p

    def empty_table(self) -> Tensor:
        """The tokens that C anchors feed at step 0, and those that only the last ones reach, at later steps."""
        steps, b, _ = self.valid.shape
        return torch.zeros(b, self.chunk + steps - 1, len(self.draft_ids), device=self.features.device)

    def ask(self) -> Tensor:
        """The target's choice after each learned token [B,T], -1 elsewhere; with one chunk its teacher on the way."""
        choice = torch.full_like(self.rank, -1, device=self.last_hidden.device)
        for row, token, logits in self.logits(self.learned):
            choice[row.to(choice.device), token.to(choice.device)] = logits.argmax(-1).to(choice.device)
            if self.kept is not None:
                at = row.to(self.kept.device), self.rank[row, token].to(self.kept.device)
                self.kept[at] = teach(logits, self.draft_ids.to(logits.device)).to(self.kept)
        return choice.cpu()

    def logits(self, chosen: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(row [m], token [m], the target's logits [m,V]) of the tokens chosen [B,T], never of many at once."""
        device = self.last_hidden.device
        for row, token in zip(*(x.split(1024) for x in chosen.nonzero(as_tuple=True)), strict=True):
            with torch.autocast(device.type, enabled=False):  # the teacher is as exact as the target's head
                logits = self.head(self.last_hidden[row.to(device), token.to(device)])
            if self.largest_id >= logits.shape[-1]:
                raise ValueError(
                    f"token id {self.largest_id} is beyond the target's {logits.shape[-1]} tokens; is this the "
                    "target's tokenizer?"
                )
            yield row, token, logits


def valid_slots(document: Tensor, loss_mask: Tensor, steps: int) -> Tensor:
    """valid(t,s) [S,B,T]: the token that slot t feeds at step s is learned and belongs to the slot's document."""
    ahead = [F.pad(x, (0, steps), value=fill) for x, fill in ((document, -1), (loss_mask.bool(), False))]
    t = document.shape[1]
    documents, learned = (torch.stack([x[:, s + 1 : s + 1 + t] for s in range(steps)]) for x in ahead)
    return learned & (documents == document) & (document >= 0)


def first_true(mask: Tensor, capacity: int) -> Tensor:
    """Indices [B,capacity] of the true entries of mask [B,T] in order, -1 behind them."""
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    order = F.pad(order, (0, max(capacity - order.shape[1], 0)))[:, :capacity]
    return torch.where(torch.arange(capacity, device=mask.device) < mask.sum(1, keepdim=True), order, -1)


def teach(logits: Tensor, draft_ids: Tensor) -> Tensor:
    """p [m,Vd] over the draft ids, renormalised."""
    return upcast(logits[:, draft_ids]).softmax(-1)


def check_rows(tokens, document, position, features, loss_mask, last_hidden) -> None:
    for name, x in dict(document=document, position=position, loss_mask=loss_mask).items():
        if x.shape != tokens.shape:
            raise ValueError(f"{name} is {tuple(x.shape)}, tokens are {tuple(tokens.shape)}; both must be [B,T]")
    for name, x in dict(features=features, last_hidden=last_hidden).items():
        if x.shape[:2] != tokens.shape:
            raise ValueError(
                f"{name} are {tuple(x.shape)}; the first two sizes must be the tokens' {tuple(tokens.shape)}"
            )
    if tokens.numel() == 0 or tokens.min() < 0:
        raise ValueError(f"tokens of shape {tuple(tokens.shape)} hold no row or a negative id")
    begins = F.pad(document[:, 1:] != document[:, :-1], (1, 0), value=True) & (document >= 0)
    for row, first in zip(document, begins, strict=True):
        ids = row[first]
        if ids.unique().numel() != ids.numel():
            raise ValueError(f"a document lies in two pieces in one row (document ids at its starts: {ids.tolist()})")


# ------------------------------------------------------------------------------------------------------------ the loss


class Metrics(NamedTuple):
    """Detached tensors of one batch; read them when you must wait for the device anyway."""

    step_loss: Tensor  # [S] each step's loss over its denominator
    step_hits: Tensor  # [S] draft argmax = target argmax
    step_supervised: Tensor  # [S]
    step_valid: Tensor  # [S] slots valid at every step up to s
    step_prefix_hits: Tensor  # [S] those also supervised and right at every step up to s
    hit: Tensor  # [S,B,A]
    step_alpha: Tensor | None = None  # [S] sum of alpha over supervised slots, where "lambda" had to find its mean

    @property
    def valid_tokens(self) -> Tensor:
        return self.step_supervised.sum().float()

    @property
    def accuracy(self) -> Tensor:
        return self.step_hits.sum() / self.valid_tokens.clamp(min=1)

    @property
    def accept_length(self) -> Tensor:
        """Simulated: 1 + sum over s of the share of chains right up to s, every slot a start."""
        return 1 + (self.step_prefix_hits / self.step_valid.clamp(min=1)).sum()


PIECE = 8192  # slots whose keys are made at a time


class Keys(NamedTuple):
    """What the anchors of a row read of all its slots."""

    features: Tensor  # [B,T,H] g
    query: Tensor  # [B,T,..] the token halves of the layer's input projections
    latent: Tensor  # [B,T,R+Dr]
    gate: Tensor | None  # [B,T,n Dv] Kimi K3
    k: Tensor  # [B,n,T,Dn+Dr] of step 0
    v: Tensor  # [B,n,T,Dv]


class TTTLoss(nn.Module):
    """The S-step loss of a draft: `loss, metrics = TTTLoss(draft)(rows)` of a `RowBatch`, differentiable.

    `TTTLoss(draft).learn(RowChunks(...))` is forward and backward of rows of any length, in memory that does not grow
    with their anchors.

    loss: "ce" soft cross-entropy; "alpha" -log of the acceptance alpha = sum_v min(p, q); "lambda" w CE +
    (1-w)(1-alpha) with w = lk_scale exp(-lk_decay mean alpha) (`RowBatch.mean_alpha`). Steps weigh step_decay**s.
    steps: the S that rows must have, None for whatever they were built for. logits_rows: for how many anchors and steps
    logits exist at a time. ValueError: another loss, rows of another S.
    """

    def __init__(self, draft, steps=None, loss="ce", lk_scale=1.0, lk_decay=3.0, step_decay=0.8, logits_rows=512):
        super().__init__()
        if loss not in ("ce", "alpha", "lambda"):
            raise ValueError(f"loss is {loss!r}; ce, alpha or lambda is wanted")
        self.draft, self.steps, self.loss = draft, steps, loss
        self.lk_scale, self.lk_decay, self.step_decay, self.logits_rows = lk_scale, lk_decay, step_decay, logits_rows
        self.leaves = None

    def check_whole(self) -> None:
        """ValueError: sharded parameters, which only a call of a sharded TTTLoss gathers, and their gradients."""
        if any(hasattr(p, "full_tensor") for p in self.parameters()):
            raise ValueError("sharded parameters; shard fully_shard(TTTLoss(draft)), no part of it, and call that")

    def forward(self, rows: RowBatch) -> tuple[Tensor, Metrics]:
        self.check_whole()
        return self.chunk(self.keys(F.pad(rows.tokens, (0, 1)), rows.position, rows.features), rows)

    def learn(self, rows: RowChunks) -> tuple[Tensor, Metrics]:
        """Adds the gradients of all chunks to the parameters' `.grad`; the detached loss and metrics of all of them.

        After step 0 no anchor reads another, so chunks are micro-batches of one row over the same keys: each has its
        forward and backward, what they say of the keys gathers in float32, and goes through `keys` last, which are made
        again for it piece by piece (2% of the FLOPs; no activations lie there meanwhile). Without gradients the same
        chunks evaluate. Call it under autocast as `forward`: the backward passes are run outside of it. The
        metrics' `hit` is [S,B,all anchors]. ValueError: sharded parameters, whose gradients are not complete here.
        """
        self.check_whole()
        if self.loss == "lambda" and rows.mean_alpha is None:
            rows.mean_alpha = self.alpha(rows) / rows.supervised.clamp(min=1)
        leaves, device = self.read(rows), rows.features.device.type
        total, found = torch.zeros((), device=rows.features.device), []
        for chunk in rows:
            if device == "cuda":
                torch.compiler.cudagraph_mark_step_begin()
            loss, metrics = self.chunk(leaves.keys, chunk)
            if loss.requires_grad:
                with torch.autocast(device, enabled=False):
                    loss.backward()
            total += loss.detach()
            found.append(Metrics(*(None if x is None else x.clone() for x in metrics)))  # of a graph's memory
        for begin, made in self.pieces(rows) if torch.is_grad_enabled() else ():
            with torch.autocast(device, enabled=False):
                leaves.backward(begin, made)
        *sums, hits, alphas = zip(*found, strict=True)
        alpha = None if alphas[0] is None else sum(alphas)
        return total, Metrics(*map(sum, sums), torch.cat(hits, dim=-1), alpha)

    @torch.no_grad()
    def alpha(self, rows: RowChunks) -> Tensor:
        """Sum of the acceptance over the supervised slots of each step [S]: a pass without gradients, for "lambda"."""
        leaves = self.read(rows)
        return sum(self.chunk(leaves.keys, chunk._replace(mean_alpha=None))[1].step_alpha.clone() for chunk in rows)

    @torch.no_grad()
    def read(self, rows: RowChunks) -> "Leaves":
        """The keys of the rows where chunks read them."""
        slots = rows.features.shape[1]
        for begin, made in self.pieces(rows):
            if begin == 0 and (self.leaves is None or not self.leaves.fit(made, slots)):
                self.leaves = Leaves(made, slots)
            self.leaves.set(begin, made)
        return self.leaves

    def pieces(self, rows: RowChunks) -> Iterator[tuple[int, Keys]]:
        """Keys of at most PIECE slots at a time and the first of them; the last piece begins early, to be as long."""
        slots, tokens = rows.features.shape[1], F.pad(rows.tokens, (0, 1))
        n = -(-slots // -(-slots // PIECE))
        for begin in range(0, slots, n):
            begin = min(begin, slots - n)
            at = slice(begin, begin + n)
            yield begin, self.keys(tokens[:, begin : begin + n + 1], rows.position[:, at], rows.features[:, at])

    def keys(self, tokens: Tensor, position: Tensor, features: Tensor) -> Keys:
        """Of slots and their tokens [B,T+1], one more than slots: slot t is fed token t+1.

        W [norm(e); norm(a)] = W_e norm(e) + W_a norm(a): the token half is made once, every step reads it further on.
        """
        draft, layer = self.draft, self.draft.model.layers[0]
        attn = layer.self_attn
        g = draft.project_hidden_states(features)
        halves = [None if p is None else p.weight.to(g.dtype).chunk(2, dim=1) for p in attn.input_projections()]
        e = layer.input_layernorm(draft.embed_input_ids(tokens).to(g.dtype))
        token = [None if w is None else F.linear(e, w[0]) for w in halves]
        pre_kv = token[1][:, 1:] + F.linear(layer.hidden_norm(g), halves[1][1])
        token = [None if x is None else x[:, :-1] for x in token]
        return Keys(g, *token, *attn.keys_values(attn.latents(pre_kv, position)))

    def chunk(self, keys: Keys, rows: RowBatch) -> tuple[Tensor, Metrics]:
        """The loss and metrics of the anchors of `rows`, whose keys are `keys`."""
        steps = len(rows.teacher_index)
        if self.steps not in (None, steps):
            raise ValueError(f"the rows were built for {steps} steps, this loss is for {self.steps}")
        hidden = self.unroll(keys, rows)
        x = hidden if self.draft.config.norm_output else self.draft.model.norm(hidden)
        supervised = rows.teacher_index >= 0
        weight = self.step_decay ** torch.arange(steps, device=x.device, dtype=torch.float32)
        scale = supervised * (weight / weight.sum() / rows.denominators)[:, None, None]
        offset = torch.arange(len(rows.teacher), device=x.device)[:, None] * rows.teacher.shape[1]
        index = (rows.teacher_index.clamp(min=0) + offset).flatten()
        head, teacher = self.draft.lm_head.weight, rows.teacher.flatten(0, 1)
        x = rearrange(x, "s b a h -> (s b a) h")
        ce, step_alpha = torch.ones_like(scale), None
        if self.loss == "lambda":
            mean = rows.mean_alpha
            if mean is None:
                alpha = acceptance(x, head, teacher, index, self.logits_rows).view_as(scale)
                step_alpha = (alpha * supervised).sum((1, 2))
                mean = step_alpha / supervised.sum((1, 2)).clamp(min=1)
            ce = ce * (self.lk_scale * torch.exp(-self.lk_decay * mean))[:, None, None]
        scale, ce, learn = scale.flatten(), ce.flatten(), torch.is_grad_enabled()
        args = (x, head, teacher, index, scale, ce, self.loss, self.logits_rows, learn)
        per_row, hit, dx, dw = loss_and_gradients(*args)
        loss = (scale * per_row).sum()
        if learn:
            loss = MadeInForward.apply(x, head, loss, dx, dw)
        return loss, self.metrics(rows, per_row.view_as(supervised), hit.view_as(supervised) & supervised, step_alpha)

    def unroll(self, keys: Keys, rows: RowBatch) -> Tensor:
        """The states a[t,s] of the anchors [S,B,A,H], before `norm` unless `norm_output`."""
        attn, cfg, steps = self.draft.model.layers[0].self_attn, self.draft.config, len(rows.teacher_index)
        g, *token, k, v = keys
        mask = anchor_mask(rows.anchors, rows.document) if rows.block_mask is None else rows.block_mask
        at = rows.anchors.clamp(min=0)
        fed = (at[:, None] + torch.arange(1, steps + 1, device=at.device)[:, None]).clamp(max=g.shape[1] - 1)
        token = [None if x is None else take(x, fed).unbind(1) for x in token]
        w_state = [None if p is None else p.weight.to(g.dtype).chunk(2, dim=1)[1] for p in attn.input_projections()]
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        cache = TTTCache.allocate(steps, *at.shape, width, g.dtype, g.device).buffer
        a, position, states = take(g, at), rows.position.gather(1, at), []
        for s in range(steps):
            halves = [None if x is None else x[s] for x in token]
            a, cache = self.step(s, a, cache, halves, w_state, k, v, mask, position + s)
            states.append(a)
        return torch.stack(states)

    def step(self, s, a, cache, token, w_state, k, v, mask, position) -> tuple[Tensor, Tensor]:
        """a[t,s] [B,A,H] of a[t,s-1], and the cache with this step's latents.

        The cache goes in and out as a tensor: what a compiled graph assigns to an object that it was handed was lost
        before a checkpoint (own keys of zeros, seen in the executed CUDA kernels alone).
        """
        layer = self.draft.model.layers[0]
        attn = layer.self_attn
        normed = layer.hidden_norm(a)
        skip = 1 if s == 0 else None  # step 0's latents are made for all slots
        pre_q, pre_kv, pre_gate = (
            None if w is None or i == skip else x + F.linear(normed, w)
            for i, (x, w) in enumerate(zip(token, w_state, strict=True))
        )
        q = attn.queries(pre_q, position)
        o, lse = attend(q, k, v, mask, attn.scaling)
        if s > 0:
            own = TTTCache(cache)
            own.write(s, attn.latents(pre_kv, position))
            cache = own.buffer
            o_own, lse_own = remade(attn.latent_attention, q, own.own(s))
            o = torch.lerp(o, o_own, torch.sigmoid(lse_own - lse)[..., None].to(o.dtype))  # one softmax over both parts
        a = layer.finish(a, attn.output(o, pre_gate))
        return (self.draft.model.norm(a) if self.draft.config.norm_output else a), cache

    @torch.no_grad()
    def metrics(self, rows: RowBatch, per_row: Tensor, hit: Tensor, step_alpha: Tensor | None) -> Metrics:
        supervised = rows.teacher_index >= 0
        chain_valid, chain_hit = rows.valid.long().cumprod(0), (hit & rows.valid).long().cumprod(0)
        step_loss = (per_row * supervised).sum((1, 2)) / rows.denominators
        sums = (x.sum((1, 2)) for x in (hit, supervised, chain_valid, chain_hit))
        return Metrics(step_loss, *sums, hit, step_alpha)


def remade(function, *args):
    """function(*args), its activations made again in the backward instead of kept."""
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def take(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b,..]] [B,..,D] of x [B,T,D]."""
    flat = index.flatten(1)
    return x.gather(1, repeat(flat, "b a -> b a d", d=x.shape[-1])).unflatten(1, index.shape[1:])


class Leaves:
    """The `Keys` that chunks differentiate to, and what all chunks say of them, in float32 (64 additions in bf16 are
    0.8% off, 448 2.1%). Their addresses stay: a captured graph that reads them copies nothing."""

    def __init__(self, piece: Keys, slots: int):
        whole = [None if x is None else (*x.shape[:-2], slots, x.shape[-1]) for x in piece]
        pairs = list(zip(piece, whole, strict=True))
        self.keys = Keys(*(None if x is None else x.new_empty(shape).requires_grad_() for x, shape in pairs))
        self.gradients = Keys(
            *(None if x is None else x.new_zeros(shape, dtype=at_least_float32(x)) for x, shape in pairs)
        )
        for leaf, gradient in zip(self.keys, self.gradients, strict=True):
            if leaf is not None:
                torch._dynamo.mark_static_address(leaf)
                leaf.register_post_accumulate_grad_hook(partial(move_gradient, gradient))

    def fit(self, piece: Keys, slots: int) -> bool:
        return all(
            (leaf is None and x is None)
            or (leaf.shape, leaf.dtype, leaf.device) == ((*x.shape[:-2], slots, x.shape[-1]), x.dtype, x.device)
            for leaf, x in zip(self.keys, piece, strict=True)
        )

    def set(self, begin: int, piece: Keys) -> None:
        for leaf, gradient, x in zip(self.keys, self.gradients, piece, strict=True):
            if leaf is not None:
                leaf.narrow(-2, begin, x.shape[-2]).copy_(x)
                gradient.narrow(-2, begin, x.shape[-2]).zero_()

    def backward(self, begin: int, piece: Keys) -> None:
        """What was gathered for the piece, through the graph that made it. It is used up: pieces may overlap."""
        made, found = [], []
        for gradient, x in zip(self.gradients, piece, strict=True):
            if x is not None and x.requires_grad:
                part = gradient.narrow(-2, begin, x.shape[-2])
                made.append(x)
                found.append(part.to(x.dtype, copy=True))
                part.zero_()
        torch.autograd.backward(made, found)


def move_gradient(gathered: Tensor, leaf: Tensor) -> None:
    gathered.add_(leaf.grad)
    leaf.grad = None


class MadeInForward(torch.autograd.Function):
    """Gives a loss that was computed together with its gradients to autograd: backward only scales them."""

    @staticmethod
    def forward(ctx, x, weight, loss, dx, dw):
        ctx.save_for_backward(dx, dw)
        return loss.clone()

    @staticmethod
    def backward(ctx, d_loss):
        dx, dw = ctx.saved_tensors
        return d_loss.to(dx.dtype) * dx, d_loss.to(dw.dtype) * dw, None, None, None


@torch.no_grad()
def loss_and_gradients(x, weight, teacher, index, scale, ce, kind: str, rows: int, with_gradients: bool):
    """Linear and loss fused, `rows` rows at a time, so that logits exist for so many alone.

    x [N,H], weight [Vd,H], teacher [U,Vd] with its row per x row in index [N]; scale [N] multiplies a row's loss (0:
    not supervised), ce [N] is its w of the "lambda" loss. Returns the unscaled losses [N], whether the argmaxes agree
    [N], and the gradients of sum(scale * loss): dx [N,H] in x's dtype, dweight [Vd,H] in weight's (None, None without).

    p sums to one, so cross-entropy is logsumexp(z) - p.z of logits z (minus their maximum: exact to rounding at large
    ones), its gradient q - p. Most of it happens in place: z, its exponentials and p are all there is of a piece.
    """
    w = weight.to(x.dtype)
    losses, hits, dxs = [], [], []
    dw, best = torch.zeros_like(weight) if with_gradients else None, teacher.argmax(-1)
    for xc, i, sc, cc in zip(x.split(rows), index.split(rows), scale.split(rows), ce.split(rows), strict=True):
        p, z = teacher[i], upcast(xc @ w.T)
        largest, choice = z.max(-1)
        hits.append(choice == best[i])
        z = z.sub_(largest[:, None])
        q = z.exp()
        total = q.sum(-1)
        dz = None
        if kind != "ce":
            q = q.div_(total[:, None])
            alpha = torch.minimum(p, q).sum(-1)
            below = (q < p) + 0.5 * (q == p)  # the subgradient autograd takes at a tie
            dz = q * (below - (q * below).sum(-1, keepdim=True))
        if kind == "alpha":
            some = alpha > 0
            losses.append(torch.where(some, -alpha.clamp(min=1e-45).log(), 0.0))
            dz = dz.mul_(torch.where(some, -sc / alpha, 0.0)[:, None])
        else:
            losses.append(total.log() - z.mul_(p).sum(-1))
            d_ce, by = (sc, sc / total) if kind == "ce" else (sc * cc, sc * cc)
            if kind == "lambda":
                losses[-1] = cc * losses[-1] + (1 - cc) * (1 - alpha)
                dz = dz.mul_((-sc * (1 - cc))[:, None])
            d_cross = q.mul_(by[:, None]).sub_(p.mul_(d_ce[:, None]))
            dz = d_cross if dz is None else dz.add_(d_cross)
        if with_gradients:
            dz = dz.to(x.dtype)
            dxs.append(dz @ w)
            dw += dz.T @ xc
    return torch.cat(losses), torch.cat(hits), torch.cat(dxs) if with_gradients else None, dw


@torch.no_grad()
def acceptance(x, weight, teacher, index, rows: int) -> Tensor:
    """alpha [N] = sum_v min(p, q) of every row, `rows` at a time."""
    w = weight.to(x.dtype)
    parts = zip(x.split(rows), index.split(rows), strict=True)
    return torch.cat([torch.minimum(teacher[i], upcast(xc @ w.T).softmax(-1)).sum(-1) for xc, i in parts])


# ----------------------------------------------------------------------------------- what engines read (vLLM, SGLang)


def export_config(draft: DeepseekV3Eagle3DraftModel, dtype: torch.dtype = torch.bfloat16) -> dict:
    """`config.json` of an MLA EAGLE-3 draft as vLLM and SGLang load it: top-level rope_theta and rope_scaling."""
    cfg = draft.config
    if cfg.q_lora_rank is None:
        raise ValueError("engines load no MLA draft without q_lora_rank, and this draft has none; train one that has")
    skip = {"rope_parameters", "initializer_range", "eagle_aux_hidden_state_layer_ids"}
    own = {field.name for field in fields(cfg)} - {field.name for field in fields(PretrainedConfig)} - skip
    rope = {key: value for key, value in (cfg.rope_parameters or {}).items() if key != "rope_theta"}
    config = {
        "architectures": [draft.engine_architecture],
        "model_type": cfg.model_type,
        "num_hidden_layers": 1,
        "hidden_act": draft.hidden_act,
        **{name: getattr(cfg, name) for name in sorted(own)},
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if cfg.rope_parameters:
        scaled = rope["rope_type"] != "default"
        config["rope_theta"] = cfg.rope_parameters["rope_theta"]
        config["rope_scaling"] = {"type": rope["rope_type"], **rope} if scaled else None
    if cfg.eagle_aux_hidden_state_layer_ids is not None:
        ids = {"eagle_aux_hidden_state_layer_ids": list(cfg.eagle_aux_hidden_state_layer_ids)}
        config |= ids | {"eagle_config": ids}  # vLLM reads the first, SGLang the second
    return config


def export_state(draft: DeepseekV3Eagle3DraftModel, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Tensors under the names engines want (no `model.` prefix); d2t (offsets), t2d only at a reduced vocabulary."""
    state = {name.removeprefix("model."): x.detach() for name, x in draft.state_dict().items()}
    assert draft.draft_ids is not None  # raises when the vocabulary was never mapped
    return {name: (x.to(dtype) if x.is_floating_point() else x).cpu().contiguous() for name, x in state.items()}


def import_state(draft: DeepseekV3Eagle3DraftModel, state: dict[str, Tensor]) -> None:
    """Load an exported or published draft's tensors: with or without `model.`, `layers.0.` or `midlayer.`.

    ValueError lists every tensor that is missing, unexpected or of another shape; then nothing was loaded.
    """
    own = draft.state_dict()

    def full_name(name: str) -> str:
        name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
        return name if name in own else f"model.{name}"

    state = {full_name(name): x for name, x in state.items()}
    if draft.config.draft_vocab_size == draft.config.vocab_size:
        state = {name: x for name, x in state.items() if name not in ("model.d2t", "model.t2d")}
    wrong = [
        f"{name} {tuple(x.shape)} (want {tuple(own[name].shape)})"
        for name, x in state.items()
        if name in own and x.shape != own[name].shape
    ]
    missing, unexpected = sorted(own.keys() - state), sorted(state.keys() - own)
    if missing or unexpected or wrong:
        raise ValueError(f"not this draft's tensors: missing {missing}, unexpected {unexpected}, misshaped {wrong}")
    draft.load_state_dict(state)
