"""A trained draft in the real vLLM beside `serving/decode.py`: the same weights, tokens, rounds and logits?

    python -m measuring.engine ENGINE_PYTHON --run runs/NAME --k 3 7

Run by hand; ENGINE_PYTHON is the python of an environment with vLLM 0.32 (and, for a Kimi K3 draft, the plug-in:
`pip install --no-deps serving/kimi_k3_vllm`). Both decode the same prompts greedily, one at a time: all of --prompts,
or of the held-out ones with at least half of their bigrams distinct those that are continued with the most. (More
--new-tokens check less where a target soon repeats itself, as the tiny ones do.) A line per chain length, exit code 1
where the two differ. In bfloat16 texts part at near ties of the target's own logits: take float32, of the exported
draft as well.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from measuring.decoding import draft_directory, load_prompts, open_run
from serving.decode import Drafter, speculative, unique_bigrams
from target.model import Target
from training.entry import ending
from training.settings import OneLineParser, as_path, as_text

CLOSE = 1e-4  # largest difference of logits over the largest logit
VARIED = 0.5  # share of a prompt's bigrams that are distinct, at least
KERNELS = (512, 64)  # kv_lora_rank and qk_rope_head_dim that vLLM's own attention is made for


def main(argv=None) -> None:
    args = parse(argv)
    draft, target = open_run(args)
    texts = choose(args, target)
    sound = [check(args, k, draft, target, texts) for k in args.k]
    if not all(sound):
        sys.exit(1)


def parse(argv):
    parser = OneLineParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=as_text, help="the python of vLLM's environment")
    parser.add_argument("--run", type=as_path, required=True, help="a run, or an exported draft")
    parser.add_argument("--model", type=as_text, help="its target's directory; default: the run's own")
    parser.add_argument("--k", nargs="+", type=int, default=[3, 7], help="drafted tokens of a chain, default 3 7")
    parser.add_argument("--prompts", type=as_path, help="a JSON list of token-id lists; default: held-out documents")
    parser.add_argument("--prompt-count", type=int, default=96, help="held-out documents looked at, default 96")
    parser.add_argument("--most", type=int, default=12, help="of them that are taken, default 12")
    parser.add_argument("--new-tokens", type=int, default=24, help="of every prompt, default 24")
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel; from 2 on no logits or loading")
    parser.add_argument("--device", default="cpu", help="of this side, default cpu")
    return parser.parse_args(argv)


def choose(args, target: Target) -> list[tuple[Tensor, list[int]]]:
    """Prompts and the target's own continuations. ValueError: held-out prompts that all repeat themselves."""
    prompts = load_prompts(args, target)
    if not args.prompts:
        prompts = [prompt for prompt in prompts if unique_bigrams([prompt.tolist()]) >= VARIED]
        if not prompts:
            raise ValueError(f"no held-out prompt has {VARIED:.0%} of its bigrams distinct; give others by --prompts")
    texts = [(prompt, target.greedy(prompt, args.new_tokens).tolist()) for prompt in prompts]
    return texts if args.prompts else sorted(texts, key=lambda pair: unique_bigrams([pair[1]]))[-args.most :]


def check(args, k: int, draft: nn.Module, target: Target, texts: list[tuple[Tensor, list[int]]]) -> bool:
    """Prints one line of numbers of prompts and the target's own continuations, and whether they are the engine's."""
    prompts, own = zip(*texts, strict=True)
    ours = [decode(args, k, draft, target, prompt) for prompt in prompts]
    answer = ask_engine(args, k, draft, target, prompts)
    engine, unfilled = answer["prompts"], answer["unfilled"]
    same = sum(a["tokens"] == b["tokens"] == plain for a, b, plain in zip(ours, engine, own, strict=True))
    rounds = [[x["rounds"] for x in side] for side in (ours, engine)]
    varied = [unique_bigrams(each) for each in (own, [prompt.tolist() for prompt in prompts])]
    errors = [difference(a["logits"], b["logits"]) for a, b in zip(ours, engine, strict=True) if args.ranks == 1]
    left = "not seen" if unfilled is None else ", ".join(unfilled) or "none"
    print(
        f"{type(draft).__name__}, K {k}, {args.ranks} ranks: {same} of {len(prompts)} texts the same (and greedy), "
        f"{varied[0]:.0%} of their bigrams distinct, {varied[1]:.0%} of the prompts'; "
        f"rounds {sum(rounds[0])} here, {sum(rounds[1])} in vLLM; logits "
        f"{f'within {max(errors):.1e}' if errors else 'not seen'}; "
        f"parameters that the files left empty: {left}",
        flush=True,
    )
    return same == len(prompts) and rounds[0] == rounds[1] and all(x <= CLOSE for x in errors) and not unfilled


def decode(args, k: int, draft: nn.Module, target: Target, prompt: Tensor) -> dict:
    """Tokens, rounds and all logits [steps, Vd] of a prompt's chains."""
    drafter, logits = Drafter(draft, 1, len(prompt) + args.new_tokens, k), []
    compute = type(draft).compute_logits

    def seen(a):
        logits.append(compute(draft, a)[0].float())
        return logits[-1][None]

    drafter.draft.compute_logits = seen
    try:
        (decoded,) = speculative(drafter, target, [prompt], args.new_tokens)
    finally:
        del drafter.draft.compute_logits
    return {"tokens": decoded.tokens.tolist(), "rounds": len(decoded.rounds), "logits": torch.cat(logits).cpu()}


def difference(ours: Tensor, engine: Tensor) -> float:
    """Largest, over the largest logit; vLLM may draft once more behind the last token."""
    n = len(ours)
    return float((ours - engine[:n]).abs().max() / ours.abs().max()) if n <= len(engine) else float("inf")


def ask_engine(args, k: int, draft: nn.Module, target: Target, prompts: list[Tensor]) -> dict:
    """What `in_engine.py` gives. ValueError: vLLM fails, with its last line."""
    cfg = draft.config
    request = {
        "target": str(target.config.name_or_path),
        "draft": str(draft_directory(args.run)),
        "architecture": draft.engine_architecture,
        "any_latent": (cfg.kv_lora_rank, cfg.qk_rope_head_dim) != KERNELS,
        "dtype": str(target.dtype).removeprefix("torch."),
        "longest": max(map(len, prompts)) + args.new_tokens + 2 * k,
        "prompts": [prompt.tolist() for prompt in prompts],
        "new_tokens": args.new_tokens,
        "ranks": args.ranks,
        "k": k,
    }
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "request.json", Path(folder) / "answer.pt"
        source.write_text(json.dumps(request))
        command = [args.engine, Path(__file__).with_name("in_engine.py"), source, out]
        ended = subprocess.run(command, capture_output=True, text=True)
        if ended.returncode or not out.exists():
            reasons = [line for line in ended.stderr.splitlines() if "Error" in line] or ended.stderr.splitlines()[-1:]
            raise ValueError(f"{args.engine} ended with exit code {ended.returncode}: {'; '.join(reasons)[:500]}")
        return torch.load(out)


if __name__ == "__main__":
    sys.exit(ending("measuring.engine", main, None, ""))
