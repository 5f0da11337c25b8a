"""Claims about decoding: the text is the target's own, whatever the draft says, and the rounds are counted right.

The targets are small models of every kind that verification meets: one without a cache, one whose cache can be cropped
and masked, recurrent ones, and tables whose exact distribution can be enumerated.
"""

import math
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.backends.debugging import aot_eager
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput

from draft_deepseek import TTTLoss, build_rows
from serving import decode
from serving.decode import Accepted, Cropped, Drafter, Round, Snapshots, WholeText, choose_verifier, speculative, walk
from test_drafts import make_batch, make_draft, make_rows, unroll
from tests.helpers import (
    PROMPT,
    PROMPTS,
    Table,
    Toy,
    attention_target,
    exact_joint,
    sharpened,
    small_draft,
    toy_draft,
    toy_rows,
)


@pytest.fixture(scope="module", params=["deepseek", "kimi"])
def toy(request):
    return {"half trained": toy_draft(request.param, 12), "overfit": toy_draft(request.param, 100, overfit=True)}


def continued(draft, target, prompts, n, k, temperature=0.0, top_p=1.0, **how):
    longest = max(len(prompt) for prompt in prompts)
    return speculative(Drafter(draft, len(prompts), longest + n, k, temperature, top_p), target, prompts, n, **how)


# ----------------------------------------------------------------------------------------- greedy, and what rounds say


def test_an_overfit_draft_has_every_drafted_token_accepted(toy):
    (decoded,) = continued(toy["overfit"], Toy(), [PROMPT], 1 + 8 * 8, 7)
    assert torch.equal(decoded.tokens, Toy().greedy(PROMPT, 65))
    assert decoded.accepted == Accepted(64, 8)  # 7 of 7 drafted tokens and the target's own, every round
    assert decoded.rounds == [Round(2 + 8 * i, 7, 7, 8) for i in range(8)]
    (cut,) = continued(toy["overfit"], Toy(), [PROMPT], 1 + 8 + 3, 7)
    assert cut.rounds[1] == Round(10, 3, 3, 3)  # what a chain says past the last token asked for does not count


@pytest.mark.parametrize("k", [1, 3, 7])
def test_decoding_is_lossless_and_takes_the_rounds_that_the_walk_counts(toy, k):
    draft = toy["half trained"]  # some hits, some misses
    prompts = list(torch.randint(32, (8, 3), generator=torch.Generator().manual_seed(k)))
    decoded, total = continued(draft, Toy(), prompts, 48, k), Accepted(0, 0)
    for prompt, one in zip(prompts, decoded, strict=True):
        want = Toy().greedy(prompt, 48)
        assert torch.equal(one.tokens, want)
        text, slot = torch.cat([prompt, want])[None], torch.arange(51)[None]
        rows = toy_rows(draft, text, (slot >= 3) & (slot < 50))  # 47 tokens after the first
        with torch.no_grad():
            _, metrics = TTTLoss(draft)(rows)
        assert walk(rows, metrics, k).rounds == one.accepted.rounds == len(one.rounds) and one.accepted.tokens == 47
        assert sum(round.tokens for round in one.rounds) == 47
        starts = [3 - 1 + sum(round.tokens for round in one.rounds[:i]) for i in range(len(one.rounds))]
        assert [round.start for round in one.rounds] == starts
        total += one.accepted
    assert 1.05 < total.length < k + 0.95  # neither all nor nothing, or the test would show little


@pytest.mark.parametrize(("n", "k"), [(1, 3), (2, 7), (23, 1), (23, 7)])
def test_rows_of_a_batch_get_what_they_get_alone(toy, n, k):
    prompts = [torch.randint(32, (length,), generator=torch.Generator().manual_seed(length)) for length in (1, 6, 2, 9)]
    together = continued(toy["half trained"], Toy(), prompts, n, k)
    assert n < 23 or k == 1 or len({len(one.rounds) for one in together}) > 1
    for prompt, one in zip(prompts, together, strict=True):
        (alone,) = continued(toy["half trained"], Toy(), [prompt], n, k)
        assert torch.equal(one.tokens, Toy().greedy(prompt, n)) and torch.equal(one.tokens, alone.tokens)
        assert one.rounds == alone.rounds and len(one.tokens) == n


def test_a_stop_token_ends_the_text_wherever_it_stands(toy):
    target, prompts, seen, k = Toy(), [PROMPT, torch.tensor([7])], set(), 3
    for stop in range(9):
        target.stop_token_ids = [int(target.greedy(PROMPT, 9)[stop]), 99]
        decoded = continued(toy["overfit"], target, prompts, 13, k, ignore_eos=False)
        for prompt, one in zip(prompts, decoded, strict=True):
            want = target.greedy(prompt, 13).tolist()
            first = [i for i, x in enumerate(want) if x in target.stop_token_ids][:1]
            assert one.tokens.tolist() == want[: first[0] + 1 if first else 13]
            assert one.accepted.tokens == sum(round.tokens for round in one.rounds)
            for round in one.rounds:
                assert round.accepted <= round.drafted <= k and round.tokens <= round.accepted + 1
            seen |= {round.tokens - round.accepted for round in one.rounds[-1:]}
    assert torch.equal(continued(toy["overfit"], target, [PROMPT], 13, k)[0].tokens, target.greedy(PROMPT, 13))
    assert seen == {0, 1}  # ended by a drafted token, and by the target's own


def test_accept_lengths_are_pooled_by_depth_and_by_position():
    assert (Accepted(10, 5) + Accepted(90, 30)).length == 100 / 35
    rounds = [Round(2047, 3, 3, 4), Round(2048, 3, 1, 2), Round(8191, 3, 0, 1), Round(40000, 2, 2, 2)]
    assert decode.by_depth(rounds, 3) == [(3, 4), (2, 4), (1, 3)]
    want = {"0-2K": Accepted(4, 1), "2-8K": Accepted(3, 2), "32-128K": Accepted(2, 1)}
    assert decode.by_bucket(rounds) == dict.fromkeys(decode.BUCKETS, Accepted(0, 0)) | want


@pytest.mark.parametrize("k", [2, None])
def test_the_walks_buckets_are_those_of_the_positions_and_sum_to_the_walk(k):
    draft, _ = make_draft("deepseek")
    rows = make_rows(draft, make_batch([[9, 8, -2], [19], [-19]], share=0.9), 3)
    hit = torch.rand(rows.valid.shape, generator=torch.Generator().manual_seed(1)) < 0.5
    metrics = SimpleNamespace(hit=hit & rows.valid)
    whole = walk(rows, metrics, k)
    found = set()
    for start in (0, 2040, 8184, 32760, 50000, 131064, 200000):
        moved = rows._replace(position=rows.position + start)
        buckets = decode.walk_by_bucket(moved, metrics, k)
        assert list(buckets) == list(decode.BUCKETS)
        assert sum(buckets.values(), Accepted(0, 0)) == whole == walk(moved, metrics, k)
        found.add(tuple(name for name, accepted in buckets.items() if accepted.rounds))
    borders = {("0-2K", "2-8K"), ("2-8K", "8-32K"), ("8-32K", "32-128K"), ("32-128K", "128K-")}
    assert found == borders | {("0-2K",), ("32-128K",), ("128K-",)}


# ------------------------------------------------------------------------------------------------ targets with a cache


class RecurrentConfig(transformers.PretrainedConfig):
    model_type = "recurrent_toy"


class Recurrent(transformers.PreTrainedModel):
    """Layers of a running state, which no cache can take back. `forgetful`: several tokens at once start it anew."""

    config_class, base_model_prefix, forgetful = RecurrentConfig, "model", False

    def __init__(self, config):
        super().__init__(config)
        self.model = RecurrentBackbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids, **kwargs):
        return CausalLMOutput(logits=self.lm_head(self.model(input_ids).last_hidden_state))


class RecurrentBackbone(transformers.PreTrainedModel):
    config_class = RecurrentConfig

    def __init__(self, config):
        super().__init__(config)
        h = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, h)
        self.layers = nn.ModuleList(nn.Linear(2 * h, h) for _ in range(config.num_hidden_layers))
        self.post_init()

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        if past_key_values is None or (Recurrent.forgetful and input_ids.shape[1] > 1):
            past_key_values = [torch.zeros(len(input_ids), self.config.hidden_size) for _ in self.layers]
        x = self.embed_tokens(input_ids)
        for j, layer in enumerate(self.layers):
            states = [past_key_values[j]]
            for t in range(x.shape[1]):
                states.append(torch.tanh(states[-1] * 0.7 + x[:, t]))
            past_key_values[j].copy_(states[-1])  # in place, as kernels do
            x = layer(torch.cat([x, torch.stack(states[1:], 1)], -1))
        output = BaseModelOutput(last_hidden_state=x)
        output["past_key_values"] = past_key_values
        return output


def recurrent():
    torch.manual_seed(0)
    sizes = {"vocab_size": 12, "hidden_size": 20, "num_hidden_layers": 4, "eos_token_id": 3, "pad_token_id": None}
    return sharpened(Recurrent(RecurrentConfig(**sizes, tie_word_embeddings=False)))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("make", "variant"), [(attention_target, "deepseek-yarn"), (recurrent, "kimi")])
def test_every_verifier_gives_the_targets_own_text(make, variant, temperature):
    target, draft, n = make(), small_draft(variant), 18
    suited = choose_verifier(target)
    want = continued(draft, target, PROMPTS, n, 3, temperature, verifier=WholeText)
    for verifier in {suited, Snapshots}:
        texts = continued(draft, target, PROMPTS, n, 3, temperature, verifier=verifier)
        assert all(torch.equal(a.tokens, b.tokens) and a.rounds == b.rounds for a, b in zip(texts, want, strict=True))
    for r, (prompt, one) in enumerate(zip(PROMPTS, want, strict=True)):
        (alone,) = continued(draft, target, [prompt], n, 3, temperature, verifier=suited, seed=r)
        assert torch.equal(alone.tokens, one.tokens) and alone.rounds == one.rounds
        assert temperature > 0 or torch.equal(one.tokens, target.greedy(prompt, n))
    assert len({round.accepted for one in want for round in one.rounds}) > 1  # neither all nor nothing


class Logged(Drafter):
    def step(self, token, a, position):
        self.states.append(super().step(token, a, position))
        return self.states[-1]


@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_every_round_drafts_from_the_states_of_training_and_accepts_its_hits(variant):
    target, draft, k = attention_target(), small_draft(variant), 3  # both look at the whole text
    for prompt in PROMPTS:
        drafter = Logged(draft, 1, len(prompt) + 40, k)
        drafter.states = []
        (one,) = speculative(drafter, target, [prompt], 40)
        text = torch.cat([prompt, one.tokens])[None]
        slot, (features, last) = torch.arange(text.shape[1])[None], target.states(text)
        learned, document = (slot >= len(prompt)) & (slot < text.shape[1] - 1), torch.zeros_like(slot)
        rows = build_rows(draft.draft_ids, text, document, slot, features, learned, last, target.head, steps=k)
        loss = TTTLoss(draft, steps=k)
        with torch.no_grad():
            unrolled, metrics = unroll(loss, rows)[:, 0], loss(rows)[1]
        index = {t: a for a, t in enumerate(rows.anchors[0].tolist())}
        hits = metrics.hit.long().cumprod(0).sum(0)[0]
        assert walk(rows, metrics, k).rounds == len(one.rounds)
        for i, round in enumerate(one.rounds):
            a = index[round.start]
            assert round.accepted == min(int(hits[a]), round.drafted)
            for s in range(min(round.accepted + 1, k, text.shape[1] - 1 - round.start)):  # what was fed is the text
                assert torch.allclose(drafter.states[i * k + s][0, 0], unrolled[s, a], rtol=1e-4, atol=1e-4), (i, s)


def test_greedy_decoding_stops_where_the_target_stops():
    target, draft = attention_target(), small_draft()
    for prompt in (torch.tensor([x, 5]) for x in range(5)):
        want = target.greedy(prompt, 30, ignore_eos=False)
        assert torch.equal(continued(draft, target, [prompt], 30, 3, ignore_eos=False)[0].tokens, want)


def test_the_verifier_is_chosen_by_what_the_cache_can_do(monkeypatch):
    assert (
        choose_verifier(attention_target()) is choose_verifier(attention_target(), 3) is Cropped
        and choose_verifier(Toy()) is WholeText
    )
    target = recurrent()
    assert choose_verifier(target) is choose_verifier(target, 3) is Snapshots
    monkeypatch.setattr(Recurrent, "forgetful", True)
    assert choose_verifier(target) is WholeText
    target = attention_target()
    target.sees_no_padding = False  # then rows of different lengths must not meet
    assert choose_verifier(target, 3) is Snapshots and choose_verifier(target, 1) is Cropped


@pytest.mark.parametrize("defect", ["snapshots keep everything", "holes are seen"])
def test_a_cache_that_remembers_rejected_tokens_shows(defect, monkeypatch):
    if defect == "snapshots keep everything":
        target, verifier = recurrent(), Snapshots
        monkeypatch.setattr(Snapshots, "keep", lambda self, counts: setattr(self, "caches", list(self.caches)))
    else:
        target, verifier = attention_target(), Cropped
        keep = Cropped.keep
        monkeypatch.setattr(Cropped, "keep", lambda self, n: keep(self, torch.full_like(n, n.max())))
    texts = continued(small_draft(), target, PROMPTS, 25, 3, verifier=verifier)
    assert not all(torch.equal(x.tokens, target.greedy(p, 25)) for x, p in zip(texts, PROMPTS, strict=True))


# ------------------------------------------------------------------------------------------------------------ sampling


def deviation(temperature, top_p, k, rows=8_000, n=3):
    """How many standard deviations chi-square lies above its mean, of the first n sampled tokens; text counts below 8
    are taken together. And the share of drafted tokens that were accepted."""
    prompt = torch.tensor([4])
    decoded = continued(small_draft(width=24), Table(), [prompt] * rows, n, k, temperature, top_p)
    counts = {}
    for one in decoded:
        counts[tuple(one.tokens.tolist())] = counts.get(tuple(one.tokens.tolist()), 0) + 1
    want = {text: p * rows for text, p in exact_joint(prompt.tolist(), n, temperature, top_p).items()}
    if not counts.keys() <= want.keys():
        return math.inf, 0.0
    cells = [(counts.get(text, 0), e) for text, e in want.items() if e >= 8]
    cells += [(rows - sum(c for c, _ in cells), rows - sum(e for _, e in cells))]
    chi_square = sum((c - e) ** 2 / e for c, e in cells if e > 1e-6)
    df = len(cells) - 1
    rounds = [round for one in decoded for round in one.rounds]
    return (chi_square - df) / (2 * df) ** 0.5, sum(r.accepted for r in rounds) / sum(r.drafted for r in rounds)


@pytest.mark.parametrize(("temperature", "top_p", "k"), [(1.0, 1.0, 2), (0.7, 0.8, 3), (1.6, 1.0, 1)])
def test_sampled_text_is_distributed_as_the_targets(temperature, top_p, k):
    z, accepted = deviation(temperature, top_p, k)
    assert z < 5 and 0.1 < accepted < 0.9


def accept_everything(chain, q, p, ids, u):
    n = torch.full_like(chain[:, :1], chain.shape[1])
    return n, decode.pick(decode.take(p, n), u[:, -1:])


DEFECTS = {
    "q ignored": ("residual", lambda p, q, ids: p),
    "q not subtracted but excluded": ("residual", lambda p, q, ids: p.index_fill(-1, ids, 0.0)),
    "draft vocabulary mapping forgotten": ("residual", lambda p, q, ids: residual(p, q, torch.arange(len(ids)))),
    "everything accepted": ("accept", accept_everything),
}
residual = decode.residual


@pytest.mark.slow
@pytest.mark.parametrize("defect", DEFECTS)
def test_a_wrong_rejection_shows_in_the_distribution(defect, monkeypatch):
    monkeypatch.setattr(decode, *DEFECTS[defect])
    assert deviation(1.0, 1.0, 2)[0] > 20


def test_distribution_and_pick():
    logits = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])
    assert decode.distribution(logits, 0.0, 0.5).tolist() == [0, 1, 0, 0, 0]  # the first of equals, as argmax
    p = decode.distribution(logits, 1.0, 1.0)
    assert torch.allclose(p, logits.softmax(-1))
    assert torch.allclose(decode.distribution(logits, 0.5, 1.0), (2 * logits).softmax(-1))
    nucleus = decode.distribution(logits, 1.0, 0.5)  # two equals hold 0.79 together, one of them less than 0.5
    assert nucleus.tolist() == [0, 0.5, 0, 0.5, 0]
    assert decode.distribution(logits, 1.0, 1e-6).tolist() == [0, 1, 0, 0, 0]
    weights, edges = torch.tensor([0.0, 2.0, 0.0, 1.0, 0.0]), torch.tensor([0.0, 0.6, 0.67, 1 - 2**-24])
    assert [int(decode.pick(weights, u)) for u in edges] == [1, 1, 3, 3]  # never one of weight 0


# ------------------------------------------------------------------------------------------------------------ drafting


@pytest.mark.parametrize("variant", ["deepseek-yarn", "deepseek-3.1", "deepseek-no-q-lora", "kimi", "kimi-3.1"])
def test_cached_states_equal_those_of_the_training_unroll(variant):
    draft, _ = make_draft(variant)
    batch = make_batch([[20], [20]], share=0.7)
    rows = make_rows(draft, batch, steps=4)
    with torch.no_grad():
        want = unroll(TTTLoss(draft), rows)  # [S,B,A,H]
        drafter = Drafter(draft, 2, 24, 1)
        g = draft.project_hidden_states(batch["features"])
        drafter.prefill(rows.tokens[:, 1:4], batch["features"][:, :3])
        for slot in range(3, 16):  # a chain from each leaves later slots behind, as rejected tokens do
            drafter.remember(rows.tokens[:, slot : slot + 2], g[:, slot - 1 : slot + 1], torch.full((2, 1), slot - 1))
            a = g[:, slot : slot + 1]
            for s in range(4):
                a = drafter.step(rows.tokens[:, slot + 1 + s, None], a, torch.full((2, 1), slot + s))
                for b in range(2):
                    for index in (rows.anchors[b] == slot).nonzero().flatten():
                        error = (a[b, 0] - want[s, b, index]).abs().max()
                        assert error <= 1e-5 * want[s, b, index].abs().max().clamp(min=1), (slot, s)


@pytest.mark.parametrize(
    ("variant", "temperature"), [("deepseek-yarn", 0.8), pytest.param("kimi-3.1", 0.0, marks=pytest.mark.slow)]
)
def test_the_compiled_chain_equals_eager_and_is_one_graph(variant, temperature):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return aot_eager(graph, inputs)

    draft, target = small_draft(variant, width=24), Table()
    torch._dynamo.reset()
    compiled, eager = (Drafter(draft, 3, 20, 2, temperature, top_p=0.9) for _ in range(2))
    compiled.compile(backend=backend, fullgraph=True, dynamic=False)
    for prompts in (PROMPTS, PROMPTS[1:] + PROMPTS[:1]):  # a drafter is used again, its cache as it was left
        texts = [speculative(drafter, target, prompts, 14) for drafter in (compiled, eager)]
        assert all(torch.equal(a.tokens, b.tokens) and a.rounds == b.rounds for a, b in zip(*texts, strict=True))
        assert all(len(one.rounds) > 3 for one in texts[0])
    assert len(graphs) == 1
    assert torch.allclose(compiled.latents, eager.latents, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(k=0), "k is 0"),
        (dict(temperature=-1.0), "temperature -1.0"),
        (dict(top_p=0.0), r"top_p 0.0"),
        (dict(prompts=PROMPTS[:2]), r"prompts of \[6, 1\] tokens; this drafter was made for 3"),
        (dict(prompts=[*PROMPTS[:2], PROMPT[:0]]), "none empty"),
        (dict(n=0), "max_new_tokens is 0"),
        (dict(n=100), r"longest prompt \(6\) at most the drafter's max_tokens, 40"),
        (dict(target=Toy()), "is for 12 tokens, the target has 32"),
    ],
)
def test_bad_requests_say_what_is_wanted(change, said):
    given = dict(k=3, temperature=0.0, top_p=1.0, prompts=PROMPTS, n=5, target=Table()) | change
    with pytest.raises(ValueError, match=said) as error:
        drafter = Drafter(small_draft(width=24), 3, 40, given["k"], given["temperature"], given["top_p"])
        speculative(drafter, given["target"], given["prompts"], given["n"])
    assert "\n" not in str(error.value)
