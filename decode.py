"""Drafting and verification: how many tokens a draft saves, walked over training metrics and really decoded.

Shapes: B rows, T slots, A anchors, S steps, H hidden, L tokens of a prompt, K drafted tokens per round.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from draft_deepseek import Metrics, RowBatch

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


def walk(rows: RowBatch, metrics: Metrics, k: int | None = None) -> Accepted:
    """Accept length of chains that start where the last one ended, as an engine's do; k at most S, None for S.

    Over each maximal run of slots valid at step 0, from its first slot: n = hits in a row, at most what is left of the
    run; one round gives n + 1 tokens, and the next starts n + 1 slots on. Over the target's own greedy output that is
    greedy speculative decoding.
    """
    chain = metrics.hit[:k].long().cumprod(0).sum(0).cpu()  # [B,A]
    first, slots = rows.valid[0].cpu(), rows.anchors.cpu()
    total = Accepted(0, 0)
    for b in range(len(slots)):
        at = slots[b][first[b]].tolist()
        hits = chain[b][first[b]].tolist()
        begins = [i for i, t in enumerate(at) if i == 0 or at[i - 1] != t - 1]
        for begin, end in zip(begins, [*begins[1:], len(at)], strict=True):
            i = begin
            while i < end:
                n = min(hits[i], end - i)
                total, i = total + Accepted(n + 1, 1), i + n + 1
    return total


# ------------------------------------------------------------------------------------------------ drafting with a cache


class DraftCache:
    """The draft's latents [B, max_tokens, R+Dr] by position: static, and all that drafting keeps per token."""

    def __init__(self, draft: nn.Module, batch: int, max_tokens: int):
        cfg, weight = draft.config, draft.lm_head.weight
        width = cfg.kv_lora_rank + cfg.qk_rope_head_dim
        self.latents = torch.zeros(batch, max_tokens, width, dtype=weight.dtype, device=weight.device)


@torch.no_grad()
def draft_states(draft: nn.Module, cache: DraftCache, tokens: Tensor, states: Tensor, position: Tensor) -> Tensor:
    """The states a [B,m,H] of m slots at once: tokens [B,m] that they feed, states [B,m,H] (features, or the last a),
    position [B,m]. Writes their latents and attends, absorbed, to all up to each one's position.
    """
    layer = draft.model.layers[0]
    attn = layer.self_attn
    fused = [layer.input_layernorm(draft.embed_input_ids(tokens)), layer.hidden_norm(states)]
    pre_q, pre_kv, pre_gate = attn.project(torch.cat(fused, dim=-1))
    latents = attn.latents(pre_kv, position)
    cache.latents.scatter_(1, position[..., None].expand_as(latents), latents)
    later = torch.arange(cache.latents.shape[1], device=tokens.device) > position[..., None]
    o, _ = attn.latent_attention(attn.queries(pre_q, position), cache.latents, "b j", later[:, None])
    a = layer.finish(states, attn.output(o, pre_gate))
    return draft.model.norm(a) if draft.config.norm_output else a


@torch.no_grad()
def draft_chain(
    draft: nn.Module, cache: DraftCache, tokens: Tensor, features: Tensor, position: Tensor, k: int
) -> Tensor:
    """K target ids [B,K] drafted greedily after `tokens` [B,m], whose last one the target has just said.

    features [B,m,H] projected, of the slots that feed those tokens (the token before each), position [B,m] of those
    slots.
    """
    ids, a, chain = draft.draft_ids, draft_states(draft, cache, tokens, features, position)[:, -1:], []
    for step in range(1, k + 1):
        chain.append(ids[draft.compute_logits(a).argmax(-1)])
        if step < k:
            a = draft_states(draft, cache, chain[-1], a, position[:, -1:] + step)
    return torch.cat(chain, dim=1)


# ----------------------------------------------------------------------------------------------- verified by the target


@torch.no_grad()
def speculative_greedy(
    draft: nn.Module, target, prompt: Tensor, max_new_tokens: int, k: int
) -> tuple[Tensor, Accepted]:
    """Greedy speculative decoding after prompt [L] (end-of-turn tokens do not stop it): the new tokens, which equal the
    target's own greedy ones, and what the rounds accepted. The first token comes with the prompt and belongs to no
    round.

    The target runs over the whole text each round, without a cache of its own.
    """
    cache = DraftCache(draft, 1, len(prompt) + max_new_tokens + k)
    features, last = target.states(prompt[None].to(target.device))
    tokens = torch.cat([prompt.to(target.device), target.head(last[0, -1:]).argmax(-1)])
    wanted, seen, rounds = len(prompt) + max_new_tokens, 0, 0
    while len(tokens) < wanted:
        m = len(tokens) - 1  # slots whose features are known; the draft has cached `seen` of them
        fresh = torch.arange(seen, m, device=tokens.device)[None]
        projected = draft.project_hidden_states(features[:, seen:m])
        chain = draft_chain(draft, cache, tokens[None, seen + 1 :], projected, fresh, k)[0]
        seen, rounds = m, rounds + 1
        features, last = target.states(torch.cat([tokens, chain])[None])
        said = target.head(last[0, m:]).argmax(-1)  # after the last token, and after each drafted one
        n = int((said[:-1] == chain).long().cumprod(0).sum())
        tokens = torch.cat([tokens, said[: n + 1]])
    new = tokens[len(prompt) : wanted]
    return new, Accepted(len(new) - 1, rounds)
