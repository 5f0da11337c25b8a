"""Claims about the targets of the day: by the public facts of their config.json the draft has the shape it should."""

import json

import pytest
import torch
from transformers import AutoConfig

from draft_deepseek import DeepseekV3Eagle3DraftModel, export_config, rope_frequencies
from target.ends import text_config
from target.model import default_aux_layers, layer_count, usual_names
from training.drafts import draft_config
from training.settings import Settings
from training.sources import Source

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
NAMES = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size", "num_hidden_layers", "q_lora_rank")
NAMES += ("max_position_embeddings", "rms_norm_eps")


def facts(model_type, *sizes, **more) -> dict:
    heads = {"num_key_value_heads": sizes[1], "eos_token_id": 1, "bos_token_id": 0}
    return {"model_type": model_type} | MLA | dict(zip(NAMES, sizes, strict=True)) | heads | more


def yarn(theta, factor, fast=32, **more) -> dict:
    more = {"mscale": 1.0, "mscale_all_dim": 1.0} | more
    known = {"type": "yarn", "factor": factor, "original_max_position_embeddings": 4096, "beta_fast": fast}
    return {"rope_theta": theta, "rope_scaling": known | {"beta_slow": 1} | more}


PLAIN = {"rope_theta": 1e6, "rope_scaling": None}
INDEXER = {"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
LITE = {"mscale": 0.707, "mscale_all_dim": 0.707}
MISTRAL = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 36.0, "original_max_position_embeddings": 8192}
MISTRAL |= {"beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1, "attention_factor": 1.0}
K2 = (7168, 64, 18432, 163840, 61, 1536)
GLM = {"qk_nope_head_dim": 192, "v_head_dim": 256}
LONGCAT = facts("longcat_flash", 6144, 64, None, 131072, None, 1536, 131072, 1e-5, rope_theta=1e7)
LONGCAT |= {"num_layers": 28, "ffn_hidden_size": 12288, "expert_ffn_hidden_size": 2048, "mla_scale_q_lora": True}
LONGCAT = {key: x for key, x in LONGCAT.items() if x is not None}
V3 = (7168, 128, 18432, 129280, 61, 1536, 163840, 1e-6)
TARGETS = {
    "DeepSeek-V2-Lite": facts("deepseek_v2", 2048, 16, 10944, 102400, 27, None, 163840, 1e-6, **yarn(1e4, 40, **LITE)),
    "Moonlight-16B-A3B": facts("deepseek_v3", 2048, 16, 11264, 163840, 27, None, 8192, 1e-5, rope_theta=5e4),
    "DeepSeek-V3.2": facts("deepseek_v32", *V3, **yarn(1e4, 40), **INDEXER),
    "GLM-4.7-Flash": facts("glm4_moe_lite", 2048, 20, 10240, 154880, 47, 768, 202752, 1e-5, **PLAIN, **GLM),
    "GLM-5": facts("glm_moe_dsa", 6144, 64, 12288, 154880, 78, 2048, 202752, 1e-5, **GLM, **INDEXER)
    | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    "Kimi-K2-Instruct": facts("kimi_k2", *K2, 131072, 1e-6, **yarn(5e4, 32, fast=1)),
    "Kimi-K2-Instruct-0905": facts("kimi_k2", *K2, 262144, 1e-6, **yarn(5e4, 64, fast=1)),
    "Kimi-K2.6": {
        "model_type": "kimi_k25",
        "text_config": facts("kimi_k2", *K2, 262144, 1e-5, **yarn(5e4, 64, fast=1)),
    },
    "Mistral-Large-3": {"model_type": "mistral3"}
    | {"text_config": facts("deepseek_v3", 7168, 128, 16384, 131072, 61, 1536, 294912, 1e-6, rope_parameters=MISTRAL)},
    "LongCat-Flash": LONGCAT,
}
SCALED = {name: 1.0 for name in TARGETS}  # of scores, by yarn: (0.1 mscale_all_dim ln(factor) + 1) squared
SCALED |= {"DeepSeek-V2-Lite": 1.2608037**2, "DeepSeek-V3.2": 1.8738542, "Kimi-K2-Instruct": 1.8132604}
SCALED |= {"Kimi-K2-Instruct-0905": 2.0047397, "Kimi-K2.6": 2.0047397}


def source_of(config: dict, layers: int) -> Source:
    empty = dict.fromkeys(Source._fields)
    sizes = {"hidden_size": config["hidden_size"], "vocab_size": config["vocab_size"]}
    target = type("Target", (), {"config": type("Config", (), {"to_dict": lambda self: config})()})()
    return Source(**empty | sizes | {"aux_layers": default_aux_layers(layers), "target": target, "is_tiny": False})


@pytest.fixture(params=TARGETS)
def target(request, tmp_path):
    """Name, facts of the text model, and its config.json as plain JSON gives it."""
    config = TARGETS[request.param]
    (tmp_path / "config.json").write_text(json.dumps(config))
    return request.param, usual_names(config.get("text_config") or config), text_config(tmp_path)


def test_a_draft_has_the_shape_of_its_target(target):
    name, known, config = target
    with torch.device("meta"):
        draft = DeepseekV3Eagle3DraftModel(
            draft_config(Settings(), source_of(config, config["num_hidden_layers"]), None)
        )
    cfg, attention = draft.config, draft.model.layers[0].self_attn
    own = ("num_attention_heads", "intermediate_size", "vocab_size", "max_position_embeddings", "rms_norm_eps", *MLA)
    assert {key: getattr(cfg, key) for key in own} == {key: known[key] for key in own}
    assert cfg.q_lora_rank == (known["q_lora_rank"] if known.get("q_lora_rank") else 1536)
    assert cfg.eagle_aux_hidden_state_layer_ids is None  # those that engines take for so many layers
    assert attention.scaling * cfg.qk_head_dim**0.5 == pytest.approx(SCALED[name], rel=1e-6)
    frequencies, amplitude = rope_frequencies(cfg)
    theta = known.get("rope_theta") or known["rope_parameters"]["rope_theta"]
    factor = (known.get("rope_scaling") or known.get("rope_parameters") or {}).get("factor", 1)
    assert amplitude == pytest.approx(1.0) and frequencies[0] == 1.0
    assert frequencies[-1] == pytest.approx(theta ** (-62 / 64) / factor, rel=1e-5)
    exported = export_config(draft)
    assert exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and exported["model_type"] == "deepseek_v2"
    assert not {"index_topk", "mla_scale_q_lora"} & exported.keys()


def test_what_transformers_reads_gives_the_same_draft(target):
    name, known, config = target
    if known["model_type"] == "kimi_k2":
        pytest.skip("transformers does not know kimi_k2; --trust-remote-code or captured states do")
    read = AutoConfig.for_model(**{key: x for key, x in TARGETS[name].get("text_config", TARGETS[name]).items()})
    layers = layer_count(read)
    assert layers == config["num_hidden_layers"]
    plain, theirs = (
        DeepseekV3Eagle3DraftModel.config_class.from_any(draft_config(Settings(), source_of(x, layers), None))
        for x in (config, usual_names(read.to_dict()))
    )
    for key in export_keys(plain):
        assert getattr(theirs, key) == getattr(plain, key), key
    assert torch.equal(rope_frequencies(theirs)[0], rope_frequencies(plain)[0])


def test_of_a_targets_rope_the_draft_takes_what_engines_rotate_drafts_by():
    config = AutoConfig.for_model("mistral4").to_dict()
    assert config["rope_parameters"]["partial_rotary_factor"] == 0.5
    draft = DeepseekV3Eagle3DraftModel.config_class.from_any(draft_config(Settings(), source_of(config, 36), None))
    assert draft.rope_parameters["factor"] == 128
    assert not {"partial_rotary_factor", "llama_4_scaling_beta", "type"} & draft.rope_parameters.keys()
    other = TARGETS["Moonlight-16B-A3B"] | {"rope_scaling": {"rope_type": "llama3", "factor": 8}}
    with pytest.raises(ValueError, match="^rope_type is 'llama3'; a draft rotates by 'default' or 'yarn'$"):
        DeepseekV3Eagle3DraftModel.config_class.from_any(draft_config(Settings(), source_of(other, 27), None))


def export_keys(config) -> set[str]:
    return {*config.required_keys(), "q_lora_rank", "num_key_value_heads", "num_aux_hidden_states"}


def test_the_options_change_the_shape_and_not_that_of_a_draft_to_start_from():
    config = TARGETS["GLM-4.7-Flash"]
    source = source_of(config, 47)
    changed = draft_config(Settings(q_lora_rank=1024, heads=32, intermediate_size=8192), source, None)
    with torch.device("meta"):
        layer = DeepseekV3Eagle3DraftModel(changed).model.layers[0]
    assert layer.self_attn.q_a_proj.weight.shape == (1024, 4096) and layer.mlp.up_proj.weight.shape == (8192, 2048)
    assert layer.self_attn.o_proj.weight.shape == (2048, 32 * 256)
    assert draft_config(Settings(q_lora_rank=0), source, None)["q_lora_rank"] is None
    start = changed | {"eagle_aux_hidden_state_layer_ids": None}
    assert draft_config(Settings(q_lora_rank=1024), source, start)["num_attention_heads"] == 32
    with pytest.raises(ValueError, match="--init has num_attention_heads 32, not 16, .*32, not 16 as the options ask"):
        draft_config(Settings(heads=16), source, start)
