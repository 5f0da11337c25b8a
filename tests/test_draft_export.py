"""Claims about exports: what engines read, and what README's code does with the draft file."""

import pytest
import torch

from draft_deepseek import DeepseekV3Eagle3DraftModel, export_config, export_state, import_state
from tests.helpers import ROOT, TOY


@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": 32}, {"fc_norm": True, "norm_output": True}])
def test_export_import_export_is_identical_and_says_what_engines_read(changes):
    torch.manual_seed(0)
    config = TOY | {"draft_vocab_size": 20, "rope_theta": 1e4} | changes
    draft = DeepseekV3Eagle3DraftModel(config)
    if draft.config.draft_vocab_size == 20:
        draft.set_vocab_mapping(torch.arange(20) + 5)
    exported, state = export_config(draft), export_state(draft, torch.float32)
    assert exported["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and exported["model_type"] == "deepseek_v2"
    assert (
        exported["rope_theta"] == 1e4 and "rope_parameters" not in exported and exported["tie_word_embeddings"] is False
    )
    assert ("d2t" in state) == (draft.config.draft_vocab_size == 20) and not any(k.startswith("model.") for k in state)
    other = DeepseekV3Eagle3DraftModel(exported)
    published = {f"model.{k}".replace("layers.0.", "midlayer.") if "layers" in k else k: x for k, x in state.items()}
    import_state(other, published)
    again = export_state(other, torch.float32)
    assert again.keys() == state.keys() and all(torch.equal(again[k], state[k]) for k in state)
    assert export_config(other) == exported
    del published["fc.weight"]
    with pytest.raises(ValueError, match=r"missing \['model.fc.weight'\], unexpected \['model.odd'\]"):
        import_state(other, published | {"odd": torch.zeros(1)})


def test_the_readmes_code_runs():
    code = (ROOT / "README.md").read_text().split("```python\n")[1].split("```")[0]
    names = {}
    exec(code, names)
    assert names["loss"].isfinite() and names["draft"].lm_head.weight.grad.abs().sum() > 0
