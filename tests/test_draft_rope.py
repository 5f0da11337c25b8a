"""Claims about RoPE and its scale: from every form of config, as transformers computes them and engines serve them.

Expectations are closed forms and transformers' own DeepSeek-V3.
"""

import math
from copy import deepcopy

import pytest
import torch
from transformers import DeepseekV3Config

from draft_deepseek import DeepseekV3Eagle3DraftModel, Eagle3DeepseekMLAAttention, Eagle3MLAConfig
from draft_kimi_k3 import KimiK3Eagle3Config
from test_drafts import SIZES, YARN, build_draft, close, config_of, make_batch, make_draft, run_fast
from tests.helpers import attention_of, hf_attention, reachable

DEEPSEEK_YARN = YARN | {"original_max_position_embeddings": 4096}


# -------------------------------------------------------------------------------------------- RoPE (PITFALLS 3, 4, 5)


def turned(attention, position):
    """The complex number by which each pair (0,1), (2,3), ... of the rope slice is multiplied at a position."""
    x = torch.tensor([1.0, 0.0]).repeat(attention.config.qk_rope_head_dim // 2)[None, None]
    return torch.view_as_complex(attention.rotate(x, torch.tensor([[position]])).reshape(-1, 2).double())


FORMS = {
    "top level": {"rope_theta": 5e6},
    "nested": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "both": {"rope_theta": 5e6, "rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6}},
    "top level yarn": {"rope_theta": 5e6, "rope_scaling": DEEPSEEK_YARN},
    "yarn of old": {"rope_theta": 5e6, "rope_scaling": {k: v for k, v in DEEPSEEK_YARN.items() if k != "rope_type"}},
    "nested yarn": {"rope_parameters": DEEPSEEK_YARN | {"rope_theta": 5e6}},
    "yarn in both": {
        "rope_theta": 5e6,
        "rope_scaling": DEEPSEEK_YARN,
        "rope_parameters": DEEPSEEK_YARN | {"rope_theta": 5e6},
    },
}


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_theta_and_yarn_arrive_from_every_form_of_config(form, as_object):
    keys = SIZES | FORMS[form] | {"qk_rope_head_dim": 64}
    yarn = "yarn" in form
    source = keys
    if as_object:
        own = ("target_hidden_size", "draft_vocab_size", "num_aux_hidden_states")
        source = DeepseekV3Config(**deepcopy({k: v for k, v in keys.items() if k not in own}))  # it writes into ours
    config = Eagle3MLAConfig.from_any(source)
    attention = Eagle3DeepseekMLAAttention(config)
    angle = turned(attention, 1).angle()
    want = torch.tensor([5e6 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    if yarn:  # the fastest pairs keep their pace, the slowest are 40 times slower
        close(angle[:2], want[:2], 1e-6)
        close(angle[-4:], want[-4:] / 40, 1e-6)
    else:
        close(angle[1], want[1], 1e-6)
        close(angle / want, torch.ones(32), 1e-5)
    close(
        torch.tensor(attention.scaling), torch.tensor(70**-0.5 * ((0.1 * math.log(40) + 1) ** 2 if yarn else 1)), 1e-6
    )
    again = Eagle3MLAConfig.from_any(config.to_dict())  # and from its own dict and JSON
    assert again.rope_parameters == config.rope_parameters


@pytest.mark.parametrize("nested", [{"rope_theta": 5e6}, {"rope_theta": 5e6, "rope_type": "default"}])
def test_yarn_beside_nested_parameters_is_used_or_refused_but_not_dropped(nested):
    keys = {"rope_parameters": nested, "rope_scaling": DEEPSEEK_YARN, "qk_rope_head_dim": 64}
    try:
        attention = attention_of(**keys)
    except ValueError:
        return
    close(turned(attention, 1).angle()[-4:], torch.tensor([5e6 ** (-2 * i / 64) / 40 for i in range(28, 32)]), 1e-6)


def test_the_text_part_of_a_nested_config_is_read():
    for cls, variant in ((Eagle3MLAConfig, "deepseek-yarn"), (KimiK3Eagle3Config, "kimi")):
        nested = cls.from_any({"model_type": "outer", "hidden_size": 1, "text_config": config_of(variant)})
        assert nested.to_dict() == cls.from_any(config_of(variant)).to_dict()


def test_an_unknown_rope_type_or_no_theta_raises():
    for keys in (
        {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        {},
    ):
        with pytest.raises(ValueError, match="rope"):
            Eagle3MLAConfig.from_any(SIZES | keys)


@pytest.mark.parametrize(("factor", "scale"), [(40, 0.1352338), (64, 0.1446796), (32, 0.1308592), (None, 192**-0.5)])
def test_softmax_scale_is_what_engines_serve(factor, scale):
    rope = {"rope_scaling": DEEPSEEK_YARN | {"factor": factor}} if factor else {}
    attention = attention_of(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_theta=10000.0, **rope)
    assert attention.scaling == pytest.approx(scale, abs=5e-8 if factor != 32 else 3e-6)
    close(turned(attention, 3).abs(), torch.ones(32), 1e-6)  # amplitude of cos and sin


def test_amplitude_of_unequal_mscales():
    yarn = DEEPSEEK_YARN | {"mscale_all_dim": 0.707}
    amplitude = turned(attention_of(rope_theta=10000.0, rope_scaling=yarn), 3).abs()
    close(amplitude, torch.full((4,), 1.0857), 5e-5)
    close(amplitude, torch.full((4,), (0.1 * math.log(40) + 1) / (0.0707 * math.log(40) + 1)), 1e-6)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "meta", "from_pretrained", "from_pretrained bfloat16"])
def test_angles_stay_exact_whatever_happens_to_the_module(cast, tmp_path):
    draft, cfg = make_draft("deepseek", qk_rope_head_dim=64)
    if cast == "bfloat16":
        draft = draft.to(torch.bfloat16)
    elif cast == "half":
        draft = draft.half()
    elif cast == "meta":
        with torch.device("meta"):
            draft = build_draft("deepseek", cfg)
        draft = draft.to_empty(device="cpu")
    else:
        draft.save_pretrained(tmp_path)
        dtype = torch.bfloat16 if "bfloat16" in cast else torch.float32
        draft = DeepseekV3Eagle3DraftModel.from_pretrained(tmp_path, dtype=dtype)
        assert draft.model.fc.weight.dtype == dtype
    want = torch.polar(torch.ones(32).double(), 32767 * torch.tensor([1e4 ** (-i / 32) for i in range(32)]).double())
    assert (turned(draft.model.layers[0].self_attn, 32767) - want).abs().max() < 3e-3


def test_scores_depend_on_position_differences_only():
    draft, _ = make_draft("deepseek-yarn")
    draft, near, far = draft.double(), make_batch([[20]]), make_batch([[20]], start=37)
    near["features"] = far["features"] = near["features"].double()
    close(reachable(run_fast(draft, far)), reachable(run_fast(draft, near)), 1e-6)


# ------------------------------------------------------------------------ attention against transformers' (PITFALLS 4)


@pytest.mark.parametrize("q_lora_rank", [10, None])
@pytest.mark.parametrize("factor", [None, 40.0, 64.0])
def test_attention_equals_transformers(factor, q_lora_rank):
    rope = {"rope_theta": 50000.0, "q_lora_rank": q_lora_rank}
    rope |= {"rope_scaling": DEEPSEEK_YARN | {"factor": factor, "beta_fast": 1}} if factor else {}
    torch.manual_seed(0)
    theirs, rotary = hf_attention(**rope)
    ours = attention_of(fuse_input=False, **rope)
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(1 + 0.3 * torch.randn_like(p) if p.dim() == 1 else torch.randn_like(p) / p.shape[1] ** 0.5)
    ours.load_state_dict(theirs.state_dict())
    x, position = torch.randn(2, 11, 24), torch.stack([torch.arange(11) + 5000, torch.arange(11) * 3 + 17])
    causal = torch.full((11, 11), -math.inf).triu(1).expand(2, 1, -1, -1)
    want = theirs(x, position_embeddings=rotary(x, position), attention_mask=causal)[0]
    close(ours(x, causal, position, [[], []]), want, 2e-5)
