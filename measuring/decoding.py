"""What drafting costs, and what a trained draft saves: the "decode" suite of bench.py.

    python bench.py --suite decode                           a chain of 7 tokens, mid size, beside naive K/V caches
    python bench.py --suite decode --run runs/deepseek-v3    a trained draft beside its target alone, really decoded
    python bench.py --suite decode --run DIR --model PATH --prompts FILE.json --k 3 7 --temperature 0.8 --top-p 0.95

Chains: one call drafts K tokens for every row behind `--context` cached ones. The naive form caches up-projected keys
and values, n (Dn + Dr + Dv) numbers a token instead of R + Dr; its weights and all else are the same. They must agree
before a time is printed (else exit code 1). Bytes are those that must move: each weight once a step, however many rows,
and the whole static cache of every row; their rate is compared with that of a large matrix-vector product (weights
that fit into the processor's own cache move faster than that).

Runs: prompts are decoded one at a time, greedily and, with `--temperature`, sampled. Plain decoding with the same
target takes turns with speculative decoding, prompt by prompt: trust the ratio. Greedy texts must be identical.

Shapes: B rows, M slots of the draft's cache, K drafted tokens, n heads, R kv_lora_rank, Dn/Dr/Dv head widths.
"""

import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from data.conversations import answered
from data.corpus import python_documents
from data.documents import prompt_and_answer
from data.files import check_regular, naming
from draft_deepseek import upcast
from measuring.costs import clock, memory_of
from serving.decode import (
    Accepted,
    Drafter,
    by_bucket,
    by_depth,
    choose_verifier,
    distribution,
    pick,
    speculative,
    streams,
    unique_bigrams,
)
from target.model import Target, load_target
from target.tiny import tiny_target
from training.drafts import load_draft
from training.settings import as_path, as_text, read_settings
from training.sources import TINY


def add_flags(parser) -> None:
    group = parser.add_argument_group("the decode suite")
    group.add_argument("--k", nargs="+", type=int, default=[7], help="drafted tokens of a chain, default 7")
    group.add_argument(
        "--context", nargs="+", type=int, default=[4096], help="slots of the draft's cache, default 4096"
    )
    group.add_argument("--batch", type=int, default=1, help="rows that draft at once, default 1")
    group.add_argument("--run", type=as_path, help="a run, or an exported draft: decode with it")
    group.add_argument("--model", type=as_text, help="its target's directory; default: the run's own")
    group.add_argument(
        "--prompts", type=as_path, help="a JSON list of token-id lists; default: held-out documents, cut in the middle"
    )
    group.add_argument("--prompt-count", type=int, help="of them, default 12; to a server twice what is at once")
    group.add_argument("--new-tokens", type=int, default=64, help="of every prompt, default 64")
    group.add_argument("--temperature", type=float, default=0.0, help="above 0: sample as well")
    group.add_argument("--top-p", type=float, default=1.0)


def bounds(args) -> list[tuple[str, list, float, float]]:
    """(flag, its values, the least and the most that they may be)"""
    return [
        ("k", args.k, 1, 64),
        ("context", args.context, 2 * max(args.k) + 1, 1 << 20),
        ("batch", [args.batch], 1, 4096),
        ("prompt-count", [args.prompt_count], 1, 10_000),
        ("new-tokens", [args.new_tokens], 2, 1 << 16),
        ("temperature", [args.temperature], 0, 100),
    ]


def suite(args, make_drafts: Callable[[], dict[str, nn.Module]], print_table: Callable) -> dict:
    """Chains of the given drafts (by name), or the decoding of `--run`. ValueError: a value that cannot be used."""
    torch.set_num_threads(args.threads)
    rows, head, full = decode_run(args) if args.run else time_chains(args, make_drafts())
    print_table(tuple(head), [tuple(form(row) for form in head.values()) for row in rows])
    return {"suite": "decode", "machine": machine(args), "rows": rows, "cells": full}


def machine(args) -> dict:
    device = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu, {args.threads} threads"
    return {"torch": torch.__version__, "device": device, "threads": args.threads}


# --------------------------------------------------------------------------------------------------- chains of tokens


class NaiveDrafter(Drafter):
    """The same draft over caches of up-projected keys [B,n,M,Dn+Dr] and values [B,n,M,Dv]."""

    def __init__(self, draft, rows, max_tokens, k, temperature=0.0, top_p=1.0):
        super().__init__(draft, rows, max_tokens, k, temperature, top_p)
        cfg, new, n = draft.config, self.latents.new_zeros, draft.config.num_attention_heads
        self.latents = None
        self.register_buffer("keys", new(rows, n, self.max_tokens, cfg.qk_head_dim), persistent=False)
        self.register_buffer("values", new(rows, n, self.max_tokens, cfg.v_head_dim), persistent=False)

    def write(self, pre_kv: Tensor, position: Tensor) -> None:
        attn = self.draft.model.layers[0].self_attn
        new = attn.keys_values(attn.latents(pre_kv, position))
        for cache, x in zip((self.keys, self.values), new, strict=True):
            cache.scatter_(2, position[:, None, :, None].expand_as(x), x)

    def attend(self, q: Tensor, position: Tensor) -> Tensor:
        later = torch.arange(self.max_tokens, device=q.device) > position
        scores = upcast(q @ self.keys.mT) * self.draft.model.layers[0].self_attn.scaling
        return scores.masked_fill(later[:, None, None], float("-inf")).softmax(-1).to(q.dtype) @ self.values


def time_chains(args, drafts: dict[str, nn.Module]) -> tuple[list[dict], dict, list]:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    bandwidth, rows, full = memory_bandwidth(args.device, dtype), [], []
    print(f"chains by {str(dtype).removeprefix('torch.')}, reading memory at {bandwidth / 1e9:,.1f} GB/s", flush=True)
    for name, draft in drafts.items():
        draft = draft.to(dtype).requires_grad_(False)
        check_memory(args, draft)
        for k in args.k:
            for context in args.context:
                torch._dynamo.reset()  # or it counts every shape against its limit
                drafters = {kind: make(draft, args, context, k) for kind, make in kinds(args).items()}
                inputs = fill(drafters, draft, args.batch, context, k)
                agree(drafters, inputs, dtype)
                times = take_turns({kind: partial(call, d, inputs) for kind, d in drafters.items()}, args)
                cell = {"draft": name, "size": args.size, "k": k, "temperature": args.temperature}
                cell |= {"context": context, "batch": args.batch}
                rows += chain_rows(cell, draft, times, bandwidth)
                full.append(cell | {"times": times})
    return rows, CHAIN_TABLE, full


def check_memory(args, draft: nn.Module) -> None:
    """ValueError where the caches and the text that fills them cannot fit, even into all the memory of the device."""
    cfg, size = draft.config, draft.lm_head.weight.element_size()
    caches = len(kinds(args)) * cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim) / 2  # every other is small
    text = cfg.num_aux_hidden_states * cfg.target_hidden_size
    needed, there = args.batch * max(args.context) * (caches + text) * size, memory_of(args.device)
    if needed > there:
        raise ValueError(
            f"--batch {args.batch} rows of --context {max(args.context)} need about {needed / 1e9:,.0f} GB, "
            f"{args.device} has {there / 1e9:,.0f}; take less of either"
        )


def kinds(args) -> dict[str, Callable]:
    """Makers of every drafter that is timed, by name."""
    modes = {"eager": None}
    if args.compile != "off":
        modes["compiled"] = "default"
    if args.compile == "max-autotune":
        modes["captured" if args.device == "cuda" else "autotuned"] = "max-autotune"

    def maker(kind, mode):
        def make(draft, args, context, k):
            drafter = kind(draft, args.batch, context - k, k, args.temperature, args.top_p)
            if mode:
                drafter.compile(fullgraph=True, dynamic=False, mode=mode)
            return drafter

        return make

    forms = {"K/V": NaiveDrafter, "latent": Drafter}
    return {f"{form} {how}": maker(kind, mode) for how, mode in modes.items() for form, kind in forms.items()}


def fill(drafters: dict[str, Drafter], draft: nn.Module, batch: int, context: int, k: int) -> tuple:
    """Every drafter's cache filled up with the same random text; the inputs of a call at its end."""
    cfg, weight = draft.config, draft.lm_head.weight
    new = {"device": weight.device, "generator": torch.Generator(weight.device).manual_seed(0)}
    length = (
        context - k + 1 - k
    )  # of the text before the K+1 slots of a call, whose chain ends at the cache's last slot
    tokens = torch.randint(cfg.vocab_size, (batch, length + k + 1), **new)
    features = torch.randn(batch, length + k + 1, cfg.num_aux_hidden_states * cfg.target_hidden_size, **new)
    features = features.to(weight.dtype)
    for drafter in drafters.values():
        drafter.prefill(tokens[:, :length], features[:, :length])
    start = torch.full((batch, 1), length, device=weight.device)
    u = torch.rand(batch, k, **new)
    return tokens[:, length:], features[:, length:].contiguous(), start, torch.full_like(start, k), u


def call(drafter: Drafter, inputs: tuple) -> tuple[Tensor, Tensor]:
    if inputs[0].is_cuda:
        torch.compiler.cudagraph_mark_step_begin()
    return drafter(*inputs)


def agree(drafters: dict[str, Drafter], inputs: tuple, dtype: torch.dtype) -> None:
    """All draft the same chain, the first step's distribution within 1e-4 of its largest. In bfloat16, where chains
    part at near ties, within 2e-2, and a greedy first token is as likely as the best within that."""
    bound, want = 1e-4 if dtype == torch.float32 else 2e-2, None
    for name, drafter in drafters.items():
        chain = call(drafter, inputs)[0].clone()
        drafter.temperature, asked = 1.0, drafter.temperature  # greedy distributions hide small differences
        q = Drafter.forward(drafter, *inputs)[1][:, 0]  # eager
        drafter.temperature = asked
        want = want or (q, chain)
        largest = want[0].amax(-1, keepdim=True)
        errors = [(q - want[0]).abs() / largest]
        errors += [1 - want[0].gather(-1, chain[:, :1]) / largest] * (asked == 0)
        error = max(float(x.max()) for x in errors)
        if not error <= bound or (dtype == torch.float32 and not torch.equal(chain, want[1])):
            sys.exit(f"{name} differs from {next(iter(drafters))}: by {error:.1e} of the largest, allowed {bound:.0e}")


def take_turns(functions: dict[str, Callable], args, seconds: float = 0.5) -> dict[str, list[float]]:
    """Seconds per call of every function, once per round; each is called so often that a round lasts long enough."""
    times = {name: [] for name in functions}
    for _ in range(args.rounds):
        for name, function in functions.items():
            function()  # the processor's caches are the other's
            n, begin = 0, clock(args.device)
            while clock(args.device) - begin < seconds:
                function()
                n += 1
            times[name].append((clock(args.device) - begin) / n)
    return times


def memory_bandwidth(device: str, dtype: torch.dtype, numbers: int = 1 << 26) -> float:
    """Bytes per second that a large matrix-vector product reads, the best of five."""
    matrix = torch.ones(numbers >> 13, 1 << 13, dtype=dtype, device=device)
    vector, best = matrix[0].clone(), float("inf")
    for _ in range(6):
        begin = clock(device)
        matrix @ vector
        best = min(best, clock(device) - begin)
    return matrix.numel() * matrix.element_size() / best


def chain_bytes(draft: nn.Module, rows: int, slots: int, k: int, naive: bool) -> dict[str, float]:
    """Bytes per drafted token that must move: the weights are shared by all rows of a step, caches are not.

    A step reads the layer, the norm and the head; a chain besides fc and, for the K+1 new slots, the latent projection
    (the naive form its up-projection as well).
    """
    cfg, attn, size = draft.config, draft.model.layers[0].self_attn, draft.lm_head.weight.element_size()

    def numbers(*modules) -> int:
        return sum(p.numel() for module in modules for p in module.parameters())

    step = numbers(draft.model.layers[0], draft.model.norm, draft.lm_head)
    once = numbers(draft.model.fc, attn.input_projections()[1]) + (numbers(attn.kv_b_proj) if naive else 0)
    once += numbers(draft.model.fc_norm) if cfg.fc_norm else 0
    per_slot = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    if naive:
        per_slot = cfg.num_attention_heads * (cfg.qk_head_dim + cfg.v_head_dim)
    return {"weights": size * (step + once / k) / rows, "cache": size * slots * per_slot}


def chain_rows(cell: dict, draft: nn.Module, times: dict[str, list[float]], bandwidth: float) -> list[dict]:
    rows, baseline = [], next(iter(times.values()))
    for name, seconds in times.items():
        moved = chain_bytes(draft, cell["batch"], cell["context"], cell["k"], name.startswith("K/V"))
        chain, drafted = statistics.median(seconds), cell["batch"] * cell["k"]
        rate = sum(moved.values()) * drafted / chain
        row = cell | {"implementation": name, "chain_s": chain, "drafted_per_s": drafted / chain, "bytes": moved}
        faster = statistics.median(a / b for a, b in zip(baseline, seconds, strict=True))
        rows.append(row | {"bytes_per_s": rate, "of_bandwidth": rate / bandwidth, "faster": faster})
    return rows


CHAIN_TABLE = {
    "draft": lambda r: r["draft"],
    "K": lambda r: r["k"],
    "temperature": lambda r: f"{r['temperature']:g}",
    "context": lambda r: r["context"],
    "rows": lambda r: r["batch"],
    "implementation": lambda r: r["implementation"],
    "ms/chain": lambda r: f"{r['chain_s'] * 1e3:,.2f}",
    "drafted/s": lambda r: f"{r['drafted_per_s']:,.0f}",
    "faster": lambda r: f"{r['faster']:.2f}x",
    "MB/drafted (weights + cache)": lambda r: " + ".join(f"{x / 1e6:,.2f}" for x in r["bytes"].values()),
    "GB/s": lambda r: f"{r['bytes_per_s'] / 1e9:,.1f}",
    "of bandwidth": lambda r: f"{r['of_bandwidth']:.0%}",
}


# ------------------------------------------------------------------------------------------------------ a trained draft


def decode_run(args) -> tuple[list[dict], dict, list]:
    draft, target = open_run(args)
    prompts = load_prompts(args, target)
    verifier, rows, full = choose_verifier(target), [], []
    print(f"{args.run}: {len(prompts)} prompts, {args.new_tokens} new tokens each, verifier {verifier.__name__}")
    samplings = [(0.0, 1.0)] + [(args.temperature, args.top_p)] * (args.temperature > 0)
    for k in args.k:
        for temperature, top_p in samplings:
            drafter = Drafter(draft, 1, max(map(len, prompts)) + args.new_tokens, k, temperature, top_p)
            if args.compile != "off":
                torch._dynamo.reset()
                drafter.compile(fullgraph=True, dynamic=False, mode=args.compile)
            cell = {"k": k, "temperature": temperature, "top_p": top_p, "new_tokens": args.new_tokens}
            found = decode_all(args, drafter, target, prompts, verifier)
            if temperature == 0 and target.dtype == torch.float32 and found["identical"] < len(prompts):
                sys.exit(f"K {k}: {len(prompts) - found['identical']} greedy texts differ from the target's own")
            rows.append(cell | pooled(found, k))
            full.append(cell | {name: found[name] for name in ("seconds", "plain_seconds", "tokens", "rounds")})
    return rows, RUN_TABLE, full


def open_run(args) -> tuple[nn.Module, Target]:
    """The exported draft in a run's directory, or the directory itself, and its target. ValueError: it is neither."""
    directory = draft_directory(args.run)
    if (directory / "checkpoints").is_dir():
        raise ValueError(f"{directory} is not complete: --resume it, or --export one of its checkpoints")
    draft = load_draft(directory)
    ids, settings = draft.config.eagle_aux_hidden_state_layer_ids, directory.parent / "settings.json"
    settings = read_settings(settings) if settings.is_file() else {}
    model = args.model or settings.get("model")
    if model is None and "target" not in settings:
        raise ValueError(f"{args.run} does not say what its target is; name the directory with --model")
    if model is None:
        preset = TINY[settings["target"]]
        model = tiny_target(preset, directory.parent.parent / f"tiny-{preset}")
    target = load_target(model, ids and [j - 1 for j in ids], device=args.device)  # engines count layers by input
    return draft.to(args.device, target.dtype).requires_grad_(False), target


def draft_directory(run: Path) -> Path:
    """Of a run, or the directory itself."""
    return run / "draft" if (run / "draft").is_dir() else run


def load_prompts(args, target: Target) -> list[Tensor]:
    if args.prompts is None:
        documents = answered(target.tokenizer, python_documents(held_out=True)[: args.prompt_count])
        return [prompt_and_answer(d, middle=True)[0] for d in documents]
    return [torch.tensor(p) for p in read_prompts(args.prompts, target)]


def read_prompts(path: Path, target: Target | None = None) -> list[list[int]]:
    """--prompts; ids of the target, where one is at hand."""
    if not path.exists():
        raise ValueError(f"--prompts {path} does not exist")
    check_regular(path, "--prompts")
    with naming(path, "a JSON list of lists of token ids is wanted"):
        prompts = json.loads(path.read_text())
    vocab_size = target.vocab_size if target else 1 << 31
    good = isinstance(prompts, list) and prompts and all(isinstance(p, list) and p for p in prompts)
    if not good or not all(type(x) is int and 0 <= x < vocab_size for p in prompts for x in p):
        raise ValueError(f"{path} is no list of lists of token ids in 0..{vocab_size - 1}")
    return prompts


def decode_all(args, drafter: Drafter, target: Target, prompts: list[Tensor], verifier: type) -> dict:
    """Every prompt by plain and by speculative decoding, in turns, after one of each that is not timed."""
    found = {"seconds": [], "plain_seconds": [], "tokens": [], "rounds": [], "identical": 0, "forwards": 0}
    short = min(args.new_tokens, 2 * drafter.k + 2)
    plain(target, prompts[0], short, drafter.temperature, drafter.top_p, 0)
    speculative(drafter, target, prompts[:1], short, verifier=verifier)
    for i, prompt in enumerate(
        tqdm(prompts, desc=f"K {drafter.k}, temperature {drafter.temperature:g}", unit="prompt")
    ):
        begin = clock(args.device)
        alone = plain(target, prompt, args.new_tokens, drafter.temperature, drafter.top_p, i)
        found["plain_seconds"].append(clock(args.device) - begin)
        count = [0]
        handle = target.backbone.register_forward_pre_hook(lambda *_, count=count: count.append(1))
        begin = clock(args.device)
        (decoded,) = speculative(drafter, target, [prompt], args.new_tokens, seed=i, verifier=verifier)
        found["seconds"].append(clock(args.device) - begin)
        handle.remove()
        found["forwards"] += sum(count)
        found["identical"] += torch.equal(decoded.tokens, alone)
        found["tokens"].append(decoded.tokens.tolist())
        found["rounds"].append(decoded.rounds)
    return found


@torch.no_grad()
def plain(target: Target, prompt: Tensor, n: int, temperature: float, top_p: float, seed: int) -> Tensor:
    """The target alone, a token at a time, with its cache: n new tokens."""
    if temperature == 0:
        return target.greedy(prompt, n).cpu()
    tokens, cache, uniform = prompt.to(target.device), None, streams(1, seed, target.device)
    for _ in range(n):
        unseen, past = (tokens, {}) if cache is None else (tokens[-1:], {target.cache_name: cache})
        output = target.backbone(input_ids=unseen[None], use_cache=target.cache_name is not None, **past)
        cache = output.get(target.cache_name)
        p = distribution(target.head(output.last_hidden_state[:, -1:]), temperature, top_p)
        tokens = torch.cat([tokens, pick(p, uniform(1))[0]])
    return tokens[len(prompt) :].cpu()


def pooled(found: dict, k: int) -> dict:
    rounds, new = [one for rounds in found["rounds"] for one in rounds], sum(map(len, found["tokens"]))
    accepted = sum(by_bucket(rounds).values(), Accepted(0, 0))
    speed_ups = [a / b for a, b in zip(found["plain_seconds"], found["seconds"], strict=True)]
    return {
        "prompts": len(found["tokens"]),
        "rounds": accepted.rounds,
        "accept_length": accepted.length,
        "by_depth": [hits / max(drafted, 1) for hits, drafted in by_depth(rounds, k)],
        "by_position": {name: one.length for name, one in by_bucket(rounds).items() if one.rounds},
        "tokens_per_forward": new / found["forwards"],
        "unique_bigrams": unique_bigrams(found["tokens"]),
        "tokens_per_s": new / sum(found["seconds"]),
        "plain_tokens_per_s": new / sum(found["plain_seconds"]),
        "faster": sum(found["plain_seconds"]) / sum(found["seconds"]),
        "faster_by_prompt": speed_ups,
        "identical": found["identical"],
    }


RUN_TABLE = {
    "K": lambda r: r["k"],
    "temperature": lambda r: f"{r['temperature']:g}" + (f", top-p {r['top_p']:g}" if r["top_p"] < 1 else ""),
    "rounds": lambda r: r["rounds"],
    "accept length": lambda r: f"{r['accept_length']:.2f}",
    "accepted by depth": lambda r: " ".join(f"{x:.0%}" for x in r["by_depth"]),
    "by position": lambda r: ", ".join(f"{name}: {x:.2f}" for name, x in r["by_position"].items()),
    "tokens/forward": lambda r: f"{r['tokens_per_forward']:.2f}",
    "tokens/s": lambda r: f"{r['tokens_per_s']:,.0f}",
    "plain": lambda r: f"{r['plain_tokens_per_s']:,.0f}",
    "faster": lambda r: f"{r['faster']:.2f}x",
    "unique bigrams": lambda r: f"{r['unique_bigrams']:.0%}",
    "identical": lambda r: f"{r['identical']} of {r['prompts']}" if r["temperature"] == 0 else "-",
}
