"""What a draft is worth on what is held out: accept lengths over rows of it, and its prompts decoded for real.

An accept length belongs to the text that it was measured on. Rows are the documents' own text, which the target would
often say otherwise; what is decoded is the target's, as a user gets it.
"""

import itertools
from functools import partial

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.documents import prompt_and_answer
from draft_deepseek import RowChunks, TTTLoss
from serving.decode import BUCKETS, Accepted, Drafter, speculative, unique_bigrams, walk_by_bucket
from serving.slots import Judged, judge, walk_sampled
from target.model import Target
from training.compiling import autocast
from training.ranks import Ranks
from training.rows import FollowedRows, Rows
from training.settings import Settings
from training.sources import Source


@torch.no_grad()
def evaluate(args: Settings, ranks: Ranks, loss: TTTLoss, held_out: Rows | FollowedRows) -> dict:
    """Over held-out rows: accept lengths at S drafted tokens (simulated, walked), greedy and of sampling at temperature
    1, by position too, and accuracy per step, all pooled. `on_policy` is the share of learned tokens that are the
    teacher's own choice. Without the `sampled_` ones where the states do not tell the teacher's whole distribution."""
    new, buckets = dict(dtype=torch.float64, device=args.device), len(BUCKETS)
    walked, chains = torch.zeros(2, buckets, 2, **new), torch.zeros(3, buckets, args.ttt_steps, **new)
    steps, own = torch.zeros(2, args.ttt_steps, **new), torch.zeros(2, **new)
    for rows in held_out.some(args.eval_rows, ranks):
        with autocast(args):
            judged = judge(loss, rows)
        walks = walk_by_bucket(rows, judged), walk_sampled(rows, judged)
        walked += torch.tensor([list(walk.values()) for walk in walks], **new)
        chains += chains_by_bucket(rows, judged).to(args.device)
        steps += torch.stack([judged.hit.sum((1, 2)).to(args.device), rows.supervised])
        own += torch.tensor(on_policy(rows), **new)
    walked, chains, (hits, supervised), (same, learned) = (ranks.sum(x) for x in (walked, chains, steps, own))
    return accept_lengths(walked.sum(1), chains.sum(1)) | {
        "accuracy": (hits / supervised.clamp(min=1)).tolist(),
        "on_policy": float(same / learned.clamp(min=1)),
        "by_position": {
            name: accept_lengths(walked[:, i], chains[:, i]) for i, name in enumerate(BUCKETS) if walked[0, i, 1] > 0
        },
    }


def accept_lengths(walked: Tensor, chains: Tensor) -> dict:
    """walked [2,2]: (tokens, rounds) of the greedy walk, then of sampling's; chains [3,S] as below."""
    greedy, sampled = (Accepted(*walk).length for walk in walked.tolist())
    hits, overlaps, valid = chains
    simulated, sampled_simulated = (1 + float((x / valid.clamp(min=1)).sum()) for x in (hits, overlaps))
    found = {"simulated": simulated, "walked": greedy, "slots": int(valid[0])}
    if walked[1, 1] > 0:
        found |= {"sampled_simulated": sampled_simulated, "sampled_walked": sampled}
    return found


def chains_by_bucket(rows: RowChunks, judged: Judged) -> Tensor:
    """[3,buckets,S] by the position that chains start at: those right up to step s, those accepted up to step s were
    each token drafted by sampling (a mean), and valid ones."""
    position = rows.position.cpu().gather(1, rows.anchors.clamp(min=0))
    chains = torch.stack([judged.hit & rows.valid, judged.overlap, rows.valid]).double().cumprod(1)  # [3,S,B,A]
    ends = [0, *BUCKETS.values()]
    inside = torch.stack([(position >= a) & (position < b) for a, b in itertools.pairwise(ends)])
    return torch.einsum("csba,kba->cks", chains, inside.double())


def on_policy(rows: RowChunks) -> tuple[int, int]:
    """How many learned tokens are what the target would have said greedily, and of how many."""
    counted, right = rows.learned[:, :-1] & rows.learned[:, 1:], rows.choice[:, :-1] == rows.tokens[:, 1:].cpu()
    return int((counted & right).sum()), int(counted.sum())


def decode_for_real(args: Settings, source: Source, draft: nn.Module) -> dict:
    """Speculative decoding behind held-out prompts, and the share of distinct bigrams of what it says and of what the
    documents say there. Sampled at temperature 1; `greedy_` behind the first quarter of them, whose tokens the target
    says again alone."""
    documents = source.held_out[: args.decode_prompts] if isinstance(source.target, Target) else []  # else its states
    cuts = [cut for cut in map(partial(prompt_and_answer, middle=not args.data), documents) if len(cut[0])]
    prompts, n = [prompt for prompt, _ in cuts], args.decode_tokens
    few = prompts[: -(-len(prompts) // 4)]
    sampled, greedy = (decode(args, source.target, draft, *how) for how in ((prompts, 1.0), (few, 0.0)))
    bar = tqdm(zip(few, greedy, strict=True), "the target alone", len(few), unit="prompt", disable=not few)
    return {
        "prompts": len(prompts),
        **summed(sampled),
        **{f"greedy_{name}": x for name, x in {"prompts": len(few), **summed(greedy)}.items()},
        "identical": sum(torch.equal(x.tokens, source.target.greedy(prompt, n).cpu()) for prompt, x in bar),
        "held_out_bigrams": unique_bigrams([answer[:n].tolist() for _, answer in cuts]),
    }


def decode(args: Settings, target: Target, draft: nn.Module, prompts: list[Tensor], temperature: float) -> list:
    """`Decoded` of every prompt, as many at once as states are captured at once."""
    done, lengths = [None] * len(prompts), [len(prompt) + args.decode_tokens for prompt in prompts]
    with tqdm(total=len(prompts), desc="decoding", unit="prompt", disable=not prompts) as bar:
        for batch in target.batches(lengths) if prompts else ():
            drafter = Drafter(draft, len(batch), max(lengths[i] for i in batch), args.ttt_steps, temperature)
            some = [prompts[i] for i in batch]
            for i, one in zip(batch, speculative(drafter, target, some, args.decode_tokens, seed=bar.n), strict=True):
                done[i] = one
            bar.update(len(batch))
    return done


def summed(decoded: list) -> dict:
    accepted = sum((one.accepted for one in decoded), Accepted(0, 0))
    bigrams = unique_bigrams([one.tokens.tolist() for one in decoded])
    return {"rounds": accepted.rounds, "decoded": accepted.length, "bigrams": bigrams}
