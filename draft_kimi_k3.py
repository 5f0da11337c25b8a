"""EAGLE-3 draft with Kimi K3's backbone: MLA without RoPE (NoPE), an output gate, and a SiTU MLP.

Only what differs from `draft_deepseek.py` (copy both files together); `TTTLoss` and `build_rows` serve this draft as
well. Shapes as there: B rows, T slots, H hidden, n heads, Dv value width.
"""

import torch
from einops import rearrange
from torch import Tensor, nn

from draft_deepseek import (
    DeepseekV3Eagle3DraftModel,
    Eagle3DeepseekDecoderLayer,
    Eagle3DeepseekMLAAttention,
    Eagle3DeepseekMLP,
    Eagle3DeepseekModel,
    Eagle3MLAConfig,
    upcast,
)


class KimiK3Eagle3Config(Eagle3MLAConfig):
    """`Eagle3MLAConfig` with K3's switches. ValueError: `mla_use_nope` false, grouped key/value heads.

    Its model_type stays deepseek_v2: vLLM takes kimi_k3 for the multimodal target, and detects MLA by that of DeepSeek.
    """

    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    activation_situ_beta: float | None = 4.0  # null in published configs means 1
    activation_situ_linear_beta: float | None = 25.0

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.activation_situ_beta is None:
            self.activation_situ_beta = 1.0
        if not self.mla_use_nope:
            raise ValueError(
                "mla_use_nope is false; a Kimi K3 draft has no RoPE, train one that has with draft_deepseek.py"
            )

    @staticmethod
    def resolve_rope(parameters, scaling, theta) -> None:
        """NoPE: whatever the target's config says of RoPE is its other layers'."""


class KimiK3Eagle3DraftModel(DeepseekV3Eagle3DraftModel):
    """EAGLE-3 draft of a Kimi K3 target. vLLM serves it with the plug-in in serving/kimi_k3_vllm."""

    config_class = KimiK3Eagle3Config
    engine_architecture, hidden_act = "Eagle3KimiK3ForCausalLM", "situ"

    @staticmethod
    def inner_model(config) -> nn.Module:
        return Eagle3KimiK3Model(config)


class Eagle3KimiK3Model(Eagle3DeepseekModel):
    @staticmethod
    def decoder_layer(config) -> nn.Module:
        return KimiK3Eagle3DecoderLayer(config)


class KimiK3Eagle3DecoderLayer(Eagle3DeepseekDecoderLayer):
    @staticmethod
    def blocks(config) -> tuple[nn.Module, nn.Module]:
        return KimiK3Eagle3MLAAttention(config), KimiK3MLP(config)


class KimiK3Eagle3MLAAttention(Eagle3DeepseekMLAAttention):
    """The rope slice rides along unrotated; the output of every head is gated by the layer's fused input."""

    def __init__(self, config, fuse_input: bool = True):
        super().__init__(config, fuse_input)
        if config.mla_use_output_gate:
            width = config.hidden_size * (2 if fuse_input else 1)
            self.g_proj = nn.Linear(width, config.num_attention_heads * config.v_head_dim, bias=False)

    def input_projections(self) -> list[nn.Linear | None]:
        query, latent, _ = super().input_projections()
        return [query, latent, self.g_proj if self.config.mla_use_output_gate else None]

    def output(self, o: Tensor, pre_gate: Tensor | None) -> Tensor:
        if pre_gate is not None:
            o = o * rearrange(torch.sigmoid(pre_gate), "b t (n v) -> b n t v", n=self.config.num_attention_heads)
        return super().output(o, pre_gate)

    def rotate(self, x: Tensor, position: Tensor) -> Tensor:
        return x

    @staticmethod
    def softmax_scale(config) -> float:
        return config.qk_head_dim**-0.5


class KimiK3MLP(Eagle3DeepseekMLP):
    """SiTU: beta tanh(gate/beta) sigmoid(gate) times linear_beta tanh(up/linear_beta), in float32."""

    def __init__(self, config):
        super().__init__(config)
        self.beta, self.linear_beta = config.activation_situ_beta, config.activation_situ_linear_beta

    def forward(self, x: Tensor) -> Tensor:
        gate, up = upcast(self.gate_proj(x)), upcast(self.up_proj(x))
        if self.linear_beta is not None:
            up = self.linear_beta * torch.tanh(up / self.linear_beta)
        return self.down_proj((self.beta * torch.tanh(gate / self.beta) * torch.sigmoid(gate) * up).to(x.dtype))
