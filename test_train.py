"""Claims about training and runs: what the loop does with batches, ranks, interruptions and bad input."""

import os
import random
from pathlib import Path

import pytest
import torch

import train
from data import Document, anchors_of, best_fit, draft_vocabulary, lay_out, pack
from draft_deepseek import DeepseekV3Eagle3DraftModel, TTTLoss, export_config, export_state, import_state
from test_decode import TOY, toy_batch, toy_draft

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent


# ------------------------------------------------------------------------------------------------------------- packing


def test_rows_hold_every_document_once_and_are_full():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(3000, generator=generator).mul(0.8).add(5.5).exp().clamp(8, 2048).int().tolist()
    rows = pack(lengths, 2048, random.Random(0))
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert rows == pack(lengths, 2048, random.Random(0)) != pack(lengths, 2048, random.Random(1))
    tokens = [sum(lengths[i] for i in row) for row in rows]
    assert max(tokens) <= 2048 and sum(tokens) >= 0.99 * 2048 * len(rows)
    assert best_fit([0, 1, 2], [6, 5, 4], 10) == [[0, 2], [1]]


def test_anchors_are_the_slots_within_reach_of_a_learned_token():
    mask = torch.zeros(20, dtype=torch.bool)
    mask[9:12] = True
    assert anchors_of(mask, 7) == 9  # slots 2..10
    assert anchors_of(mask, 1) == 3 and anchors_of(mask[:1], 7) == 0 and anchors_of(~mask[:2], 3) == 1


def test_draft_vocabulary_counts_learned_tokens_and_keeps_special_ones():
    documents = [Document(torch.tensor([1, 2, 2, 3, 5, 5]), torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.bool), "")]
    assert draft_vocabulary(documents, 3, [9], 12).tolist() == [2, 3, 9]
    assert draft_vocabulary(documents, 6, [9], 12).tolist() == [0, 1, 2, 3, 4, 9]  # too few: the lowest ids fill up
    for size in (0, -1, 13, 2.5, True):
        with pytest.raises(ValueError, match="draft-vocab"):
            draft_vocabulary(documents, size, [9], 12)


def test_a_row_without_documents_is_padding():
    out = lay_out([[]], 8, (torch.zeros(0, 12), torch.zeros(0, 4)))
    assert (out["document"] == -1).all() and not out["loss_mask"].any() and out["features"].shape == (1, 8, 12)


def test_nothing_supervised_moves_nothing():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu"))
    optimizer = train.make_optimizer(args, parameters)
    text = torch.randint(32, (1, 20))
    learned, empty = (
        toy_batch(draft, text, mask.expand_as(text)) for mask in (torch.ones(20).bool(), torch.zeros(20).bool())
    )
    loss = TTTLoss(draft)
    train.optimizer_step(args, train.Ranks(), loss, [learned], optimizer, parameters)  # momentum that could move them
    before = [p.clone() for p in parameters]
    line = train.optimizer_step(args, train.Ranks(), loss, [empty], optimizer, parameters)
    assert line["supervised"] == 0 and line["loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_the_lambda_loss_does_not_depend_on_how_rows_are_grouped():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu", loss="lambda", clip=1e9))
    text = torch.randint(32, (3, 20), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(20) < torch.tensor([[5], [12], [20]])
    whole, found = toy_batch(draft, text, masks), []
    for window in ([whole], [toy_batch(draft, text[i : i + 1], masks[i : i + 1]) for i in range(3)]):
        optimizer = train.make_optimizer(args, parameters)
        optimizer.step = lambda: found.append([p.grad.clone() for p in parameters])  # noqa: B023
        line = train.optimizer_step(args, train.Ranks(), TTTLoss(draft, loss="lambda"), window, optimizer, parameters)
        found[-1].append(torch.tensor(line["loss"]))
    for one, many in zip(*found, strict=True):
        assert (one - many).abs().max() <= 1e-5 * one.abs().max()


# ---------------------------------------------------------------------------------------------------- export and import


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
