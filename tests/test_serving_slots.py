"""Claims about what sampling accepts: slots are judged as a dense float64 oracle does, and the walk takes the rounds of
the sampler, enumerated for a chain of three tokens and really sampled from two targets."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from draft_deepseek import RowChunks, TTTLoss
from serving import slots
from serving.decode import BUCKETS, Accepted, Drafter, speculative, walk
from serving.slots import Judged, judge, walk_sampled
from test_drafts import DRAFT_IDS, at_anchors, close, make_batch, make_chunks, make_draft, oracle
from tests.helpers import Table, attention_target, small_draft

# ---------------------------------------------------------------------------------------------- a chain of three tokens

P = [[0.1, 0.2, 0.7], [0.05, 0.9, 0.05], [0.6, 0.3, 0.1]]  # what the target says after each token
Q = [  # what the draft says after each token, at its first and at its second step: never token 1
    [{0: 0.1, 2: 0.9}, {0: 0.5, 2: 0.5}, {0: 0.95, 2: 0.05}],
    [{0: 0.8, 2: 0.2}, {0: 0.3, 2: 0.7}, {0: 0.4, 2: 0.6}],
]
TEXTS = [(0, *text) for text in itertools.product(range(3), repeat=6)]


def sampled_rounds(last, more):
    """Rounds that the sampler takes on average for so many more tokens, by all that may happen in each."""
    if more <= 0:
        return 0.0
    total, open_chains = 1.0, [(1.0, last, 0)]
    for chance, last, said in open_chains:
        if said == len(Q):
            outcomes = list(enumerate(P[last]))
        else:
            q, rest = Q[said][last], [max(0.0, P[last][x] - Q[said][last].get(x, 0.0)) for x in range(3)]
            accepted = {x: q[x] * min(1.0, P[last][x] / q[x]) for x in q}
            open_chains += [(chance * share, x, said + 1) for x, share in accepted.items()]
            outcomes = [(x, (1 - sum(accepted.values())) * part / sum(rest)) for x, part in enumerate(rest)]
        total += sum(chance * share * sampled_rounds(x, more - said - 1) for x, share in outcomes if share)
    return total


def judged_chain(text):
    """Of the slots that drafted text[1:]: what the draft drafted there is kept with probability r."""
    n = len(text) - 1
    kept = torch.zeros(2, 1, n, dtype=torch.float64)
    for s, t in itertools.product(range(2), range(n)):
        if t + s < n:
            before, x = text[t + s : t + s + 2]
            kept[s, 0, t] = min(1.0, Q[s][before].get(x, 0.0) / P[before][x])
    known = torch.arange(n) + torch.arange(2)[:, None, None] < n
    return Judged(None, None, kept, known)


def rows_of(n, start=0):
    return SimpleNamespace(anchors=torch.arange(n)[None], position=torch.arange(start, start + n)[None])


def walked(text):
    return sum(walk_sampled(rows_of(6), judged_chain(text)).values(), Accepted(0, 0))


def probability(text):
    return float(torch.tensor([P[a][b] for a, b in itertools.pairwise(text)], dtype=torch.float64).prod())


def test_the_walk_takes_the_rounds_of_the_sampler_of_three_tokens():
    rounds = sum(probability(text) * walked(text).rounds for text in TEXTS)
    assert abs(rounds - sampled_rounds(0, 6)) < 1e-12
    assert all(abs(walked(text).tokens - 6) < 1e-12 for text in TEXTS)  # of the text, each in one round
    overlaps = [[sum(min(P[x][y], q[y]) for y in q) for x, q in enumerate(step)] for step in Q]
    mean = sum(  # were every slot a start as often as any other
        probability(text) * sum(1 + overlaps[0][a] * (1 + overlaps[1][b]) for a, b in itertools.pairwise(text)) / 6
        for text in TEXTS
    )
    assert abs(mean - 6 / rounds) > 0.05


def test_certain_tokens_are_walked_as_greedy_ones():
    gen = torch.Generator().manual_seed(0)
    for _ in range(50):
        hit = torch.rand(3, 2, 20, generator=gen) < 0.6
        mask = torch.rand(22, generator=gen) < 0.85
        valid = torch.stack([mask[s : s + 20] for s in range(3)])[:, None].cumprod(0).bool().expand(3, 2, 20)
        rows = SimpleNamespace(anchors=torch.arange(20).expand(2, -1), position=torch.arange(20).expand(2, -1))
        rows.valid, judged = valid, Judged(hit & valid, None, (hit & valid).double(), valid)
        for k in (1, 2, None):
            sampled = sum(walk_sampled(rows, judged, k).values(), Accepted(0, 0))
            assert sampled.rounds == walk(rows, judged, k).rounds and sampled.tokens == valid[0].sum()


def test_the_buckets_are_those_of_the_slots_that_chains_start_at():
    text = (0, 2, 0, 2, 2, 0, 1)
    whole = walked(text)
    for start, names in ((0, {"0-2K"}), (2045, {"0-2K", "2-8K"}), (131070, {"32-128K", "128K-"})):
        buckets = walk_sampled(rows_of(6, start), judged_chain(text))
        assert list(buckets) == list(BUCKETS) and {name for name, x in buckets.items() if x.rounds} == names
        assert torch.allclose(torch.tensor(sum(buckets.values(), Accepted(0, 0))), torch.tensor(whole))
        assert sum(x.tokens for x in buckets.values()) == pytest.approx(6)


# ----------------------------------------------------------------------------------------------------- slots are judged


def oracle_judged(draft, cfg, batch, steps):
    """Judged of all slots, [S,B,T]: by every slot's logits, in float64."""
    want, ids = oracle(draft.state_dict(), cfg, batch, draft.draft_ids, steps), draft.draft_ids.tolist()
    full, q = batch["target_logits"].double().softmax(-1), want.logits.exp()
    overlap, kept, known = (torch.zeros(want.hit.shape, dtype=torch.float64) for _ in range(3))
    mask, document, tokens = (batch[name].tolist() for name in ("loss_mask", "document", "tokens"))
    for s, b, t in want.valid.nonzero().tolist():
        u = t + 1 + s
        overlap[s, b, t] = torch.minimum(full[b, u, ids], q[s, b, t]).sum()
        if u + 1 < len(tokens[b]) and mask[b][u + 1] and document[b][u + 1] == document[b][t]:
            x, known[s, b, t] = tokens[b][u + 1], 1
            kept[s, b, t] = min(1.0, float(q[s, b, t, ids.index(x)] / full[b, u, x])) if x in ids else 0.0
    return Judged(want.hit, overlap, kept, known.bool())


@pytest.mark.parametrize("chunk", [7, 64, None])
@pytest.mark.parametrize("variant", ["deepseek-yarn", "deepseek-3.1", "kimi", "deepseek-full-vocabulary"])
def test_slots_are_judged_as_by_the_oracle(variant, chunk):
    draft, cfg = make_draft(variant)
    batch = make_batch([[20, 30, -3], [-4, 12, 1, 36], [-53]], share=0.7)
    some = torch.rand(3, 53, generator=torch.Generator().manual_seed(0)) < 0.5  # half a row of what a draft can say
    batch["tokens"] = torch.where(some, DRAFT_IDS[batch["tokens"] % 16], batch["tokens"])
    head, batch["target_logits"] = batch["head"], 0.2 * batch["target_logits"]  # as unsure as the draft
    batch["head"] = lambda last: 0.2 * head(last)
    rows = make_chunks(draft, batch, steps=4, chunk=chunk)
    got, want = judge(TTTLoss(draft), rows), oracle_judged(draft, cfg, batch, 4)
    used = (rows.anchors >= 0)[None]
    hit, overlap, kept, known = (at_anchors(x, rows.anchors) * used for x in want)
    assert torch.equal(got.hit, hit) and torch.equal(got.known, known) and hit.any() and not hit[known].all()
    close(got.overlap, overlap)
    close(got.kept, kept)
    assert (kept == 1).any() and ((kept > 0) & (kept < 1)).any()
    assert (kept[known] == 0).any() == (len(draft.draft_ids) < 64)


def test_a_teacher_over_the_draft_ids_alone_says_nothing_of_sampling():
    draft, _ = make_draft("deepseek")
    batch = make_batch([[20, 30]], share=0.8)
    whole = judge(TTTLoss(draft), make_chunks(draft, batch, steps=3))
    batch["last_hidden"], batch["head"] = batch["target_logits"], lambda last: last
    got = judge(TTTLoss(draft), make_chunks(draft, batch, steps=3))
    assert torch.equal(got.hit, whole.hit) and not got.known.any() and not got.overlap.any()


# ---------------------------------------------------------------------------------------------- beside the real sampler


def sampled_and_walked(target, draft, prompts, n, k):
    """(rounds of sampling n tokens after each prompt, those that the walk expects of the same texts)"""
    drafter = Drafter(draft, len(prompts), max(map(len, prompts)) + n, k, temperature=1.0)
    decoded = speculative(drafter, target, prompts, n)
    expected = []
    for prompt, one in zip(prompts, decoded, strict=True):
        text = torch.cat([prompt, one.tokens])[None]
        slot, (features, last) = torch.arange(text.shape[1])[None], target.states(text)
        document = torch.zeros_like(slot)
        args = (text, document, slot, features, slot >= len(prompt), last, target.head)
        rows = RowChunks(draft.draft_ids, *args, steps=k, chunk=16)
        found = sum(walk_sampled(rows, judge(TTTLoss(draft), rows)).values(), Accepted(0, 0))
        assert found.tokens == pytest.approx(n - 1)
        expected.append(found.rounds)
    return torch.tensor([float(len(one.rounds)) for one in decoded]), torch.tensor(expected)


def gap(pair):
    """How many standard errors the sampler's rounds lie from the walk's."""
    rounds, expected = pair
    return float((rounds - expected).mean() / ((rounds - expected).std() / len(rounds) ** 0.5))


CASES = {
    "table": (Table, lambda: small_draft(width=24), [torch.tensor([4, 7])] * 160, 24),
    "attention": (attention_target, small_draft, [torch.tensor([4, 9, 2, 2])] * 120, 40),
}


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_the_walk_takes_the_rounds_of_sampled_decoding(case, k):
    target, draft, prompts, n = CASES[case]
    rounds, expected = sampled_and_walked(target(), draft(), prompts, n, k)
    length = len(prompts) * (n - 1) / rounds.sum()
    assert abs(gap((rounds, expected))) < 3 and 1.05 < length < k + 0.8
    assert (rounds - expected).std() > 0.3  # or the standard error would say little


def everything_outside_accepted(compare):
    def changed(x, index, mass, token, *rest):
        same, overlap, kept = compare(x, index, mass, token, *rest)
        return same, overlap, torch.where(token < 0, 1.0, kept)

    return changed


def a_slot_early(runs):
    def changed(*args):
        for where, stand in runs(*args):
            yield where, [[1.0, *at_least[2:], 0.0] for at_least in stand]

    return changed


DEFECTS = {
    "c forgotten": ("draft_mass", lambda right: lambda rows, mass: torch.ones_like(mass)),
    "tokens outside the vocabulary accepted": ("compare", everything_outside_accepted),
    "chains start a slot early": ("runs", a_slot_early),
}


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_walk_shows_beside_sampled_decoding(defect, monkeypatch):
    name, change = DEFECTS[defect]
    monkeypatch.setattr(slots, name, change(getattr(slots, name)))
    target, draft, prompts, n = CASES["table"]
    assert abs(gap(sampled_and_walked(target(), draft(), prompts, n, 3))) > 8
