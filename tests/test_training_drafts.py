"""Claims about the draft that a run starts from: its shape, vocabulary and weights, fresh or imported."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

import train
from draft_deepseek import DeepseekV3Eagle3DraftModel, Eagle3MLAConfig, export_config, export_state
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from training.drafts import (
    PRESETS,
    SIZES,
    draft_config,
    export,
    load_draft,
    make_draft,
    newest_checkpoint,
    save_checkpoint,
)
from training.ranks import Ranks
from training.settings import Settings, resolve
from training.sources import open_source


def settings(runs, **changes):
    return resolve(Settings(runs=str(runs), device="cpu", documents=30, row_tokens=512, **changes))


@pytest.fixture(scope="module")
def tiny(runs):
    """The built-in target and a few documents."""
    return open_source(settings(runs), Ranks())


@pytest.fixture(scope="module")
def trained(runs, tiny, tmp_path_factory):
    """A float32 export of a draft that has moved away from its start."""
    torch.manual_seed(1)
    draft = make_draft(settings(runs), tiny, 96)
    with torch.no_grad():
        for p in draft.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p) * 0.05)
    path = tmp_path_factory.mktemp("trained") / "draft"
    export(draft, path, "float32")
    return path


def rewritten(path, folder, rename=lambda name: name, drop=(), shards=1, **config):
    """A copy of an export in other names, with fewer tensors, in several files, with other keys in its config."""
    folder.mkdir()
    state = {rename(k): x for k, x in load_file(path / "model.safetensors").items() if k not in drop}
    for i in range(shards):
        save_file(dict(list(state.items())[i::shards]), folder / f"model-{i:05d}.safetensors")
    (folder / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text()) | config))
    return folder


def assert_same_weights(draft, path):
    want = load_file(path / "model.safetensors")
    got = export_state(draft, torch.float32)
    assert got.keys() == want.keys() and all(torch.equal(got[name], x) for name, x in want.items())


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"rename": lambda name: f"model.{name}"},
        {"rename": lambda name: name.replace("layers.0.", "midlayer.")},
        {"shards": 3},
        {"drop": ("embed_tokens.weight", "t2d")},
    ],
)
def test_a_draft_starts_from_another_in_every_published_form(runs, tiny, trained, tmp_path, how):
    start = rewritten(trained, tmp_path / "start", **how)
    draft = make_draft(settings(runs, init=str(start)), tiny, 96)
    assert_same_weights(draft, trained)
    assert not draft.model.embed_tokens.weight.requires_grad and draft.lm_head.weight.requires_grad
    assert export_config(draft) == json.loads((trained / "config.json").read_text()) | {"torch_dtype": "bfloat16"}


def test_a_bare_weight_file_takes_its_shape_from_the_target(runs, tiny, trained, tmp_path):
    save_file(load_file(trained / "model.safetensors"), tmp_path / "weights.safetensors")
    assert_same_weights(make_draft(settings(runs, init=str(tmp_path / "weights.safetensors")), tiny, 96), trained)


def test_training_from_an_export_goes_on_with_the_same_loss(runs):
    """The first step after an import has the loss that the run would have had if it had gone on."""
    common = ["--runs", str(runs), "--row-tokens", "256", "--device", "cpu", "--documents", "40", "--eval-rows", "1"]
    common += ["--decode-prompts", "0", "--export-dtype", "float32", "--lr", "1e-9"]  # so small that nothing moves
    train.main([*common, "--name", "first", "--steps", "2", "--lr", "2e-3"])
    train.main([*common, "--name", "still", "--steps", "2", "--init", str(runs / "first" / "draft")])
    train.main(
        [*common, "--name", "again", "--steps", "2", "--init", str(runs / "first" / "checkpoints/step-00000002")]
    )
    logs = [[json.loads(x) for x in (runs / n / "log.jsonl").read_text().splitlines()] for n in ("still", "again")]
    assert [x["loss"] for x in logs[0]] == [x["loss"] for x in logs[1]]
    first, still = (json.loads((runs / n / "result.json").read_text()) for n in ("first", "still"))
    assert abs(first["simulated"] - still["simulated"]) < 1e-6 and first["walked"] == still["walked"]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"drop": ("fc.weight",)}, "missing .'model.fc.weight'."),
        ({"drop": ("d2t",)}, "lacks d2t"),
        ({"rope_theta": 5e6}, "--init rotates by .*5000000.* its target by"),
        ({"rope_scaling": None}, "--init rotates by"),
        ({"vocab_size": 300}, "300 tokens"),
        ({"num_hidden_layers": 7}, "7 layers"),
        ({"intermediate_size": 99}, "misshaped"),
    ],
)
def test_what_does_not_fit_is_named(runs, tiny, trained, tmp_path, how, said):
    start = rewritten(trained, tmp_path / "start", **how)
    with pytest.raises(ValueError, match=said):
        make_draft(settings(runs, init=str(start)), tiny, 96)


def test_a_damaged_weight_file_is_named(runs, tiny, trained, tmp_path):
    start = rewritten(trained, tmp_path / "start")
    file = start / "model-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    for load in (load_draft, lambda path: make_draft(settings(runs, init=str(path)), tiny, 96)):
        with pytest.raises(ValueError, match="model-00000.safetensors cannot be used"):
            load(start)


# ------------------------------------------------------------------------------ of which kind, trained on which layers


@pytest.fixture(scope="module")
def nope(runs, tmp_path_factory):
    """An export of a draft without RoPE, and its target."""
    source = open_source(settings(runs, target="kimi-k3"), Ranks())
    path = tmp_path_factory.mktemp("nope") / "draft"
    export(make_draft(settings(runs, target="kimi-k3"), source, 96), path, "float32")
    return path, source


def test_a_draft_of_the_other_kind_is_refused_by_what_it_is(runs, tiny, trained, nope):
    without, k3 = nope
    for start, target, source, draft, hint in (
        (without, "deepseek-v3", tiny, "auto", "--draft kimi-k3"),
        (without, "deepseek-v3", tiny, "deepseek", "--draft kimi-k3"),
        (without, "kimi-k3", k3, "deepseek", "--draft kimi-k3"),
        (trained, "kimi-k3", k3, "auto", "--draft deepseek"),
    ):
        given = settings(runs, init=str(start), target=target, draft=draft)
        with pytest.raises(ValueError, match=f"^--init has .*(RoPE|none).*{hint}") as error:
            make_draft(given, source, 96)
        assert "\n" not in str(error.value) and "missing" not in str(error.value)
    served = make_draft(settings(runs, init=str(trained), target="kimi-k3", draft="deepseek"), k3, 96)
    assert type(served) is DeepseekV3Eagle3DraftModel
    assert type(make_draft(settings(runs, init=str(without), target="kimi-k3"), k3, 96)) is KimiK3Eagle3DraftModel
    fresh = make_draft(settings(runs, draft="kimi-k3"), tiny, 96)  # without RoPE for a target that has it
    assert type(fresh) is KimiK3Eagle3DraftModel and fresh.config.rope_parameters is None


def test_drafts_are_told_apart_by_mla_use_nope(nope, trained, tmp_path):
    without, _ = nope
    config = json.loads((without / "config.json").read_text())
    assert config["mla_use_nope"] is True and config["model_type"] == "deepseek_v2" and "rope_theta" not in config
    assert config["architectures"] == ["Eagle3KimiK3ForCausalLM"] and config["hidden_act"] == "situ"
    for i, changes in enumerate(
        ({"mla_use_nope": None, "model_type": "kimi_k3"}, {"model_type": "kimi_k3"}, {})
    ):  # all ages
        assert type(load_draft(rewritten(without, tmp_path / str(i), **changes))) is KimiK3Eagle3DraftModel
    assert type(load_draft(rewritten(trained, tmp_path / "r", mla_use_nope=False))) is DeepseekV3Eagle3DraftModel
    for kind in (config, KimiK3Eagle3DraftModel.config_class.from_any(config)):
        with pytest.raises(ValueError, match="mla_use_nope is true"):
            DeepseekV3Eagle3DraftModel(kind)
    with pytest.raises(ValueError, match="mla_use_nope is true"):
        Eagle3MLAConfig(**{key: config[key] for key in Eagle3MLAConfig.required_keys()}, mla_use_nope=True)


@pytest.mark.parametrize(
    ("ids", "fits"), [([2, 3, 4], True), (None, True), ([2, 5, 6], False), ([1, 2, 3], True), ([1, 2, 4], False)]
)
def test_a_draft_starts_on_the_layers_that_it_was_trained_on(runs, tiny, trained, tmp_path, ids, fits):
    """The data has 1, 2, 3 by output. Ids that begin with 1 may be meant so, others are by input."""
    for name, config in (("top", {"eagle_aux_hidden_state_layer_ids": ids}), ("nested", {})):
        nested = None if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
        given = settings(runs, init=str(rewritten(trained, tmp_path / name, eagle_config=nested, **config)))
        if fits:
            assert make_draft(given, tiny, 96).config.eagle_aux_hidden_state_layer_ids is None
        else:
            with pytest.raises(ValueError, match=rf"layers \[{', '.join(map(str, ids))}\].* data has \[2, 3, 4\]"):
                make_draft(given, tiny, 96)
    other = tiny._replace(aux_layers=(0, 2, 5))
    with pytest.raises(ValueError, match=r"layers \[2, 3, 4\] \(the default\).* data has \[1, 3, 6\]"):
        make_draft(settings(runs, init=str(trained)), other, 96)


# -------------------------------------------------------------------------------------------- files that cannot be used

WRONG = {key: ("64", 6.5, -1, 0, True, [64], 10**12) for key in ("hidden_size", "vocab_size")}
WRONG |= {key: ("4", -4, 0, 2.0, [4], 10**12) for key in SIZES}
WRONG |= {"num_hidden_layers": ("x", 0, -1), "rms_norm_eps": ("x", -1.0, float("nan"), True)}
WRONG |= {"pad_token_id": (262, -1, 2**40, "x", 1.5), "eos_token_id": ("x", [1, "y"], {}), "bos_token_id": ([1], 0.5)}
WRONG |= {"rope_theta": ("x", -1.0, 0, 1, float("inf")), "rope_scaling": ([1], "yarn", {"type": 7}, {"factor": "x"})}
WRONG |= {key: ("yes", 1, []) for key in ("mla_use_nope", "fc_norm", "norm_output", "tie_word_embeddings")}
WRONG |= {"eagle_aux_hidden_state_layer_ids": (3, "2", ["a"], [1.0], {}), "eagle_config": (3, [1])}
WRONG |= {"text_config": (3, [1])}


def test_no_value_in_a_drafts_config_is_a_traceback(runs, tiny, trained, tmp_path):
    start = rewritten(trained, tmp_path / "start")
    good = json.loads((start / "config.json").read_text())
    for key, values in WRONG.items():
        for value in values:
            (start / "config.json").write_text(json.dumps(good | {key: value}))
            for load in (load_draft, lambda path: make_draft(settings(runs, init=str(path)), tiny, 96)):
                with pytest.raises(ValueError) as error:
                    load(start)
                assert "\n" not in str(error.value), (key, value)
    for key, size in (("intermediate_size", 2**31), ("v_head_dim", 10**6), ("max_position_embeddings", 2**31)):
        (start / "config.json").write_text(json.dumps(good | {key: size}))
        if key.startswith("max"):
            load_draft(start)
            continue
        with pytest.raises(ValueError, match="config.json says .* weights, .* are there"):
            load_draft(start)
    for text in ("", "[]", "{", "null", '{"hidden_size"', "\x00\x01"):
        (start / "config.json").write_text(text)
        with pytest.raises(ValueError, match="config.json"):
            load_draft(start)


def test_a_drafts_index_is_held_to_its_files(runs, trained, tmp_path):
    start = rewritten(trained, tmp_path / "start", shards=2)
    names = {k: f"model-{i % 2:05d}.safetensors" for i, k in enumerate(load_file(trained / "model.safetensors"))}
    index = start / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    (start / "other.safetensors").write_bytes(b"not of this draft")
    assert_same_weights(load_draft(start), trained)
    for wrong in ("x.safetensors", "../start/model-00000.safetensors", 3, None, "/etc/passwd", "config.json"):
        index.write_text(json.dumps({"weight_map": names | {"fc.weight": wrong}}))
        with pytest.raises(ValueError, match="model.safetensors.index.json cannot be used"):
            load_draft(start)
    for text in ("", "[]", "{}", '{"weight_map": []}', '{"weight_map": 3}'):
        index.write_text(text)
        with pytest.raises(ValueError, match="model.safetensors.index.json cannot be used"):
            load_draft(start)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_every_reader_and_writer(runs, tiny, trained, tmp_path, value):
    start = rewritten(trained, tmp_path / "start")
    state = load_file(start / "model-00000.safetensors")
    state["layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(state, start / "model-00000.safetensors")
    for load in (load_draft, lambda path: make_draft(settings(runs, init=str(path)), tiny, 96)):
        with pytest.raises(ValueError, match="NaN or Inf in 1 of its tensors .layers.0.mlp.up_proj.weight"):
            load(start)
    draft = load_draft(trained)
    draft.lm_head.weight.data[0, 0] = value
    optimizer = torch.optim.AdamW(draft.parameters())
    (tmp_path / "run").mkdir()
    with pytest.raises(ValueError, match="NaN or Inf in 1 of its tensors .lm_head.weight"):
        export(draft, tmp_path / "out", "bfloat16")
    with pytest.raises(ValueError, match="step-00000004 cannot be used .NaN or Inf in 1 .*lm_head.weight"):
        save_checkpoint(tmp_path / "run", draft, optimizer, 4, 4, 1)
    assert not list((tmp_path / "run").iterdir()) and not (tmp_path / "out").exists()


def real(preset, **config):
    """A source of the sizes of a real target, its tensors on the meta device."""
    config = PRESETS[preset] | config
    names = dict(config=config, hidden_size=7168, vocab_size=config["vocab_size"], is_tiny=False)
    n = config["num_hidden_layers"]
    return SimpleNamespace(**names, aux_layers=(1, n // 2 - 1, n - 4), draft_ids=None)


@pytest.mark.parametrize(
    ("preset", "scale", "heads"),
    [("deepseek-v3", 0.1352338, 128), ("kimi-k2", 192**-0.5 * 1.8133, 64), ("kimi-k2.5", 0.1446796, 64)],
)
def test_presets_have_the_published_shapes_and_scales(preset, scale, heads):
    config = draft_config(Settings(target=preset), real(preset), None)
    with torch.device("meta"):
        draft = DeepseekV3Eagle3DraftModel(config | {"draft_vocab_size": 32000})
    attention = draft.model.layers[0].self_attn
    assert abs(attention.scaling - scale) < 1e-5 and attention.q_b_proj.weight.shape == (heads * 192, 1536)
    assert draft.model.fc.weight.shape == (7168, 3 * 7168) and draft.config.eagle_aux_hidden_state_layer_ids is None


def test_a_preset_says_what_a_targets_config_does_not():
    k3 = real("kimi-k3", max_position_embeddings=None, intermediate_size=99)
    config = draft_config(Settings(target="kimi-k3"), k3, None)
    assert config["max_position_embeddings"] == 1048576 and config["intermediate_size"] == 99


def test_a_kimi_k3_target_has_two_kinds_of_drafts():
    with torch.device("meta"):
        k3 = KimiK3Eagle3DraftModel(draft_config(Settings(target="kimi-k3"), real("kimi-k3"), None))
        served = Settings(target="kimi-k3", draft="deepseek")
        served = DeepseekV3Eagle3DraftModel(draft_config(served, real("kimi-k3"), None))
    assert k3.model.layers[0].self_attn.g_proj.weight.shape == (96 * 128, 2 * 7168)
    assert served.model.layers[0].self_attn.o_proj.weight.shape == (7168, 64 * 128)
    assert served.model.layers[0].mlp.up_proj.weight.shape == (18432, 7168)
    exported = export_config(served)
    assert (
        exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and exported["max_position_embeddings"] == 1048576
    )
    assert exported["rope_theta"] == 5e4 and "mla_use_nope" not in exported


def test_a_draft_for_engines_trains_on_the_tiny_kimi_k3(runs):
    common = ["--runs", str(runs), "--row-tokens", "256", "--device", "cpu", "--documents", "40", "--eval-rows", "1"]
    common += ["--decode-prompts", "0"]
    train.main([*common, "--name", "served", "--target", "kimi-k3", "--draft", "deepseek", "--steps", "2"])
    config = json.loads((runs / "served" / "draft" / "config.json").read_text())
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and config["num_attention_heads"] == 4


def test_without_q_lora_a_draft_trains_and_its_export_says_what_engines_lack(runs, tiny, tmp_path):
    config = tiny.config | {"q_lora_rank": None}
    target = SimpleNamespace(config=SimpleNamespace(to_dict=lambda: config), lm_head=tiny.lm_head, special_token_ids=[])
    source = tiny._replace(target=target)
    assert make_draft(settings(runs), source, 96).config.q_lora_rank == 128  # the hidden size, under 1536
    draft = make_draft(settings(runs, q_lora_rank=0), source, 96)
    assert draft.model.layers[0].self_attn.q_proj.weight.requires_grad
    optimizer = torch.optim.AdamW(draft.parameters())
    save_checkpoint(tmp_path, draft, optimizer, 1, 1, 1)
    held = newest_checkpoint(tmp_path)
    assert make_draft(settings(runs), source, 96, held).config.q_lora_rank is None
    with pytest.raises(ValueError, match="q_lora_rank"):
        export(draft, tmp_path / "out", "float32")
    assert not (tmp_path / "out").exists()
