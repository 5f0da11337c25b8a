"""The frozen target: its states are the model's own, and what cannot be used is refused."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from target.ends import load_ends
from target.model import Target, default_aux_layers, load_target
from tests.helpers import next_logits

PRESETS = ["deepseek-v3", "kimi-k3"]


def llama(folder: Path, layers=7, **changes) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=layers, **sizes | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- capture


@pytest.mark.parametrize("preset", PRESETS)
def test_capture_equals_the_models_own_states_one_document_at_a_time(tiny_targets, held_out, preset):
    target = load_target(tiny_targets[preset])
    captured = target.capture([d.tokens for d in held_out])
    assert target.sees_no_padding and len(list(target.batches([len(d.tokens) for d in held_out]))) < len(held_out)
    streams = {}
    for j, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda module, args, output, j=j: streams.update({j: output}))
    for d, (features, last) in zip(held_out, captured, strict=True):
        with torch.no_grad():
            logits = target.model(input_ids=d.tokens[None]).logits[0]
        expected = torch.cat([streams[j][0] for j in (1, 2, 3)], -1)
        assert features.shape == (len(d.tokens), 3 * target.hidden_size) and not features.requires_grad
        assert not features.is_inference()
        torch.testing.assert_close(features, expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(target.head(last), logits, atol=1e-5, rtol=1e-5)


def test_layer_j_is_hidden_states_j_plus_1_for_every_j_but_the_last(tmp_path):
    path = llama(tmp_path)
    tokens = torch.arange(20) % 50
    for ids in ([0, 1, 2], [3, 4, 5], [5, 0, 3]):
        target = load_target(path, ids)
        assert target.aux_layers == tuple(sorted(ids))
        features, last = target.capture([tokens])[0]
        with torch.no_grad():
            states = target.model(input_ids=tokens[None], output_hidden_states=True).hidden_states
        torch.testing.assert_close(features, torch.cat([states[j + 1][0] for j in sorted(ids)], -1))
        torch.testing.assert_close(last, states[-1][0])  # Hugging Face norms its last one


def test_captured_states_are_nobodys_buffer(tmp_path):
    """A model that reuses its buffers in place, and a second capture, change nothing captured before."""
    target = load_target(llama(tmp_path))
    tokens = torch.arange(9)
    expected = [x.clone() for x in target.capture([tokens])[0]]
    following = target.layers[target.aux_layers[0] + 1]
    following.register_forward_hook(lambda module, args, output: args[0].zero_())
    got = target.capture([tokens])[0]
    target.capture([tokens.flip(0)])
    n = target.hidden_size
    torch.testing.assert_close(got[0][:, :n], expected[0][:, :n])


def test_a_target_that_sees_padding_is_captured_one_by_one(tmp_path):
    target = load_target(llama(tmp_path))
    target.backbone.register_forward_hook(  # looks at its right
        lambda module, args, output: setattr(
            output, "last_hidden_state", output.last_hidden_state.flip(1).cumsum(1).flip(1)
        )
    )
    other = Target(target.model)
    documents = [torch.arange(5), torch.arange(7), torch.arange(7)]
    assert not other.sees_no_padding and list(other.batches([5, 7, 7])) == [[0], [1], [2]]
    assert [len(last) for _, last in other.capture(documents)] == [5, 7, 7]


def test_capture_makes_no_logits_and_takes_its_hooks_away(tmp_path):
    target = load_target(llama(tmp_path))
    target.lm_head.register_forward_hook(lambda *args: pytest.fail("the head ran"))
    target.capture([torch.arange(5)])
    target.backbone.norm.register_forward_pre_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        target.capture([torch.arange(5)])
    assert not any(layer._forward_hooks for layer in target.layers)


def test_a_multimodal_wrappers_language_model_is_found(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    text = {"model_type": "llama", "vocab_size": 50, "num_hidden_layers": 7, "num_key_value_heads": 4, **sizes}
    vision = {"model_type": "clip_vision_model", "num_hidden_layers": 7, "image_size": 8, "patch_size": 4, **sizes}
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=49)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(tmp_path)
    target = load_target(tmp_path)
    assert isinstance(target.backbone, transformers.LlamaModel) and target.vocab_size == 50
    features, _ = target.capture([torch.arange(6)])[0]
    with torch.no_grad():
        states = target.model(input_ids=torch.arange(6)[None], output_hidden_states=True).hidden_states
    torch.testing.assert_close(features, torch.cat([states[j + 1][0] for j in (1, 2, 3)], -1))


def test_layers_of_another_name(tmp_path):
    config = transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=7, n_head=4)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)  # transformer.h, a tied head
    assert load_target(tmp_path).capture([torch.arange(6)])[0][0].shape == (6, 96)


def test_a_target_whose_logits_are_not_its_heads_is_refused(tmp_path):
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    config = transformers.Gemma2Config(vocab_size=50, num_hidden_layers=7, final_logit_softcapping=0.01, **sizes)
    transformers.Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Gemma2ForCausalLM does more to its logits"):
        load_target(tmp_path)


# ------------------------------------------------------------------------------------------------------------ decoding


@pytest.mark.parametrize("preset", PRESETS)
def test_greedy_with_a_cache_equals_greedy_without(tiny_targets, held_out, preset):
    target = load_target(tiny_targets[preset])
    prompt = expected = held_out[0].tokens[:50]
    for _ in range(12):
        expected = torch.cat([expected, next_logits(target, expected)[-1:].argmax(-1)])
    got = target.greedy(prompt, 12)
    assert torch.equal(got, expected[50:])
    assert target.stop_token_ids == [258, 261]
    target.stop_token_ids = [int(got[3])]
    first = got.tolist().index(int(got[3]))
    assert torch.equal(target.greedy(prompt, 12, ignore_eos=False), got[: first + 1])


# ----------------------------------------------------------------------------------------------------------- bad input


def test_default_layers():
    assert default_aux_layers(61) == (1, 29, 57) and default_aux_layers(93) == (1, 45, 89)


@pytest.mark.parametrize(
    "ids, layers, message",
    [
        (None, 6, r"default auxiliary layers are \[1, 2, 2\] of 6 layers"),
        (None, 2, r"default auxiliary layers are \[1, 0, -2\] of 2 layers"),
        ([1, 1, 3], 7, r"\[1, 1, 3\] of 7 layers"),
        ([1, 2], 7, r"\[1, 2\] of 7 layers"),
        ([1, 2, 6], 7, r"\[1, 2, 6\] of 7 layers; they must lie in 0\.\.5"),
        ([-1, 2, 3], 7, r"\[-1, 2, 3\] of 7 layers"),
        ([1, 2.0, 3], 7, r"\[1, 2\.0, 3\]"),
    ],
)
def test_impossible_layers(tmp_path, ids, layers, message):
    with pytest.raises(ValueError, match=message):
        load_target(llama(tmp_path, layers), ids)


@pytest.mark.parametrize(
    "damage, message",
    [
        (lambda path: shutil.rmtree(path), "is no directory"),
        (lambda path: (path / "config.json").unlink(), "has no config.json"),
        (lambda path: (path / "config.json").write_text("{"), "JSON"),
        (lambda path: (path / "config.json").write_text('{"model_type": "never_heard_of"}'), "never_heard_of"),
        (lambda path: (path / "model.safetensors").unlink(), "model.safetensors"),
        (lambda path: cut_file(path / "model.safetensors", -1), "SafetensorError"),
        (lambda path: cut_file(path / "model.safetensors", 0), "SafetensorError"),
        (lambda path: (path / "model.safetensors").write_bytes(b"\xff" * 500), "SafetensorError"),
        (lambda path: edit_config(path, num_hidden_layers=9), "lack 18 tensors"),
        (lambda path: edit_config(path, hidden_size=64), "cannot be read"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "cannot be read"),
    ],
)
def test_a_damaged_directory_is_one_clear_error(tmp_path, damage, message):
    path = llama(tmp_path / "model")
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        load_target(path)
    assert str(path) in str(error.value)


def nested(path: Path) -> None:
    """Rewrites config.json in the form of Kimi K3's: all about the text model one level down."""
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({"model_type": config["model_type"], "text_config": config}))


WRONG = {"hidden_size": ("32", 1.5, -1, 0, True, 10**12), "num_hidden_layers": ("x", -1, 0, 10**9, [7])}
WRONG |= {"vocab_size": (-5, 0, "50", 50.0), "rms_norm_eps": ("x", -1.0, []), "text_config": (3, "x", [1])}
WRONG |= {"pad_token_id": (50, -1, "x", 2**40, [1]), "eos_token_id": ("x", [1, "y"], 1.5, {}), "bos_token_id": ("x",)}
WRONG |= {"tie_word_embeddings": ("no", 3), "mla_use_nope": ("yes", 1)}


@pytest.mark.parametrize("load", [load_target, load_ends])
def test_no_value_in_a_targets_configs_is_a_traceback(tmp_path, load):
    path = llama(tmp_path / "model")
    load(path)
    good = (path / "config.json").read_text()
    for key, values in WRONG.items():
        for value in values:
            for form in (lambda path: None, nested):
                edit_config(path, **{key: value})
                if key != "text_config":
                    form(path)
                with pytest.raises(ValueError, match="config.json cannot be used") as error:
                    load(path)
                assert "\n" not in str(error.value), (key, value)
                (path / "config.json").write_text(good)
    for text in ("", "[]", "{", '{"eos_token_id": "x"}', '{"eos_token_id": [1, null, "2"]}', '{"pad_token_id": 1.5}'):
        (path / "generation_config.json").write_text(text)
        with pytest.raises(ValueError, match="generation_config.json cannot be used"):
            load(path)


@pytest.mark.parametrize("load", [load_target, load_ends])
def test_a_targets_index_is_held_to_its_files(tmp_path, load):
    path = llama(tmp_path / "model")
    LlamaForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="20KB")
    (path / "model.safetensors").unlink()
    load(path)
    index = path / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    name = "model.norm.weight"
    for wrong in ("nothing.safetensors", "../model/" + good["weight_map"][name], "/etc/passwd", 3, None, "config.json"):
        index.write_text(json.dumps(good | {"weight_map": good["weight_map"] | {name: wrong}}))
        with pytest.raises(ValueError, match="model.safetensors.index.json cannot be used"):
            load(path)
    for text in ("", "[]", "{}", '{"weight_map": []}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="model.safetensors.index.json cannot be used"):
            load(path)


def test_an_index_that_is_wrong_is_blamed_and_not_the_file(tmp_path):
    path = llama(tmp_path / "model")
    LlamaForCausalLM.from_pretrained(path).save_pretrained(path, max_shard_size="20KB")
    index = path / "model.safetensors.index.json"
    held = json.loads(index.read_text())
    others = sorted({*held["weight_map"].values()} - {held["weight_map"]["model.norm.weight"]})
    held["weight_map"]["model.norm.weight"] = others[0]
    index.write_text(json.dumps(held))
    with pytest.raises(
        ValueError, match=f"index.json says that {others[0]} holds model.norm.weight, which it does not"
    ):
        load_ends(path)


@pytest.mark.parametrize("load", [load_target, load_ends])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"])
def test_weights_that_are_not_finite_are_refused(tmp_path, load, name):
    path = llama(tmp_path / "model")
    state = load_file(path / "model.safetensors")
    state[name].view(-1)[3] = float("nan")
    save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"NaN or Inf in 1 of its tensors .{name}"):
        load(path)


def cut_file(path: Path, end: int) -> None:
    path.write_bytes(path.read_bytes()[:end])


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


def test_code_of_a_directory_runs_only_when_asked(tmp_path):
    path = llama(tmp_path)
    (path / "own.py").write_text("raise SystemExit('ran')\n")
    edit_config(path, model_type="own", auto_map={"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M"})
    with pytest.raises(ValueError, match="custom code .* --trust-remote-code"):
        load_target(path)


def test_loading_opens_no_connection(tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *args: pytest.fail("a connection"))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: pytest.fail("a name was looked up"))
    load_target(llama(tmp_path))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError):
        load_target(tmp_path)


def test_documents_that_cannot_be_captured(tmp_path):
    target = load_target(llama(tmp_path))
    for bad in (torch.arange(0), torch.tensor([3, 50]), torch.tensor([-1]), torch.zeros(2, 2, dtype=torch.long)):
        with pytest.raises(ValueError, match=r"document 1 is .* in 0\.\.49"):
            target.capture([torch.arange(3), bad])
    nn.init.constant_(target.embed_tokens.weight[7], float("nan"))
    assert len(target.capture([torch.arange(3)])) == 1
    with pytest.raises(ValueError, match=r"documents \[0\] hold NaN"):
        target.capture([torch.arange(9)])
