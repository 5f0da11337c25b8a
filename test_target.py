"""The frozen target, the built-in tiny targets and their corpus."""

import ast
import hashlib
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

import data
import target as target_module
from conversations import answered
from data import python_documents
from ends import load_ends
from target import PAD, Target, byte_tokenizer, default_aux_layers, load_target, orthogonalise, tiny_target

PRESETS = ["deepseek-v3", "kimi-k3"]


@pytest.fixture
def tiny(tiny_targets):
    return tiny_targets


@pytest.fixture(scope="session")
def held_out(tiny_targets):
    tokenizer = load_target(tiny_targets["deepseek-v3"]).tokenizer
    return answered(tokenizer, python_documents(held_out=True)[:12])


def next_logits(target, tokens):
    return target.head(target.states(tokens[None])[1][0])


def llama(folder: Path, layers=7, **changes) -> Path:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=layers, **sizes | changes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


# ------------------------------------------------------------------------------------------------------------- capture


@pytest.mark.parametrize("preset", PRESETS)
def test_capture_equals_the_models_own_states_one_document_at_a_time(tiny, held_out, preset):
    target = load_target(tiny[preset])
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
def test_greedy_with_a_cache_equals_greedy_without(tiny, held_out, preset):
    target = load_target(tiny[preset])
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


# -------------------------------------------------------------------------------------------------------- tiny targets


def test_the_tiny_deepseek_is_what_engines_serve(tiny):
    config = json.loads((tiny["deepseek-v3"] / "config.json").read_text())
    expected = {"model_type": "deepseek_v3", "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
    assert config | expected | {"num_nextn_predict_layers": 0} == config
    assert config["rope_parameters"]["rope_type"] == "yarn" and config["rope_parameters"]["factor"] == 40
    target = load_target(tiny["deepseek-v3"])
    assert type(target.model) is transformers.DeepseekV3ForCausalLM and len(target.layers) >= 7
    assert target.aux_layers == default_aux_layers(len(target.layers))
    kinds = {type(layer.mlp).__name__ for layer in target.layers}
    assert kinds == {"DeepseekV3MLP", "DeepseekV3MoE"}
    assert target.special_token_ids == list(range(256, 262)) and target.eos_token_id == 258


def test_the_tiny_kimi_has_gates_and_no_positions(tiny, held_out):
    target = load_target(tiny["kimi-k3"])
    for layer in target.layers:
        layer.self_attn.g_proj.weight.data.zero_()
    gated = next_logits(target, held_out[0].tokens)
    for layer in target.layers:  # a sigmoid of 0 is a half, so halving every output by hand is the same
        layer.self_attn.output = lambda o, gate, attn=layer.self_attn: attn.o_proj(o.transpose(1, 2).flatten(2)) / 2
    torch.testing.assert_close(next_logits(target, held_out[0].tokens), gated)
    one_token = torch.full((9,), 65)  # without positions and with equal tokens, every slot sees the same
    states = target.capture([one_token])[0][1]
    torch.testing.assert_close(states, states[:1].expand_as(states), atol=1e-4, rtol=1e-4)


def test_a_tiny_target_is_made_once_and_alike(tiny, tmp_path, monkeypatch):
    again = tiny_target("deepseek-v3", tmp_path / "again", progress=False, steps=3)
    first, second = (load_target(path).model.state_dict() for path in (tiny["deepseek-v3"], again))
    assert all(torch.equal(first[name], second[name]) for name in first)
    monkeypatch.setattr(target_module, "train_tiny", lambda *args: pytest.fail("trained again"))
    assert tiny_target("deepseek-v3", again, steps=3) == again
    with pytest.raises(ValueError, match="holds built-in target .* 'steps': 3.* wanted is .* 'steps': 4"):
        tiny_target("deepseek-v3", again, steps=4)
    with pytest.raises(ValueError, match="holds built-in target"):
        tiny_target("kimi-k3", again, steps=3)


def test_a_killed_making_leaves_nothing_and_nothing_foreign_is_overwritten(tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(target_module, "train_tiny", lambda *args: {})
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


# ------------------------------------------------------------------------------------------------- tokenizer and corpus


def test_every_text_survives_the_byte_tokenizer(tiny):
    text = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x10400), 0x1F600, 0x10FFFF]))
    loaded = load_target(tiny["kimi-k3"]).tokenizer
    for tokenizer in (byte_tokenizer(), loaded):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert ids == list(text.encode()) and tokenizer.decode(ids) == text
        assert tokenizer.pad_token_id == PAD and "{% generation %}" not in tokenizer.chat_template


def test_the_mask_covers_exactly_the_answer_and_its_end_of_turn(tiny):
    tokenizer = load_target(tiny["deepseek-v3"]).tokenizer
    prompt, answer = "def f(x):\n    'é'\n", "    return x  # ü\n"
    (d,) = answered(tokenizer, [(prompt, answer)])
    learned = [*answer.encode(), 261]
    assert d.tokens.tolist() == [257, 259, *prompt.encode(), 260, *learned]
    assert d.loss_mask.tolist() == [False] * (3 + len(prompt.encode())) + [True] * len(learned)
    tokenizer.chat_template = "{% for m in messages %}{{ loop.length }}{{ m.content }}{% endfor %}"  # rewrites history
    with pytest.raises(ValueError, match="renders the prompt"):
        answered(tokenizer, [(prompt, answer)])


def test_corpus_is_deterministic_bounded_and_split_by_file():
    held_out = python_documents(held_out=True)
    assert held_out == python_documents(held_out=True) != python_documents(held_out=True, seed=1)
    assert sorted(held_out) == sorted(python_documents(held_out=True, seed=1)) and len(set(held_out)) == len(held_out)
    assert len(held_out) > 200
    for prompt, answer in held_out:
        assert 160 <= len((prompt + answer).encode()) <= 768 and len(answer.encode()) >= 64
        assert 3 * len(prompt.encode()) >= len((prompt + answer).encode())
    assert not set(held_out) & set(python_documents(held_out=False))
    for name in ("json/decoder.py", "test/test_ast.py", "heapq.py", "unittest/test_x.py", "test/support/x.py"):
        assert data.is_held_out(Path(name)) == (hashlib.sha256(name.encode()).digest()[0] % 12 == 0)
        assert data.is_test_file(Path(name)) == ("test/" in name or "test_" in name)


def test_cutting_a_file(tmp_path):
    body = "".join(f"    value_{i} = {i} * argument  # ümlaut\n" for i in range(8))
    source = f"@decorated\n@twice\ndef f(argument):\n    '''Documented.'''\n\x0c\n{body}\n\nclass A:\n    x = 1\n"
    source += "".join(f"\n    def method_{i}(self, argument):\n" + body.replace("    v", "        v") for i in range(3))
    path = tmp_path / "module.py"
    path.write_text(source)
    (prompt, answer), *methods = data.cut_into_documents(path)  # the class is too long for one document
    assert prompt.startswith("@decorated\n@twice\ndef f(argument):\n    '''Documented.'''\n")
    assert answer.endswith(" = 7 * argument  # ümlaut\n") and ast.parse(prompt + answer)
    assert [p.split("(")[0] for p, _ in methods] == ["def method_0", "def method_1", "def method_2"]
    for bad in (b"def f(:\n", b"\xff\xfe", b"x = '\x00'\n"):
        path.write_bytes(bad)
        assert data.cut_into_documents(path) == []
