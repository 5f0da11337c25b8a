"""What a draft and its target say at every slot of a text, and what sampling at temperature 1 would accept of it.

A drafted token x is accepted with probability min(1, P(x) / q(x)), so where the target went on with x, x had been
drafted and accepted with probability r = min(1, q(x) / P(x)). With the tokens of a text that the target sampled, r says
how often each of its slots starts a chain, and so how many rounds the text took on average: exactly, whatever the
tokens are. A mean over all slots is an estimate alone, since chains start only where the last one ended.

Shapes: B rows, T slots, A anchors, S steps, K drafted tokens of a chain, V target and Vd draft vocabulary; P the
target's probabilities, c their sum over the draft ids, p = P/c there, q the draft's.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from draft_deepseek import Keys, RowBatch, RowChunks, TTTLoss, upcast
from serving.decode import BUCKETS, Accepted, bucket, runs


class Judged(NamedTuple):
    """Of all anchors and steps [S,B,A], on the CPU."""

    hit: Tensor  # supervised, and both would say the same token
    overlap: Tensor  # sum_v min(P, q), the probability that a drafted token is accepted; 0 where nothing is valid
    kept: Tensor  # r of the token that the text goes on with, 0 where it is none of the draft's
    known: Tensor  # whether the text goes on with a token that the target is to have said


@torch.no_grad()
def judge(loss: TTTLoss, rows: RowChunks) -> Judged:
    """A forward pass of `loss` over all chunks; nothing outlives a chunk but these numbers.

    Where the states are probabilities of the draft ids alone, c is unknown: no slot is `known`, and `overlap` is 0.
    """
    leaves, mass, found = loss.read(rows), torch.zeros(rows.learned.shape, device=rows.features.device), []
    goes_on = rows.learned & F.pad(rows.learned[:, 1:], (0, 1))
    if rows.last_hidden.shape[-1] == loss.draft.config.target_hidden_size:
        mass = draft_mass(rows, mass)
    else:
        goes_on = torch.zeros_like(goes_on)
    for chunk in rows:
        found.append(judge_chunk(loss, leaves.keys, rows, chunk, mass, goes_on))
    return Judged(*(torch.cat(x, dim=-1) for x in zip(*found, strict=True)))


def draft_mass(rows: RowChunks, mass: Tensor) -> Tensor:
    """c [B,T] of what follows each learned token; elsewhere `mass`."""
    for row, token, logits in rows.logits(rows.learned):
        logits = upcast(logits)
        share = logits[:, rows.draft_ids.to(logits.device)].logsumexp(-1) - logits.logsumexp(-1)
        mass[row.to(mass.device), token.to(mass.device)] = share.exp().to(mass)
    return mass


def judge_chunk(loss: TTTLoss, keys: Keys, rows: RowChunks, chunk: RowBatch, mass: Tensor, goes_on: Tensor) -> Judged:
    """mass, goes_on [B,T]: c behind each token, and whether the token behind it is known."""
    draft, steps, device = loss.draft, len(chunk.valid), chunk.tokens.device
    x = loss.unroll(keys, chunk)
    x = x if draft.config.norm_output else draft.model.norm(x)
    slots = chunk.anchors.clamp(min=0)
    fed = (slots + torch.arange(1, steps + 1, device=device)[:, None, None]).clamp(max=chunk.tokens.shape[1] - 1)

    def at_fed(y: Tensor) -> Tensor:
        return y.to(device).expand(steps, -1, -1).gather(2, fed)

    first = rows.rank.to(device).gather(1, slots[:, :1]) + 1  # learned token that the table of p begins with
    index = torch.where(chunk.valid, at_fed(rows.rank) - first, 0)
    index = index + torch.arange(len(mass), device=device)[:, None] * chunk.teacher.shape[1]
    drafted = torch.full((draft.config.vocab_size,), -1, device=device)
    drafted[draft.draft_ids] = torch.arange(len(draft.draft_ids), device=device)
    token = at_fed(drafted[F.pad(chunk.tokens[:, 1:], (0, 1))])
    flat = [rearrange(y, "s b a ... -> (s b a) ...") for y in (x, index, at_fed(mass), token)]
    found = compare(*flat, draft.lm_head.weight, chunk.teacher.flatten(0, 1), loss.logits_rows)
    same, overlap, kept = (y.view_as(fed) for y in found)
    known = chunk.valid & at_fed(goes_on)
    judged = same & (chunk.teacher_index >= 0), overlap * chunk.valid, kept * known, known
    return Judged(*(y.cpu() for y in judged))


def compare(x, index, mass, token, weight, teacher, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(whether the argmaxes agree, sum_v min(P, q), r), [N] each, of states x [N,H]; logits exist for `rows` at a time.

    teacher [U,Vd] with its row per state in index [N]; token [N] is the text's own as a draft id, -1 where it is none.
    """
    w, found = weight.to(x.dtype), []
    for xc, i, c, said in zip(*(y.split(rows) for y in (x, index, mass, token)), strict=True):
        p, z = teacher[i], upcast(xc @ w.T)
        same = z.argmax(-1) == p.argmax(-1)
        p, q = c[:, None] * p, z.softmax(-1)
        p_x, q_x = (y.gather(-1, said.clamp(min=0)[:, None])[:, 0] for y in (p, q))
        r = torch.where(q_x < p_x, q_x / p_x, 1.0)
        found.append((same, torch.minimum(p, q).sum(-1), torch.where(said < 0, 0.0, r)))
    return tuple(torch.cat(y) for y in zip(*found, strict=True))


def walk_sampled(rows: RowBatch | RowChunks, judged: Judged, k: int | None = None) -> dict[str, Accepted]:
    """Expected tokens and rounds of sampling the text of `rows`, by BUCKETS of the positions that chains start at.

    Each maximal run of slots whose next token is known is a text, its first slot the start of a round. A round that
    starts at a slot with probability v has its first n drafted tokens accepted and no more with probability
    r_1 .. r_n (1 - r_n+1), none behind the k-th, and the next one starts n + 1 slots on. Every slot is one token, of
    the round that it fell to, and what lies past the end of a run counts nowhere.
    """
    chain = F.pad(judged.kept[:k].double().cumprod(0), (0, 0, 0, 0, 1, 1))
    chain[0] = 1.0  # chain[n]: at least n are accepted
    total = dict.fromkeys(BUCKETS, Accepted(0, 0))
    for where, stand in runs(rows, judged.known[0], rearrange(chain, "n b a -> b a n")):
        starts = [1.0] + [0.0] * (len(where) - 1)
        for i, (v, at_least) in enumerate(zip(starts, stand, strict=True)):
            left = len(where) - i
            total[bucket(where[i])] += Accepted(v * sum(at_least[:left]), v)
            for n in range(min(len(at_least), left) - 1):
                starts[i + n + 1] += v * (at_least[n] - at_least[n + 1])
    return total
