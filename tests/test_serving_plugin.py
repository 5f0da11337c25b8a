"""Claims about the vLLM plug-in that need no vLLM: what is installed, what it imports, what it says to another vLLM."""

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from draft_deepseek import export_config
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from test_drafts import config_of

PLUGIN = Path(__file__).parent.parent / "serving/kimi_k3_vllm"
NAME = "serving.kimi_k3_vllm"


def test_the_wheel_holds_the_plug_in_alone(tmp_path):
    pytest.importorskip("setuptools", "70.1", reason="makes wheels on its own")
    source = shutil.copytree(PLUGIN, tmp_path / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", "import setuptools.build_meta as b; b.build_wheel('..')"]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
        (entry_points,) = (file.read(name).decode() for name in file.namelist() if name.endswith("entry_points.txt"))
    assert names == {"eagle3_kimi_k3_vllm/__init__.py", "eagle3_kimi_k3_vllm/model.py"}
    assert entry_points.split() == ["[vllm.general_plugins]", "eagle3_kimi_k3", "=", "eagle3_kimi_k3_vllm:register"]


def fake(monkeypatch, **modules: dict) -> None:
    """Modules of a vLLM that holds these names (dots written as __)."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    for name, holds in modules.items():
        parts = ("vllm." + name.replace("__", ".")).split(".")
        for end in range(2, len(parts) + 1):
            path = ".".join(parts[:end])
            monkeypatch.setitem(sys.modules, path, sys.modules.get(path) or ModuleType(path))
        vars(sys.modules[path]).update(holds)


def test_registering_imports_no_model(monkeypatch):
    known = {}
    fake(monkeypatch)
    sys.modules["vllm"].ModelRegistry = SimpleNamespace(register_model=known.__setitem__)
    plugin = importlib.import_module(NAME)
    monkeypatch.delitem(sys.modules, f"{NAME}.model", raising=False)
    plugin.register()
    assert known == {"Eagle3KimiK3ForCausalLM": f"{NAME}.model:Eagle3KimiK3ForCausalLM"}
    assert f"{NAME}.model" not in sys.modules
    draft = KimiK3Eagle3DraftModel(config_of("kimi"))
    draft.set_vocab_mapping(torch.arange(draft.config.draft_vocab_size))
    assert export_config(draft)["architectures"] == [*known]


class Attention(nn.Module):
    """As much of vLLM's as the plug-in exchanges."""

    def __init__(self, hooks):
        super().__init__()
        self.rotary_emb, self.mla_attn = nn.Linear(1, 1), nn.Module()
        self.mla_attn.prefix = "model.layers.7.self_attn"
        for name, module in zip(hooks, (self.rotary_emb, None), strict=False):
            setattr(self.mla_attn, name, module)


def parts(hooks, seen) -> dict[str, dict]:
    """A vLLM whose attention has these hooks; what its draft is built from goes into `seen`."""

    class Draft(nn.Module):
        def __init__(self, *, vllm_config, prefix):
            super().__init__()
            seen.update(vars(vllm_config.speculative_config.draft_model_config.hf_config))
            layer = nn.ModuleDict({"self_attn": Attention(hooks), "mlp": nn.Module()})
            self.model = nn.Module()
            self.model.layers = nn.ModuleList([SimpleLayer(layer)])

    class SimpleLayer(nn.Module):
        def __init__(self, children):
            super().__init__()
            self.self_attn, self.mlp = children["self_attn"], children["mlp"]

    def column(inputs, outputs, bias, quant_config, prefix):
        assert not bias and quant_config == "quantised" and prefix == "model.layers.7.self_attn.g_proj"
        return nn.Linear(inputs, outputs, bias=False)

    return {
        "model_executor__layers__activation": {"SituAndMul": lambda beta, linear: seen.update(situ=(beta, linear))},
        "model_executor__layers__linear": {"ColumnParallelLinear": column},
        "model_executor__models__deepseek_eagle3": {"Eagle3DeepseekV2ForCausalLM": Draft},
        "model_executor__models__utils": {"get_draft_quant_config": lambda config: "quantised"},
    }


def served(monkeypatch, hooks, seen, **changes):
    fake(monkeypatch, **parts(hooks, seen))
    monkeypatch.delitem(sys.modules, f"{NAME}.model", raising=False)
    model = importlib.import_module(f"{NAME}.model")
    monkeypatch.delitem(sys.modules, f"{NAME}.model")
    draft = KimiK3Eagle3DraftModel(config_of("kimi"))
    draft.set_vocab_mapping(torch.arange(draft.config.draft_vocab_size))
    config = SimpleNamespace(**export_config(draft) | changes)
    inner = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    return draft, config, model.Eagle3KimiK3ForCausalLM(vllm_config=SimpleNamespace(speculative_config=inner))


def test_the_three_parts_are_exchanged(monkeypatch):
    seen = {}
    draft, config, built = served(monkeypatch, ("rotary_emb", "g_proj"), seen, activation_situ_linear_beta=None)
    assert seen["hidden_act"] == "silu" and seen["max_position_embeddings"] == 1  # no rope table of a million positions
    assert config.hidden_act == "situ" and config.max_position_embeddings == draft.config.max_position_embeddings
    attention, mine = built.model.layers[0].self_attn, draft.model.layers[0].self_attn
    assert attention.rotary_emb is None and attention.mla_attn.rotary_emb is None
    assert attention.g_proj is attention.mla_attn.g_proj and attention.g_proj.weight.shape == mine.g_proj.weight.shape
    assert seen["situ"] == (draft.config.activation_situ_beta, None)
    _, _, ungated = served(monkeypatch, ("rotary_emb", "g_proj"), seen, mla_use_output_gate=False)
    assert not hasattr(ungated.model.layers[0].self_attn, "g_proj")


@pytest.mark.parametrize("lost", ["situ", "rotary_emb", "g_proj"])
def test_a_vllm_that_lacks_a_hook_is_refused_by_one_line(monkeypatch, lost):
    hooks = tuple(name for name in ("rotary_emb", "g_proj") if name != lost)
    there = parts(hooks, {})
    if lost == "situ":
        del there["model_executor__layers__activation"]["SituAndMul"]
    monkeypatch.setattr(f"{__name__}.parts", lambda *_: there)
    with pytest.raises(
        (ImportError, RuntimeError), match="needs vLLM 0.32 or one like it; this one cannot .*"
    ) as error:
        served(monkeypatch, hooks, {})
    assert "\n" not in str(error.value)
    assert {"situ": "SituAndMul"}.get(lost, lost) in str(error.value)
