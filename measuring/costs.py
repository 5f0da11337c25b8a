"""What a training step costs, by formula: multiplications, bytes kept for the backward, memory at the peak; and the
clock and the matrix rate that they are held against.

Held to saved-tensor hooks and FLOP counts of real steps by the tests. Shapes: B rows, T slots, A anchors, S steps, H
hidden, n heads, R kv_lora_rank, V and Vd vocabularies; c bytes per number of the compute dtype.
"""

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from draft_deepseek import PIECE, valid_slots
from draft_kimi_k3 import KimiK3Eagle3Config

# -------------------------------------------------------------------------------------------------------------- FLOPs


def workload(document: Tensor, loss_mask: Tensor, position: Tensor, steps: int) -> dict[str, int]:
    """What the mathematics needs of rows [B,T]: slots, pairs of anchor and step up to the anchor's last valid step, the
    step-0 and own keys they read, supervised pairs, taught tokens."""
    valid = valid_slots(document, loss_mask, steps)
    pairs = valid.flip(0).cummax(0).values.flip(0)
    own = torch.arange(steps, device=valid.device)[:, None, None]
    keys = (pairs * (position + 1)).sum(), (pairs * own).sum()
    counts = (document >= 0).sum(), pairs.sum(), pairs[1:].sum(), *keys, valid.sum(), valid[0].sum()
    names = ("slots", "pairs", "later_pairs", "keys_read", "own_keys_read", "supervised", "taught")
    return dict(zip(names, map(int, counts), strict=True))


def even_workload(slots: int, anchors: int, taught: int, keys_read: int, steps: int) -> dict[str, int]:
    """`workload` where every anchor is supervised at all steps; keys_read: step-0 keys, summed over pairs."""
    work = dict(slots=slots, pairs=anchors * steps, later_pairs=anchors * (steps - 1), keys_read=keys_read)
    return work | dict(own_keys_read=anchors * steps * (steps - 1) // 2, supervised=taught * steps, taught=taught)


def model_flops(cfg, slots, pairs, later_pairs, keys_read, own_keys_read, supervised, taught) -> dict[str, int]:
    """Multiplications and additions, forward and backward: a matrix product costs 2 per weight and row, and twice that
    again in the backward (target head and features need no gradient). The token half of the input projections counts
    once per slot, a later step's keys and values as up-projected; norms, softmax and anything recomputed not at all."""
    h, n, r, h_target = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.target_hidden_size
    gate = n * cfg.v_head_dim if isinstance(cfg, KimiK3Eagle3Config) and cfg.mla_use_output_gate else 0
    query_in, latent_in = h * (cfg.q_lora_rank or n * cfg.qk_head_dim), h * (r + cfg.qk_rope_head_dim)
    query_up = (cfg.q_lora_rank or 0) * n * cfg.qk_head_dim
    latent_up = r * n * (cfg.qk_nope_head_dim + cfg.v_head_dim)
    step = query_in + h * gate + query_up + n * cfg.v_head_dim * h + 3 * h * cfg.intermediate_size
    all_slots = 3 * (query_in + h * gate + 2 * latent_in + latent_up) + 2 * cfg.num_aux_hidden_states * h_target * h
    return {
        "all slots": 2 * slots * all_slots,
        "steps": 6 * (pairs * step + later_pairs * (latent_in + latent_up)),
        "attention": 6 * n * (cfg.qk_head_dim + cfg.v_head_dim) * (keys_read + own_keys_read),
        "loss": 6 * supervised * h * cfg.draft_vocab_size,
        "teacher": 2 * taught * h_target * cfg.vocab_size,
    }


# ------------------------------------------------------------------------------------------------- bytes, by formula


class Saved(NamedTuple):
    """Bytes that eager autograd keeps for the backward, per slot, per anchor and per pair of slots (T x T), besides
    parameters, batch and, of ours, the keys that chunks read."""

    slot: int
    anchor: int = 0
    pair: int = 0


def saved_pieces(cfg, c: int) -> dict[str, int]:
    """What one step of one slot keeps in the pieces that both forms have; c bytes per number of the compute dtype.

    A norm keeps its input and its normed input in float32, a product its input, a pointwise function what its
    derivative reads.
    """
    h, n, r, dr, dv = cfg.hidden_size, cfg.num_attention_heads, cfg.kv_lora_rank, cfg.qk_rope_head_dim, cfg.v_head_dim
    k3, q_lora, i = isinstance(cfg, KimiK3Eagle3Config), cfg.q_lora_rank, cfg.intermediate_size
    cos_sin = 0 if k3 else 4 * dr
    return {
        "norm": 4 * (2 * h + 1) + c * h,
        "query": (4 * (2 * q_lora + 1) + c * q_lora if q_lora else 0) + c * n * cfg.qk_head_dim + cos_sin,
        "latent": 4 * (2 * r + 1) + (4 * dr if c == 4 else 0) + cos_sin,  # c 4: a view of the whole projection is kept
        "keys": c * (r + dr + n * (cfg.qk_head_dim + cfg.qk_nope_head_dim + dv)),
        "values": c * n * dv,
        "gate": c * n * dv if k3 and cfg.mla_use_output_gate else 0,
        "mlp": (24 + c) * i if k3 else 4 * c * i,  # SiTU computes in float32
    }


def saved_by_ours(cfg, c: int, steps: int) -> Saved:
    """Per slot by `keys`, per anchor by `chunk`: the two never lie there together."""
    h, n, keep = cfg.hidden_size, cfg.num_attention_heads, saved_pieces(cfg, c)
    latent = cfg.kv_lora_rank + cfg.qk_rope_head_dim
    slot = keep["norm"] + (4 + c) * h + keep["latent"] + c * latent
    step = 2 * keep["norm"] + keep["query"] + 2 * keep["values"] + 4 * n + keep["gate"] + keep["mlp"] + 8
    cache = (steps - 1) * c * latent  # each later step keeps the cache as it was
    diagonal = keep["latent"] + keep["values"] + keep["gate"] + (4 + c % 4) * n + cache
    states = steps * (4 * (2 * h + 1) + c * h) + 24
    return Saved(slot, states + steps * step + (steps - 1) * diagonal)


def saved_by_baseline(cfg, c: int, steps: int) -> Saved:
    h, keep, vocab = cfg.hidden_size, saved_pieces(cfg, c), cfg.draft_vocab_size
    shared = 4 * h if c == 4 else 0  # in float32 the final norm and the next step keep one and the same state
    step = 3 * keep["norm"] - shared + (4 + c) * h + keep["query"] + keep["latent"] + keep["keys"] + keep["values"]
    step += 2 * keep["gate"] + keep["mlp"] + 2 * 4 * vocab + 1  # log-probabilities and this step's copy of p
    probability = (4 + c % 4) * cfg.num_attention_heads
    columns = steps * (steps - 1) // 2
    return Saved(steps * step + shared + columns * probability, pair=steps * probability)


FORMS = ("ours", "dense")  # ours in chunks, the baseline


def saved(cfg, c: int, steps: int, form: str) -> Saved:
    return saved_by_baseline(cfg, c, steps) if form == "dense" else saved_by_ours(cfg, c, steps)


def key_numbers(cfg) -> int:
    """Numbers of `Keys` per slot: features, token halves, step-0 keys and values."""
    n, latent = cfg.num_attention_heads, cfg.kv_lora_rank + cfg.qk_rope_head_dim
    gate = n * cfg.v_head_dim if isinstance(cfg, KimiK3Eagle3Config) and cfg.mla_use_output_gate else 0
    token = (cfg.q_lora_rank or n * cfg.qk_head_dim) + latent + gate
    return cfg.hidden_size + token + n * (cfg.qk_head_dim + cfg.v_head_dim)


def step_memory(
    cfg, trained: int, frozen: int, slots: int, chunk: int, c: int, form: str = "ours", steps: int = 7
) -> dict[str, int]:
    """Bytes of a training step at its peak, by what they hold; slots of all rows, `chunk` anchors of all rows.

    Ours has two phases, of which the larger is returned: a chunk's backward, and the backward of the keys. The dense
    form is counted without its target logits and temporaries.
    """
    fixed = {
        "weights": 4 * (trained + frozen) + (c % 4) * trained,
        "gradients and AdamW": 12 * trained,
        "batch": slots * (cfg.num_aux_hidden_states + 1) * cfg.target_hidden_size * c,
    }
    if form == "dense":
        keep = saved(cfg, c, steps, form)
        return fixed | {"saved": slots * keep.slot + slots**2 * keep.pair, "teacher": 4 * cfg.draft_vocab_size * slots}
    fixed |= {"keys": slots * key_numbers(cfg) * c, "gradients of the keys": slots * key_numbers(cfg) * 4}
    phases = chunk_memory(cfg, slots, chunk, c, steps), keys_memory(cfg, slots, c, steps)
    return fixed | max(phases, key=lambda phase: sum(phase.values()))


def chunk_memory(cfg, slots: int, chunk: int, c: int, steps: int) -> dict[str, int]:
    """What a chunk adds: each step writes gradients of all keys and values, which are added to those of the steps
    before; the token halves' and the features' are made once."""
    vocab, n, rows = cfg.draft_vocab_size, cfg.num_attention_heads, min(512, steps * chunk)
    twice = n * (cfg.qk_head_dim + cfg.v_head_dim)
    logits = rows * vocab * (12 + c % 4 + 2 * (c % 4))  # z, q, p, and the gradient and what made z in bf16
    head = vocab * cfg.hidden_size * (4 + 4 + c % 4)  # its gradient, a piece's share of it, the head in bf16
    return {
        "saved": chunk * saved_by_ours(cfg, c, steps).anchor,
        "teacher": 4 * vocab * (chunk + steps - 1),
        "one step's keys and their sum": slots * c * (key_numbers(cfg) + twice),
        "logits": logits + head,
    }


def keys_memory(cfg, slots: int, c: int, steps: int) -> dict[str, int]:
    """What the backward of the keys adds: a piece of them is made once more, its gradients cast, and those of the
    up-projection put together."""
    slots, n = min(slots, PIECE), cfg.num_attention_heads
    views = n * (cfg.qk_nope_head_dim + cfg.v_head_dim)  # v is a view of the whole up-projection
    made = key_numbers(cfg) - n * cfg.v_head_dim + views
    return {
        "saved": slots * saved_by_ours(cfg, c, steps).slot,
        "keys made again": slots * c * made,
        "their gradients, cast": slots * (c % 4) * key_numbers(cfg),
        "gradient of the up-projection": slots * c * 2 * views,  # assembled, and laid out for the product
    }


# -------------------------------------------------------------------------------------------------------- the machine


def clock(device: str) -> float:
    """Seconds, once the device has done what it was asked."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def matrix_rate(device: str, dtype: torch.dtype, width: int) -> float:
    """FLOP/s of a product of square matrices of that width, the best of five."""
    x, times = torch.randn(width, width, device=device, dtype=dtype), []
    for _ in range(6):
        start = clock(device)
        x @ x
        times.append(clock(device) - start)
    return 2 * width**3 / min(times[1:])


def memory_of(device: str) -> float:
    """Bytes of it in all, a container's or a job's share on the CPU; without end where nobody says."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if torch.device(device).type != "cpu" or not set(names) <= set(os.sysconf_names):
        return float("inf")
    return min(os.sysconf(names[0]) * os.sysconf(names[1]), cgroup_memory(Path("/proc/self/cgroup"), CGROUPS))


CGROUPS = Path("/sys/fs/cgroup")
LIMITS = {"": "memory.max", "memory": "memory/memory.limit_in_bytes"}  # of cgroup versions 2 and 1, by controller


def cgroup_memory(own: Path, root: Path) -> float:
    """The least limit in bytes of the groups that this process is in by the file `own`, and of those around them."""
    limits = [float("inf")]
    with contextlib.suppress(OSError):
        for line in own.read_text().splitlines():
            _, controller, group = line.split(":", 2)
            if controller in LIMITS:
                file = root / LIMITS[controller]
                inner = file.parent / group.lstrip("/")
                around = [folder for folder in (inner, *inner.parents) if folder.is_relative_to(file.parent)]
                said = [(folder / file.name).read_text() for folder in around if (folder / file.name).is_file()]
                limits += [int(text) for text in said if text.strip().isdecimal()]  # else "max"
    return min(limits)
