"""Claims about training, decoding and runs: what the loop does with batches, ranks, interruptions and bad input."""

import os
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import train
from data import Document, anchors_of, best_fit, draft_vocabulary, lay_out, pack
from decode import Accepted, speculative_greedy, walk
from draft_deepseek import DeepseekV3Eagle3DraftModel, TTTLoss, build_rows, export_config, export_state, import_state
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from test_drafts import K3, SIZES

os.environ["HF_HUB_OFFLINE"] = "1"
ROOT = Path(__file__).parent
TOY = SIZES | {
    "vocab_size": 32,
    "draft_vocab_size": 32,
    "hidden_size": 32,
    "target_hidden_size": 32,
    "pad_token_id": None,
}


NEXT = torch.randperm(32, generator=torch.Generator().manual_seed(0))


class Toy:
    """A deterministic target: after token x comes NEXT[x]. Its last hidden state is the token, one-hot."""

    device = torch.device("cpu")

    def states(self, tokens):
        last = F.one_hot(tokens, 32).float()
        return torch.cat([last, last.roll(3, -1), last.roll(7, -1)], -1), last

    def head(self, hidden):
        return 9.0 * F.one_hot(NEXT[hidden.argmax(-1)], 32).float()

    def greedy(self, prompt, n):
        tokens = [prompt[-1]]
        for _ in range(n):
            tokens.append(NEXT[tokens[-1]])
        return torch.stack(tokens[1:])


def toy_rows(draft, text, loss_mask):
    """One row batch of token rows [B,T] that the toy target reads."""
    features, last = Toy().states(text)
    position = torch.arange(text.shape[1]).expand_as(text)
    return build_rows(draft.draft_ids, text, torch.zeros_like(text), position, features, loss_mask, last, Toy().head)


PROMPT = torch.tensor([5, 9, 2])


def toy_draft(kind, steps, overfit=False):
    """A draft trained for `steps` steps on the toy target's continuations of random prompts, or of PROMPT alone."""
    torch.manual_seed(0)
    draft = (DeepseekV3Eagle3DraftModel if kind == "deepseek" else KimiK3Eagle3DraftModel)(
        TOY | ({"rope_theta": 10000.0} if kind == "deepseek" else K3)
    )
    draft.freeze_embeddings()
    loss = TTTLoss(draft)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for i in range(steps):
        prompts = PROMPT[None] if overfit else torch.randint(32, (2, 3))
        text = torch.stack([torch.cat([p, Toy().greedy(p, 69)]) for p in prompts])
        value, _ = loss(toy_rows(draft, text, (torch.arange(72) >= 3).expand_as(text)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * (1 - i / steps) + 1e-4
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    return draft


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=["deepseek", "kimi"])
def toy(request):
    return {"half trained": toy_draft(request.param, 12), "overfit": toy_draft(request.param, 100, overfit=True)}


# ------------------------------------------------------------------------------------------------------------ decoding


def test_an_overfit_draft_has_every_drafted_token_accepted(toy):
    tokens, accepted = speculative_greedy(toy["overfit"], Toy(), PROMPT, 1 + 8 * 8, 7)
    assert torch.equal(tokens, Toy().greedy(PROMPT, 65))
    assert accepted == Accepted(64, 8)  # 7 of 7 drafted tokens and the target's own, every round


@pytest.mark.parametrize("k", [1, 3, 7])
def test_decoding_is_lossless_and_takes_the_rounds_that_the_walk_counts(toy, k):
    draft = toy["half trained"]  # some hits, some misses
    total, rounds = Accepted(0, 0), Accepted(0, 0)
    for prompt in torch.randint(32, (8, 3), generator=torch.Generator().manual_seed(k)):
        want = Toy().greedy(prompt, 48)
        tokens, accepted = speculative_greedy(draft, Toy(), prompt, 48, k)
        assert torch.equal(tokens, want)
        text = torch.cat([prompt, want])[None]
        rows = toy_rows(
            draft, text, (torch.arange(51) >= 3)[None] & (torch.arange(51) < 50)
        )  # 47 tokens after the first
        with torch.no_grad():
            _, metrics = TTTLoss(draft)(rows)
        walked = walk(rows, metrics, k)
        assert walked.rounds == accepted.rounds and accepted.tokens == 47
        total, rounds = total + accepted, rounds + walked
    assert 1.05 < total.length < k + 0.95  # neither all nor nothing, or the test would show little


def test_accept_lengths_are_pooled():
    assert (Accepted(10, 5) + Accepted(90, 30)).length == 100 / 35


# ------------------------------------------------------------------------------------------------------------- packing


def test_rows_hold_every_document_once_within_both_limits():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randn(3000, generator=generator).mul(0.8).add(5.5).exp().clamp(8, 2048).int().tolist()
    shares = torch.rand(3000, generator=generator).mul(0.6).add(0.1).tolist()
    sizes = [(n, max(1, int(n * share))) for n, share in zip(lengths, shares, strict=True)]
    rows = pack(sizes, 2048, 1024, train.random.Random(0))
    assert sorted(i for row in rows for i in row) == list(range(3000))
    assert rows == pack(sizes, 2048, 1024, train.random.Random(0)) != pack(sizes, 2048, 1024, train.random.Random(1))
    tokens, anchors = (sum(sizes[i][d] for row in rows for i in row) / len(rows) for d in (0, 1))
    for row in rows:
        wide = any(sizes[i][1] > 1024 for i in row)
        assert sum(sizes[i][0] for i in row) <= 2048 and sum(sizes[i][1] for i in row) <= (2048 if wide else 1024)
    assert tokens >= 0.95 * 2048 or anchors >= 0.9 * 1024
    assert best_fit([0, 1, 2], [(6, 1), (5, 1), (4, 1)], 10, 10) == [[0, 2], [1]]


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
        toy_rows(draft, text, mask.expand_as(text)) for mask in (torch.ones(20).bool(), torch.zeros(20).bool())
    )
    loss = TTTLoss(draft)
    train.optimizer_step(args, train.Ranks(), loss, [learned], optimizer, parameters)  # momentum that could move them
    before = [p.clone() for p in parameters]
    line = train.optimizer_step(args, train.Ranks(), loss, [empty], optimizer, parameters)
    assert line["supervised"] == 0 and line["loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


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
