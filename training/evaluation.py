"""What a draft is worth on what is held out: accept lengths over rows of it, and its prompts decoded for real."""

import itertools

import torch
from torch import Tensor, nn
from tqdm import tqdm

from draft_deepseek import Metrics, RowChunks, TTTLoss
from serving.decode import BUCKETS, Accepted, Drafter, choose_verifier, speculative, walk_by_bucket
from target.model import Target
from training.compiling import autocast
from training.ranks import Ranks
from training.rows import FollowedRows, Rows
from training.settings import Settings
from training.sources import Source


@torch.no_grad()
def evaluate(args: Settings, ranks: Ranks, loss: TTTLoss, held_out: Rows | FollowedRows) -> dict:
    """Over held-out rows: accept lengths at S drafted tokens (simulated, walked), by position too, and accuracy per
    step, all pooled; `on_policy` is the share of learned tokens that are the teacher's own choice."""
    new = dict(dtype=torch.float64, device=args.device)
    walked, chains = torch.zeros(len(BUCKETS), 2, **new), torch.zeros(len(BUCKETS), 2, args.ttt_steps, **new)
    steps, own = torch.zeros(2, args.ttt_steps, **new), torch.zeros(2, **new)
    for rows in held_out.some(args.eval_rows, ranks):
        with autocast(args):
            _, m = loss.learn(rows)
        walked += torch.tensor(list(walk_by_bucket(rows, m).values()), **new)
        chains += chains_by_bucket(rows, m).to(args.device)
        steps += torch.stack([m.step_hits, m.step_supervised])
        own += torch.tensor(on_policy(rows), **new)
    walked, chains, (hits, supervised), (same, learned) = (ranks.sum(x) for x in (walked, chains, steps, own))
    return accept_lengths(walked.sum(0), chains.sum(0)) | {
        "accuracy": (hits / supervised.clamp(min=1)).tolist(),
        "on_policy": float(same / learned.clamp(min=1)),
        "by_position": {
            name: accept_lengths(w, c) for name, w, c in zip(BUCKETS, walked, chains, strict=True) if w[1] > 0
        },
    }


def accept_lengths(walked: Tensor, chains: Tensor) -> dict:
    """walked (tokens, rounds), chains [2,S] (right up to step s, valid up to s)."""
    hits, valid = chains
    simulated = 1 + float((hits / valid.clamp(min=1)).sum())
    return {"simulated": simulated, "walked": Accepted(*walked.tolist()).length, "slots": int(valid[0])}


def chains_by_bucket(rows: RowChunks, m: Metrics) -> Tensor:
    """[buckets,2,S]: chains right up to step s, and valid ones, by the position they start at."""
    position = rows.position.cpu().gather(1, rows.anchors.clamp(min=0))
    chains = torch.stack([m.hit.cpu() & rows.valid, rows.valid]).long().cumprod(1)  # [2,S,B,A]
    ends = [0, *BUCKETS.values()]
    inside = torch.stack([(position >= a) & (position < b) for a, b in itertools.pairwise(ends)])
    return torch.einsum("csba,kba->kcs", chains.double(), inside.double())


def on_policy(rows: RowChunks) -> tuple[int, int]:
    """How many learned tokens are what the target would have said greedily, and of how many."""
    document, tokens = (x.cpu() for x in (rows.document, rows.tokens))
    counted = rows.learned[:, :-1] & (document[:, 1:] == document[:, :-1])
    return int((counted & (rows.choice[:, :-1] == tokens[:, 1:])).sum()), int(counted.sum())


def decode_for_real(args: Settings, source: Source, draft: nn.Module) -> dict:
    """Greedy speculative decoding after held-out prompts, its tokens compared with the target's own greedy ones."""
    accepted, same, target = Accepted(0, 0), 0, source.target
    prompts = [d.tokens[: int(d.loss_mask.int().argmax())] for d in source.held_out[: args.decode_prompts]]
    prompts = [prompt for prompt in prompts if len(prompt)]
    if not isinstance(target, Target):
        prompts = []  # only its states were at hand
    verifier = choose_verifier(target) if prompts else None
    for prompt in tqdm(prompts, desc="decoding", unit="prompt", disable=not prompts):
        drafter = Drafter(draft, 1, len(prompt) + args.decode_tokens, args.ttt_steps)
        (decoded,) = speculative(drafter, target, [prompt], args.decode_tokens, verifier=verifier)
        accepted += decoded.accepted
        same += torch.equal(decoded.tokens, target.greedy(prompt, args.decode_tokens).cpu())
    return {"prompts": len(prompts), "identical": same, "rounds": accepted.rounds, "decoded": accepted.length}
