"""Claims about evaluation: its numbers are those of all slots in float64, and what is decoded is what a user gets."""

from types import SimpleNamespace

import pytest
import torch

from data.documents import Document
from draft_deepseek import TTTLoss
from serving.decode import Accepted, speculative, unique_bigrams, walk_by_bucket
from serving.slots import Judged, walk_sampled
from test_drafts import make_batch, make_chunks, make_draft, oracle_masks
from tests.helpers import attention_target, small_draft
from tests.test_serving_slots import oracle_judged
from training import evaluation
from training.evaluation import decode_for_real, evaluate
from training.ranks import Ranks
from training.settings import Settings, resolve


def evaluated(draft, batches, steps, chunk=9):
    args = resolve(Settings(device="cpu", ttt_steps=steps))
    rows = [make_chunks(draft, batch, steps=steps, chunk=chunk) for batch in batches]
    return evaluate(args, Ranks(), TTTLoss(draft), SimpleNamespace(some=lambda count, ranks: iter(rows)))


def flat_batch(layout, seed, start=0):
    """Whose target is as unsure as the draft, and whose text is half of what a draft can say."""
    batch, own = make_batch(layout, seed, share=0.8, start=start), make_draft("deepseek")[0].draft_ids
    some = torch.rand(batch["tokens"].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    head, batch["tokens"] = batch["head"], torch.where(some, own[batch["tokens"] % 16], batch["tokens"])
    return batch | {"target_logits": 0.2 * batch["target_logits"], "head": lambda last: 0.2 * head(last)}


def simulated(valid, score):
    """1 + sum over s of the mean, over slots valid up to s, of the product of their scores up to s."""
    total = 1.0
    for s in range(len(valid)):
        slots = valid[: s + 1].all(0)
        total += float(score[: s + 1].double().prod(0)[slots].mean())
    return total


def test_simulated_and_walked_numbers_are_those_of_all_slots():
    draft, cfg = make_draft("deepseek")
    batches = [flat_batch([[20, 30]], 0), flat_batch([[26, -4, 20]], 1, start=2000), flat_batch([[50]], 2, start=2030)]
    got, ids = evaluated(draft, batches, 3), draft.draft_ids
    judged = Judged(*map(torch.cat, zip(*(oracle_judged(draft, cfg, x, 3) for x in batches), strict=True), [1] * 4))
    valid = torch.cat([oracle_masks(x, ids, 3)[0] for x in batches], 1)
    position = torch.cat([x["position"] for x in batches])
    rows = SimpleNamespace(anchors=torch.arange(50).expand(3, -1), position=position, valid=valid)
    assert got["simulated"] == pytest.approx(simulated(valid, judged.hit))
    assert got["sampled_simulated"] == pytest.approx(simulated(valid, judged.overlap), rel=1e-5)
    greedy, sampled = walk_by_bucket(rows, judged), walk_sampled(rows, judged)
    assert set(got["by_position"]) == {"0-2K", "2-8K"} == {name for name, x in sampled.items() if x.rounds}
    assert got["walked"] == sum(greedy.values(), Accepted(0, 0)).length
    assert got["sampled_walked"] == pytest.approx(sum(sampled.values(), Accepted(0, 0)).length, rel=1e-5)
    for name, x in got["by_position"].items():
        inside = valid & (position < 2048 if name == "0-2K" else position >= 2048)
        assert x["slots"] == inside[0].sum() and x["simulated"] == pytest.approx(simulated(inside, judged.hit))
        assert x["sampled_simulated"] == pytest.approx(simulated(inside, judged.overlap), rel=1e-5)
        assert (x["walked"], x["sampled_walked"]) == pytest.approx(
            (greedy[name].length, sampled[name].length), rel=1e-5
        )
    said = [(x["target_logits"].argmax(-1)[:, :-1] == x["tokens"][:, 1:]) for x in batches]
    known = torch.cat([judged.known[0, i, :-2] for i in range(3)])  # slot t feeds token t + 1
    right = torch.cat([x[0, 1:] for x in said])
    assert got["on_policy"] == pytest.approx(float(right[known].float().mean()))
    assert got["accuracy"][0] == pytest.approx(float(judged.hit[0].sum() / supervised_of(batches, ids)))


def supervised_of(batches, ids):
    return sum(oracle_masks(x, ids, 1)[1].sum() for x in batches)


def test_a_teacher_over_the_draft_ids_alone_gives_no_sampled_numbers():
    draft, _ = make_draft("deepseek")
    batch = flat_batch([[50]], 0)
    whole = evaluated(draft, [batch], 3)
    batch["last_hidden"], batch["head"] = batch["target_logits"], lambda last: last
    got = evaluated(draft, [batch], 3)
    assert whole.keys() - got.keys() == {"sampled_simulated", "sampled_walked"}
    assert got["simulated"] == whole["simulated"] and got["walked"] == whole["walked"]


@pytest.mark.parametrize("data", [None, ["chats.jsonl"]])
def test_what_is_decoded_is_sampled_behind_every_prompt_and_greedy_behind_a_quarter(data, monkeypatch):
    target, draft, gen = attention_target(), small_draft(), torch.Generator().manual_seed(0)
    asked, texts = [], []
    documents = [Document(torch.randint(12, (n,), generator=gen), torch.arange(n) >= 4, str(n)) for n in range(8, 17)]
    documents.append(Document(torch.arange(1), torch.ones(1).bool(), "nothing before its answer"))

    def recorded(drafter, target, prompts, n, seed):
        asked.append((drafter.temperature, [tuple(prompt.tolist()) for prompt in prompts]))
        decoded = speculative(drafter, target, prompts, n, seed=seed)
        texts.append([one.tokens.tolist() for one in decoded])
        return decoded

    monkeypatch.setattr(evaluation, "speculative", recorded)
    args = resolve(Settings(device="cpu", ttt_steps=3, decode_tokens=20, data=data))
    got = decode_for_real(args, SimpleNamespace(target=target, held_out=documents), draft)
    cuts = [(4 + n) // 2 if data is None else 4 for n in range(8, 17)]
    prompts = [tuple(d.tokens[:cut].tolist()) for d, cut in zip(documents, cuts, strict=False)]
    assert asked == [(1.0, prompts), (0.0, prompts[:3])]  # nine, of ascending length
    assert (got["prompts"], got["greedy_prompts"], got["identical"]) == (9, 3, 3)
    assert got["decoded"] == 9 * 19 / got["rounds"] and got["greedy_decoded"] == 3 * 19 / got["greedy_rounds"]
    assert texts[1] == [target.greedy(torch.tensor(prompt), 20).tolist() for prompt in prompts[:3]]
    assert [got["bigrams"], got["greedy_bigrams"]] == list(map(unique_bigrams, texts))
    own = [d.tokens[cut:][:20].tolist() for d, cut in zip(documents, cuts, strict=False)]
    assert got["held_out_bigrams"] == unique_bigrams(own)


def test_without_a_target_that_runs_nothing_is_decoded():
    got = decode_for_real(resolve(Settings(device="cpu")), SimpleNamespace(target=None, held_out=[]), small_draft())
    assert got["prompts"] == got["greedy_prompts"] == got["identical"] == got["rounds"] == 0
