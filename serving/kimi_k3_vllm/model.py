"""vLLM's EAGLE-3 draft of DeepSeek with what Kimi K3 changes: no RoPE, a gate on the attention's output, SiTU.

vLLM asserts that an MLA draft is of its `Eagle3DeepseekV2ForCausalLM`, which always builds RoPE and knows silu alone.
So it is built as that, with a rope table of one position, and the three parts are exchanged afterwards. Both attention
and the feed-forward compute as `KimiK3Eagle3MLAAttention` and `KimiK3MLP` do; weights have the names of the export.
"""

import contextlib

WANTED = "this plug-in needs vLLM 0.32 or one like it; this one cannot serve the draft: {}"
try:
    from vllm.model_executor.layers.activation import SituAndMul
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.models.deepseek_eagle3 import Eagle3DeepseekV2ForCausalLM
    from vllm.model_executor.models.utils import get_draft_quant_config
except ImportError as error:
    raise ImportError(WANTED.format(error.msg)) from error


class Eagle3KimiK3ForCausalLM(Eagle3DeepseekV2ForCausalLM):
    def __init__(self, *, vllm_config, prefix: str = ""):
        config = vllm_config.speculative_config.draft_model_config.hf_config
        with changed(config, hidden_act="silu", max_position_embeddings=1):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in self.model.layers:
            inner = getattr(layer.self_attn, "mla_attn", None)
            for hook in ("rotary_emb", "g_proj"):
                if not hasattr(inner, hook):
                    raise RuntimeError(WANTED.format(f"its MLA layer has no {hook}"))
            layer.self_attn.rotary_emb = inner.rotary_emb = None
            if config.mla_use_output_gate:
                layer.self_attn.g_proj = inner.g_proj = gate(vllm_config, config, f"{inner.prefix}.g_proj")
            layer.mlp.act_fn = SituAndMul(config.activation_situ_beta or 1.0, config.activation_situ_linear_beta)


def gate(vllm_config, config, prefix: str) -> ColumnParallelLinear:
    """Of the layer's input (embedding and state), by heads as the attention's output is: a rank gates its own."""
    inputs, outputs = 2 * config.hidden_size, config.num_attention_heads * config.v_head_dim
    quant_config = get_draft_quant_config(vllm_config)
    return ColumnParallelLinear(inputs, outputs, bias=False, quant_config=quant_config, prefix=prefix)


@contextlib.contextmanager
def changed(config, **values):
    before = {name: getattr(config, name) for name in values}
    vars(config).update(values)
    try:
        yield
    finally:
        vars(config).update(before)
