"""The model of the built-in Kimi K3 target."""

import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from draft_deepseek import RMSNorm
from draft_kimi_k3 import KimiK3Eagle3Config, KimiK3Eagle3MLAAttention, KimiK3MLP


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
