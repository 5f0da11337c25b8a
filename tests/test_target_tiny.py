"""The built-in tiny targets and their tokenizer."""

import json

import pytest
import torch
import transformers

from data.conversations import answered
from target import tiny
from target.model import default_aux_layers, load_target
from target.tiny import PAD, byte_tokenizer, orthogonalise, tiny_target
from tests.helpers import next_logits

# -------------------------------------------------------------------------------------------------------- tiny targets


def test_the_tiny_deepseek_is_what_engines_serve(tiny_targets):
    config = json.loads((tiny_targets["deepseek-v3"] / "config.json").read_text())
    expected = {"model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert config | expected | {"num_nextn_predict_layers": 0} == config
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["rope_parameters"]["factor"] == 40
    target = load_target(tiny_targets["deepseek-v3"])
    assert type(target.model) is transformers.DeepseekV3ForCausalLM and len(target.layers) >= 7
    assert target.aux_layers == default_aux_layers(len(target.layers))
    kinds = {type(layer.mlp).__name__ for layer in target.layers}
    assert kinds == {"DeepseekV3MLP", "DeepseekV3MoE"}
    assert target.special_token_ids == list(range(256, 262)) and target.eos_token_id == 258


def test_the_tiny_kimi_has_gates_and_no_positions(tiny_targets, held_out):
    target = load_target(tiny_targets["kimi-k3"])
    for layer in target.layers:
        layer.self_attn.g_proj.weight.data.zero_()
    gated = next_logits(target, held_out[0].tokens)
    for layer in target.layers:  # a sigmoid of 0 is a half, so halving every output by hand is the same
        layer.self_attn.output = lambda o, gate, attn=layer.self_attn: attn.o_proj(o.transpose(1, 2).flatten(2)) / 2
    torch.testing.assert_close(next_logits(target, held_out[0].tokens), gated)
    one_token = torch.full((9,), 65)  # without positions and with equal tokens, every slot sees the same
    states = target.capture([one_token])[0][1]
    torch.testing.assert_close(states, states[:1].expand_as(states), atol=1e-4, rtol=1e-4)


def test_a_tiny_target_is_made_once_and_alike(tiny_targets, tmp_path, monkeypatch):
    again = tiny_target("deepseek-v3", tmp_path / "again", progress=False, steps=3)
    first, second = (load_target(path).model.state_dict() for path in (tiny_targets["deepseek-v3"], again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.setattr(tiny, "train_tiny", lambda *args: pytest.fail("trained again"))
    assert tiny_target("deepseek-v3", again, steps=3) == again
    with pytest.raises(ValueError, match="holds built-in target .* 'steps': 3.* wanted is .* 'steps': 4"):
        tiny_target("deepseek-v3", again, steps=4)
    with pytest.raises(ValueError, match="holds built-in target"):
        tiny_target("kimi-k3", again, steps=3)


def test_a_killed_making_leaves_nothing_and_nothing_foreign_is_overwritten(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "train_tiny", lambda *args: {})
    monkeypatch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", killed)
    with pytest.raises(KeyboardInterrupt):
        tiny_target("deepseek-v3", tmp_path / "t", progress=False)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note.txt").write_text("keep")
    with pytest.raises(ValueError, match="holds no built-in target"):
        tiny_target("deepseek-v3", tmp_path / "mine")
    assert (tmp_path / "mine" / "note.txt").read_text() == "keep"
    with pytest.raises(ValueError, match="no built-in target 'gpt'; there are deepseek-v3, kimi-k3"):
        tiny_target("gpt", tmp_path / "t")


def test_training_learns_and_leaves_the_callers_random_state(tmp_path):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    path = tiny_target("kimi-k3", tmp_path / "t", progress=False, steps=16)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert json.loads((path / "tiny_target.json").read_text())["bits_per_byte"] < 6  # 8.03 untrained


def test_orthogonalise_brings_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 16, 40), (2, 40, 16)):
        values = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        assert values.min() > 0.5 and values.max() < 1.3


# -------------------------------------------------------------------------------------------------------- the tokenizer


def test_every_text_survives_the_byte_tokenizer(tiny_targets):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10400), 0x1F600, 0x10FFFF]))
    loaded = load_target(tiny_targets["kimi-k3"]).tokenizer
    for tokenizer in (byte_tokenizer(), loaded):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
        assert tokenizer.pad_token_id == PAD and "{% generation %}" not in tokenizer.chat_template


def test_the_mask_covers_exactly_the_answer_and_its_end_of_turn(tiny_targets):
    tokenizer = load_target(tiny_targets["deepseek-v3"]).tokenizer
    prompt, answer = "def f(x):\n    'é'\n", "    return x  # ü\n"
    (d,) = answered(tokenizer, [(prompt, answer)])
    learned = [*answer.encode(), 261]
    assert d.tokens.tolist() == [257, 259, *prompt.encode(), 260, *learned]
    assert d.loss_mask.tolist() == [False] * (3 + len(prompt.encode())) + [True] * len(learned)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"  # rewrites history
    (d,) = answered(tokenizer, [("def f", "return")])  # what stands behind the prompt that is given for it
    assert tokenizer.decode(d.tokens) == "1def f2return" and tokenizer.decode(d.tokens[d.loss_mask]) == "2return"
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{% endfor %}"  # and shows no answer
    with pytest.raises(ValueError, match="renders the prompt"):
        answered(tokenizer, [(prompt, answer)])
