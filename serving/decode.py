"""Drafting and verification: speculative decoding of a target with an EAGLE-3 draft, and what its rounds accept.

A round drafts a chain of K tokens, runs the target once over the last token and the chain, and keeps the drafted tokens
that stand plus one of the target's own. Greedily the text is the target's own greedy one; sampled it is distributed as
the target's, whatever the draft says (rejection sampling, arXiv 2211.17192 and 2302.01318).

    drafter = Drafter(draft, rows=len(prompts), max_tokens=4096, k=7, temperature=0.8, top_p=0.95)
    drafter.compile(fullgraph=True, dynamic=False, mode="max-autotune")  # optional: K steps, one graph
    for decoded in speculative(drafter, target, prompts, max_new_tokens=256):
        print(decoded.tokens, decoded.accepted.length)

Shapes: B rows, M slots of the draft's cache, L tokens of a text, K drafted tokens of a round, m tokens at once, H
hidden, V target and Vd draft vocabulary, p and q the target's and the draft's distributions.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.cache_utils import DynamicCache, DynamicLayer

from draft_deepseek import Metrics, RowBatch, RowChunks, take, upcast

# --------------------------------------------------------------------------------------------------- accept lengths


class Accepted(NamedTuple):
    """Tokens over rounds, pooled: 10 tokens in 5 rounds and 90 in 30 are 100/35."""

    tokens: int
    rounds: int

    @property
    def length(self) -> float:
        return self.tokens / max(self.rounds, 1)

    def __add__(self, other: "Accepted") -> "Accepted":
        return Accepted(self.tokens + other.tokens, self.rounds + other.rounds)


class Round(NamedTuple):
    """One verification, without what lies past the end of the text."""

    start: int  # position of the slot that the chain starts from
    drafted: int
    accepted: int  # drafted tokens that stand
    tokens: int  # these and the target's own one


class Decoded(NamedTuple):
    """What one prompt was continued with. The first token comes with the prompt and belongs to no round."""

    tokens: Tensor  # [n] on the CPU
    rounds: list[Round]

    @property
    def accepted(self) -> Accepted:
        return Accepted(len(self.tokens) - 1, len(self.rounds))


BUCKETS = {"0-2K": 2048, "2-8K": 8192, "8-32K": 32768, "32-128K": 131072, "128K-": float("inf")}  # where a chain starts


def bucket(position: int) -> str:
    return next(name for name, end in BUCKETS.items() if position < end)


def by_bucket(rounds: list[Round]) -> dict[str, Accepted]:
    """Accept length per position bucket, since drafts decay with context."""
    total = dict.fromkeys(BUCKETS, Accepted(0, 0))
    for one in rounds:
        total[bucket(one.start)] += Accepted(one.tokens, 1)
    return total


def by_depth(rounds: list[Round], k: int) -> list[tuple[int, int]]:
    """(accepted, drafted) tokens at each of the depths 1..k of a chain."""
    depths = range(1, k + 1)
    return [(sum(one.accepted >= d for one in rounds), sum(one.drafted >= d for one in rounds)) for d in depths]


def walk(rows: RowBatch, metrics: Metrics, k: int | None = None) -> Accepted:
    """Accept length of chains that start where the last one ended, as an engine's do; k at most S, None for S.

    Over each maximal run of slots valid at step 0, from its first slot: n = hits in a row, at most what is left of the
    run; one round gives n + 1 tokens, and the next starts n + 1 slots on. Over the target's own greedy output that is
    greedy speculative decoding.
    """
    return sum(walk_by_bucket(rows, metrics, k).values(), Accepted(0, 0))


def walk_by_bucket(rows: RowBatch | RowChunks, metrics: Metrics, k: int | None = None) -> dict[str, Accepted]:
    """`walk`, its rounds sorted into BUCKETS by the position that their chain starts at; it reads `hit` alone."""
    chain = metrics.hit[:k].long().cumprod(0).sum(0).cpu()  # [B,A]
    total = dict.fromkeys(BUCKETS, Accepted(0, 0))
    for where, hits in runs(rows, rows.valid[0], chain):
        i = 0
        while i < len(hits):
            n = min(hits[i], len(hits) - i)
            total[bucket(where[i])] += Accepted(n + 1, 1)
            i += n + 1
    return total


def runs(rows: RowBatch | RowChunks, chosen: Tensor, values: Tensor) -> Iterator[tuple[list[int], list]]:
    """Positions and values, [B,A,..], of each maximal run of neighbouring slots among the chosen anchors [B,A]."""
    slots = rows.anchors.cpu()
    position = rows.position.cpu().gather(1, slots.clamp(min=0))
    for b, mask in enumerate(chosen.cpu()):
        at, where, x = (y[b][mask].tolist() for y in (slots, position, values))
        begins = [i for i, t in enumerate(at) if i == 0 or at[i - 1] != t - 1]
        for begin, end in pairwise([*begins, len(at)]):
            yield where[begin:end], x[begin:end]


def unique_bigrams(texts: list[list[int]]) -> float:
    """Distinct pairs of neighbours over all pairs, each text alone: text that repeats itself is easy to draft."""
    pairs = [list(zip(text, text[1:], strict=False)) for text in texts]
    return sum(len(set(p)) for p in pairs) / max(sum(map(len, pairs)), 1)


# ------------------------------------------------------------------------------------------------ speculative decoding


@torch.no_grad()
def speculative(
    drafter: "Drafter", target, prompts: list[Tensor], max_new_tokens: int, ignore_eos=True, seed=0, verifier=None
) -> list[Decoded]:
    """Continue every prompt [L] by max_new_tokens, or up to and with a stop token of the target unless `ignore_eos`.

    A row gets what it would get alone: row b samples from its own stream, that of `seed + b`. verifier: Cropped,
    Snapshots or WholeText, None for what suits the target. ValueError: prompts that the drafter was not made for.
    """
    check(drafter, target, prompts, max_new_tokens)
    k, device, stops = drafter.k, target.device, [] if ignore_eos else target.stop_token_ids
    text = (verifier or choose_verifier(target, len(prompts)))(target, len(prompts))
    uniform = streams(len(prompts), seed, device)
    p_of = partial(distribution, temperature=drafter.temperature, top_p=drafter.top_p)
    ahead = torch.arange(k + 1, device=device)

    tokens = pad_sequence(prompts, batch_first=True).to(device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    features, last = text.states(tokens)
    text.keep(lengths)
    drafter.prefill(tokens[:, 1:], features[:, :-1])
    said = pick(p_of(target.head(take(last, lengths[:, None] - 1))), uniform(1))
    tokens = F.pad(tokens, (0, drafter.max_tokens - tokens.shape[1])).scatter(1, lengths[:, None], said)
    features = F.pad(take(features, lengths[:, None] - 1), (0, 0, 0, k))
    lengths, fresh = lengths + 1, torch.ones_like(lengths)  # fresh: slots whose features the drafter has yet to see
    new, rounds = said.tolist(), [[] for _ in prompts]
    going = [max_new_tokens > 1 and x[0] not in stops for x in new]

    while any(going):
        u, end = uniform(2 * k + 1), lengths[:, None]
        if u.is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        start = end - 1 - fresh[:, None]
        chain, q = drafter(tokens.gather(1, start + 1 + ahead), features, start, fresh[:, None], u[:, :k])
        fed = torch.cat([tokens.gather(1, end - 1), drafter.ids[chain]], dim=1)
        features, last = text.states(fed)
        n, own = accept(chain, q, p_of(target.head(last)), drafter.ids, u[:, k:])
        said = F.pad(fed[:, 1:], (0, 1)).scatter(1, n, own)  # n drafted tokens, one of the target, leftovers
        tokens.scatter_(1, end + ahead, said)

        for r, (row, hits, at) in enumerate(zip(said.tolist(), n.flatten().tolist(), lengths.tolist(), strict=True)):
            if going[r]:
                kept, one, going[r] = settle(row[: hits + 1], at - 2, k, max_new_tokens - len(new[r]), stops)
                new[r] += kept
                rounds[r].append(one)
        live = torch.tensor(going, device=device)
        steps = torch.where(live, n.flatten() + 1, 0)  # a row that ended stands still
        text.keep(steps)
        lengths, fresh = lengths + steps, torch.where(live, steps, fresh)
    return [Decoded(torch.tensor(x), r) for x, r in zip(new, rounds, strict=True)]


def check(drafter: "Drafter", target, prompts: list[Tensor], max_new_tokens: int) -> None:
    rows, limit, vocab = len(drafter.latents), drafter.max_tokens - drafter.k, drafter.draft.config.vocab_size
    sizes = [len(prompt) for prompt in prompts]
    if len(sizes) != rows or 0 in sizes:
        raise ValueError(f"prompts of {sizes} tokens; this drafter was made for {rows} of them, none empty")
    if not 1 <= max_new_tokens <= limit - max(sizes):
        raise ValueError(
            f"max_new_tokens is {max_new_tokens}; at least 1 is wanted, and with the longest prompt ({max(sizes)}) at "
            f"most the drafter's max_tokens, {limit}"
        )
    if target.vocab_size != vocab:
        raise ValueError(f"this draft is for {vocab} tokens, the target has {target.vocab_size}; is it another one's?")


def settle(said: list[int], start: int, k: int, left: int, stops: list[int]) -> tuple[list[int], Round, bool]:
    """What the text keeps of a round (`left` tokens at most, up to and with a stop token), and whether it goes on."""
    end = min(left, next((i + 1 for i, x in enumerate(said) if x in stops), left + 1))
    kept, goes_on = said[:end], len(said) < end
    drafted = min(k, left if goes_on else len(kept))
    return kept, Round(start, drafted, min(len(said) - 1, len(kept)), len(kept)), goes_on


def streams(rows: int, seed: int, device) -> Callable[[int], Tensor]:
    """uniform(m) -> the next m numbers in [0,1) of every row [B,m], from a stream of its own."""
    generators = [torch.Generator().manual_seed(seed + r) for r in range(rows)]
    return lambda m: torch.stack([torch.rand(m, generator=g) for g in generators]).to(device)


# ------------------------------------------------------------------------------------------------------------- sampling


def distribution(logits: Tensor, temperature: float, top_p: float) -> Tensor:
    """Probabilities [..,V] that tokens are drawn with; temperature 0 is greedy, all on the largest logit.

    top_p keeps the fewest most likely tokens that hold that share together.
    """
    if temperature == 0:
        return F.one_hot(logits.argmax(-1), logits.shape[-1]).to(torch.float32)
    p = (upcast(logits) / temperature).softmax(-1)
    if top_p == 1:
        return p
    ordered, order = p.sort(dim=-1, descending=True, stable=True)
    ordered = ordered.masked_fill(ordered.cumsum(-1) - ordered >= top_p, 0.0)
    return torch.zeros_like(p).scatter(-1, order, ordered / ordered.sum(-1, keepdim=True))


def pick(p: Tensor, u: Tensor) -> Tensor:
    """Index [..] drawn from weights p [..,V], whose sum need not be 1, by uniform u [..] in [0,1)."""
    below = p.double().cumsum(-1)
    return (below <= u.double()[..., None] * below[..., -1:]).sum(-1)


def accept(chain: Tensor, q: Tensor, p: Tensor, ids: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """(how many drafted tokens stand [B,1], the token behind them [B,1]), so that both are distributed as p.

    chain [B,K] draft ids drawn from q [B,K,Vd], whose target ids are ids [Vd]; p [B,K+1,V], u [B,K+1] uniform.
    """
    p_chain = p[:, :-1].gather(-1, ids[chain][..., None])[..., 0]
    q_chain = q.gather(-1, chain[..., None])[..., 0]
    n = (u[:, :-1] * q_chain < p_chain).long().cumprod(1).sum(1, keepdim=True)  # each with probability min(1, p/q)
    q = F.pad(q, (0, 0, 0, 1))  # nothing is drafted behind the last
    return n, pick(residual(take(p, n), take(q, n), ids), u[:, -1:])


def residual(p: Tensor, q: Tensor, ids: Tensor) -> Tensor:
    """max(0, p - q) [..,V], not normalised: what replaces a rejected token. q [..,Vd] is 0 off the draft's ids."""
    rest = p.index_add(-1, ids, -q.to(p.dtype)).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, p)  # p = q to rounding: nothing is left, nor rejected


# ------------------------------------------------------------------------------------------------------------- drafting


class Drafter(nn.Module):
    """Chains of k tokens from an EAGLE-3 draft with a static cache of latents, [B,M,R+Dr]: all that it keeps per token.

    Every call has one shape, so that `compile(fullgraph=True, dynamic=False)` makes the k steps one graph, which
    mode="max-autotune" captures as a CUDA graph. rows: prompts at once; max_tokens: of the longest text, prompt and new
    tokens. A drafter may be used again: what it cached lies behind every query until it is overwritten.
    ValueError: k, temperature or top_p out of range.
    """

    def __init__(self, draft: nn.Module, rows: int, max_tokens: int, k: int, temperature=0.0, top_p=1.0):
        super().__init__()
        if k < 1 or temperature < 0 or not 0 < top_p <= 1:
            raise ValueError(f"k is {k} (1 or more), temperature {temperature} (0 or more), top_p {top_p} (in (0, 1])")
        cfg, weight = draft.config, draft.lm_head.weight
        self.draft, self.k, self.temperature, self.top_p = draft, k, temperature, top_p
        self.max_tokens = max_tokens + k  # a chain may start at the last token asked for
        latents = weight.new_zeros(rows, self.max_tokens, cfg.kv_lora_rank + cfg.qk_rope_head_dim)
        self.register_buffer("latents", latents, persistent=False)  # at one address, as a captured graph wants
        self.register_buffer("ids", draft.draft_ids, persistent=False)

    @torch.no_grad()
    def forward(
        self, tokens: Tensor, features: Tensor, start: Tensor, fresh: Tensor, u: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft ids [B,K] and the distributions [B,K,Vd] they were drawn from, by uniform u [B,K].

        Of the K+1 slots from position start [B,1] on, features [B,K+1,3H] of the target and the tokens [B,K+1] behind
        each, the first fresh [B,1] are new; the others may hold anything. The chain starts from the last new one.
        """
        states = self.draft.project_hidden_states(features)
        self.remember(tokens, states, start)
        position, last = start + fresh - 1, fresh - 1
        token, a, chain, distributions = tokens.gather(1, last), take(states, last), [], []
        for step in range(self.k):
            a = self.step(token, a, position + step)
            q = distribution(self.draft.compute_logits(a), self.temperature, self.top_p)
            chain.append(pick(q, u[:, step : step + 1]))
            distributions.append(q)
            token = self.ids[chain[-1]]
        return torch.cat(chain, dim=1), torch.cat(distributions, dim=1)

    @torch.no_grad()
    def prefill(self, tokens: Tensor, features: Tensor) -> None:
        """Remember the slots from position 0 on: features [B,m,3H] and the tokens [B,m] behind each."""
        states = self.draft.project_hidden_states(features)
        self.remember(tokens, states, torch.zeros_like(tokens[:, :1]))

    def remember(self, tokens: Tensor, states: Tensor, start: Tensor) -> None:
        """Cache m slots at once, without attention: the one layer's latents depend on its input alone.

        Slots that are padding or were rejected lie behind every query until real ones overwrite them.
        """
        attn = self.draft.model.layers[0].self_attn
        position = start + torch.arange(tokens.shape[1], device=tokens.device)
        self.write(attn.input_projections()[1](self.fuse(tokens, states)), position)

    def step(self, token: Tensor, a: Tensor, position: Tensor) -> Tensor:
        """The state a[t,s] [B,1,H] of the token [B,1] that is fed and a[t,s-1] [B,1,H] at position [B,1]; caches it."""
        layer = self.draft.model.layers[0]
        pre_q, pre_kv, pre_gate = layer.self_attn.project(self.fuse(token, a))
        self.write(pre_kv, position)
        o = self.attend(layer.self_attn.queries(pre_q, position), position)
        a = layer.finish(a, layer.self_attn.output(o, pre_gate))
        return self.draft.model.norm(a) if self.draft.config.norm_output else a

    def fuse(self, tokens: Tensor, states: Tensor) -> Tensor:
        layer = self.draft.model.layers[0]
        return torch.cat([layer.input_layernorm(self.draft.embed_input_ids(tokens)), layer.hidden_norm(states)], dim=-1)

    def write(self, pre_kv: Tensor, position: Tensor) -> None:
        latents = self.draft.model.layers[0].self_attn.latents(pre_kv, position)
        self.latents.scatter_(1, position[..., None].expand_as(latents), latents)

    def attend(self, q: Tensor, position: Tensor) -> Tensor:
        """o [B,n,1,Dv] of q [B,n,1,Dn+Dr] over all latents up to position [B,1], the up-projections absorbed."""
        later = torch.arange(self.max_tokens, device=q.device) > position
        return self.draft.model.layers[0].self_attn.latent_attention(q, self.latents, "b j", later[:, None, None])[0]


# --------------------------------------------------------------------------------------------- verified by the target
# A verifier gives states(tokens [B,m]) behind the tokens kept so far: features [B,m,3H] and last hidden states [B,m,H];
# keep(counts [B]) then keeps the first so many of these m tokens in each row.


class Cropped:
    """An attention cache: what no row keeps is cropped, the rest of what a row rejects is masked, a hole for good."""

    def __init__(self, target, rows: int):
        self.target, self.cache = target, None
        self.kept = torch.zeros(rows, 0, dtype=torch.long, device=target.device)  # [B, columns of the cache]

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.m, mask = tokens.shape[1], torch.cat([self.kept, torch.ones_like(tokens)], dim=1)
        position = self.kept.sum(1, keepdim=True) + torch.arange(self.m, device=tokens.device)
        features, last, self.cache = self.target.run(tokens, self.cache, attention_mask=mask, position_ids=position)
        return features, last

    def keep(self, counts: Tensor) -> None:
        width = int(counts.max())
        if width < self.m:
            self.cache.crop(width - self.m)
        mask = torch.arange(width, device=counts.device) < counts[:, None]
        self.kept = torch.cat([self.kept, mask.long()], dim=1)


class Snapshots:
    """A cache that cannot forget (recurrent states): it is copied first, and runs again over what is kept of a chain.

    Each row runs alone, since rows keep different numbers of tokens.
    """

    def __init__(self, target, rows: int):
        self.target, self.caches = target, [None] * rows

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens, self.before = tokens, copy.deepcopy(self.caches)
        *states, self.caches = zip(*map(self.target.run, tokens[:, None], self.caches), strict=True)
        return tuple(torch.cat(x) for x in states)

    def keep(self, counts: Tensor) -> None:
        self.caches = list(self.caches)
        for r, n in enumerate(counts.tolist()):
            if n < self.tokens.shape[1]:
                self.caches[r] = self.before[r]
            if 0 < n < self.tokens.shape[1]:
                self.caches[r] = self.target.run(self.tokens[r : r + 1, :n], self.caches[r])[2]


class WholeText:
    """No cache: the target runs over the whole text each time."""

    def __init__(self, target, rows: int):
        self.target, self.kept = target, [torch.zeros(0, dtype=torch.long, device=target.device)] * rows

    def states(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        self.tokens = tokens
        captured = self.target.capture([torch.cat(pair) for pair in zip(self.kept, tokens, strict=True)])
        return tuple(torch.stack([x[-tokens.shape[1] :] for x in states]) for states in zip(*captured, strict=True))

    def keep(self, counts: Tensor) -> None:
        rows = zip(self.kept, self.tokens, counts.tolist(), strict=True)
        self.kept = [torch.cat([kept, tokens[:n]]) for kept, tokens, n in rows]


@torch.no_grad()
def choose_verifier(target, rows: int = 1) -> type:
    """What suits the target's cache. It is believed only when going on from it gives what the whole text gives."""
    if target.cache_name is None:
        return WholeText
    ids = torch.arange(6, device=target.device)[None] % target.vocab_size
    whole, cache = target.states(ids)[1], target.run(ids[:, :3])[2]
    layers = {type(layer) for layer in cache.layers} if isinstance(cache, DynamicCache) else None
    gap = (target.run(ids[:, 3:], cache)[1] - whole[:, 3:]).abs().max()
    if gap > max(1e-4, 16 * torch.finfo(target.dtype).eps) * whole.abs().max():
        return WholeText
    return Cropped if layers == {DynamicLayer} and (rows == 1 or target.sees_no_padding) else Snapshots
