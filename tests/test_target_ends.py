"""The ends of a target, its embedding, norm and head, read alone equal those of the whole model."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from draft_deepseek import Eagle3MLAConfig
from target.ends import load_ends
from target.tiny import byte_tokenizer
from tests.helpers import H, V, rewrite


def test_ends_equal_the_model_from_sharded_files(home, target, ends, states, raw_last):
    assert len(list(home.glob("*.safetensors"))) > 2
    for name in ("embed_tokens", "lm_head"):
        assert torch.equal(getattr(ends, name).weight, getattr(target, name).weight)
    for (_, last), raw in zip(states, raw_last, strict=True):
        torch.testing.assert_close(ends.norm(raw), last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ends.head(ends.norm(raw)), target.head(last), atol=1e-5, rtol=1e-5)
    for name in ("hidden_size", "vocab_size", "device", "dtype", "special_token_ids", "stop_token_ids"):
        assert getattr(ends, name) == getattr(target, name), name
    drafts = [Eagle3MLAConfig.from_any(x.config.to_dict()).to_dict() for x in (ends, target)]
    assert drafts[0] == drafts[1]  # a draft made from either is the same
    assert ends.norm(raw_last[0].bfloat16()).dtype == torch.bfloat16 and ends.head(last.bfloat16()).dtype == ends.dtype


@pytest.mark.parametrize("inner, outer", [("language_model.model.", "language_model.lm_head."), ("model.", None)])
def test_ends_of_nested_names_unknown_model_types_and_tied_embeddings(tmp_path, target, inner, outer):
    config = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 7, "rms_norm_eps": 1e-5, "mla_use_nope": True}
    nested = {
        "model_type": "kimi_k3",
        "text_config": config,
        "eos_token_id": [3, 4],
        "tie_word_embeddings": outer is None,
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    byte_tokenizer().save_pretrained(tmp_path)
    embed, head, norm = (
        x.data for x in (target.embed_tokens.weight, target.lm_head.weight, target.backbone.norm.weight)
    )
    tensors = {f"{inner}embed_tokens.weight": embed, f"{inner}norm.weight": norm}
    tensors |= {f"{inner}layers.7.embed_tokens.weight": -embed}  # as an MTP layer has it
    if outer:
        tensors[f"{outer}weight"] = head
    save_file(tensors, tmp_path / "model.safetensors")
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embed_tokens.weight, embed) and torch.equal(ends.lm_head.weight, head if outer else embed)
    assert (
        ends.stop_token_ids == [3, 4] and ends.config.mla_use_nope and set(range(256, 262)) < {*ends.special_token_ids}
    )
    x = torch.randn(5, H)
    expected = norm * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ends.norm(x), expected, atol=1e-6, rtol=1e-6)
    assert load_ends(tmp_path, dtype=torch.bfloat16).head(x).dtype == torch.bfloat16

    for change, said in (
        (lambda held: {k: x for k, x in held.items() if "norm" not in k}, f"lacks {inner}norm.weight"),
        (lambda held: held | {f"{inner}norm.weight": norm[:-1].clone()}, rf"norm.weight is .*\[{H - 1}\]"),
    ):
        rewrite(tmp_path / "model.safetensors", change)
        with pytest.raises(ValueError, match=said):
            load_ends(tmp_path)
        save_file(tensors, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(ValueError, match="model.safetensors cannot be used"):
        load_ends(tmp_path)
    with pytest.raises(ValueError, match="is no directory"):
        load_ends(tmp_path / "none")
