"""What a training step costs: this repo beside the dense eager recurrence that EAGLE-3 trainers run today, in one run.

    python bench.py                                 mid size, deepseek-v3, T 2048, 25% and 100% supervised
    python bench.py --full --out bench.json         both drafts, T 512-4096, 10-100%, packed or not
    python bench.py --suite shapes                  the real drafts by formula: no GPU, little memory
    python bench.py --device cuda --suite h200      two shapes of the DeepSeek-V3 draft, compiled

A step is the teacher, zero_grad, forward and backward; the optimizer is apart, in the breakdown. The teacher counts for
both sides: the baseline applies the target's head to all T slots, `build_rows` to the supervised tokens. Nothing is
timed before loss and every gradient of each implementation agreed with the baseline's (exit code 1 when they do not).
Times come from one process in which the implementations take turns, and ratios from the same round: read the ratios,
the machine may be busy. Memory on a CPU is the growth of a fresh process per cell over its state before its first step,
gradients allocated and libraries warmed up before, freed blocks going back to the system at once (malloc's thresholds
are set in that process, so that its heap's holes do not count); on CUDA it is the allocator's peak over that state.

MFU is the model FLOPs (`model_flops`: what the mathematics needs at the supervised slots, forward and backward, nothing
recomputed) over time x the rate of a large matrix product measured first; `floor` is the time they take at that rate.

Shapes: B rows (1 here), T slots, A anchors, S steps, H hidden, n heads, R kv_lora_rank, V and Vd vocabularies.
"""

import argparse
import contextlib
import ctypes
import gc
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draft_deepseek
from draft_deepseek import DeepseekV3Eagle3DraftModel, TTTLoss, build_rows, valid_slots
from draft_kimi_k3 import KimiK3Eagle3DraftModel

STEPS, STEP_DECAY = 7, 0.8
DRAFTS = {"deepseek-v3": DeepseekV3Eagle3DraftModel, "kimi-k3": KimiK3Eagle3DraftModel}
YARN = dict(type="yarn", original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
KEYS = (
    "hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim "
    "intermediate_size vocab_size draft_vocab_size"
).split()
SIZES = {
    "tiny": (48, 3, 24, 16, 12, 8, 10, 72, 160, 96),
    "mid": (512, 8, 192, 64, 32, 16, 32, 1536, 8192, 4096),
    "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128, 18432, 129280, 32000),
    "kimi-k2.5": (7168, 64, 1536, 512, 128, 64, 128, 18432, 163840, 32000),
    "kimi-k3": (7168, 96, 1536, 512, 128, 64, 128, 33792, 163840, 32000),
}


@dataclass
class Cell:
    """One row of the matrix: a draft, a batch and what to measure of it."""

    draft: str = "deepseek-v3"
    size: str = "mid"
    slots: int = 2048
    share: float = 1.0
    packed: bool = True
    device: str = "cpu"
    threads: int = 2
    rounds: int = 3
    compile: str = "off"
    implementation: str = "all"
    breakdown: bool = False

    @property
    def shape(self) -> str:
        return f"{self.draft} {self.size} T {self.slots} {self.share:.0%} {'packed' if self.packed else 'one document'}"


# -------------------------------------------------------------------------------------------------- drafts and batches


def make_config(draft: str, size: str, **changes):
    factor = {"rope_theta": 50000.0, "factor": 64, "beta_fast": 1.0} if size == "kimi-k2.5" else {"factor": 40}
    config = dict(zip(KEYS, SIZES[size], strict=True), rms_norm_eps=1e-6, max_position_embeddings=163840) | changes
    rope = {"rope_theta": factor.pop("rope_theta", 10000.0), "rope_scaling": YARN | factor}
    return DRAFTS[draft].config_class(**config, **({} if draft == "kimi-k3" else rope))


class Batch(NamedTuple):
    """One row before anything was computed from it; unshifted."""

    tokens: Tensor  # [B,T]
    document: Tensor  # [B,T]
    position: Tensor  # [B,T]
    features: Tensor  # [B,T,3H]
    loss_mask: Tensor  # [B,T]
    last_hidden: Tensor  # [B,T,H]
    head: Tensor  # [V,H]


def make_draft(cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(cell.device):
        draft = DRAFTS[cell.draft](make_config(cell.draft, cell.size))
    cfg = draft.config
    if cfg.draft_vocab_size < cfg.vocab_size:
        draft.set_vocab_mapping(torch.randperm(cfg.vocab_size)[: cfg.draft_vocab_size].sort().values)
    draft.freeze_embeddings()
    return draft


def make_batch(cell: Cell, draft: nn.Module, seed: int = 0) -> Batch:
    """Synthetic documents (log-normal lengths, median T/8 or one document), the answer of each its last `share`."""
    cfg, t, device = draft.config, cell.slots, cell.device
    g = torch.Generator().manual_seed(seed)
    document, position, mask = (torch.zeros(1, t, dtype=torch.long) for _ in range(3))
    begin, number = 0, 0
    while begin < t:
        length = int(torch.empty(1).log_normal_(0.0, 0.6, generator=g) * t / 8) if cell.packed else t
        end = min(begin + max(length, 16), t)
        document[0, begin:end], position[0, begin:end] = number, torch.arange(end - begin)
        mask[0, end - round(cell.share * (end - begin)) : end] = 1
        begin, number = end, number + 1
    tokens = torch.randint(cfg.vocab_size, (1, t), generator=g).to(device)
    g = torch.Generator(device).manual_seed(seed)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    h = cfg.target_hidden_size
    new = dict(generator=g, device=device, dtype=dtype)
    features, last_hidden, head = (torch.randn(*s, **new) for s in ((1, t, 3 * h), (1, t, h), (cfg.vocab_size, h)))
    head *= h**-0.5
    head[draft.draft_ids] *= 2  # the target's choices fall into the draft vocabulary, as they do after counting
    return Batch(tokens, document.to(device), position.to(device), features, mask.to(device), last_hidden, head)


# --------------------------------------------------------------------------------------------- the baseline, and ours


def shift(x: Tensor, fill=0) -> Tensor:
    """A copy of x [B,T,..] moved left by one slot."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], dim=1)


class DenseBaseline(nn.Module):
    """EAGLE-3's training-time test as trainers run it: every step over all T slots, plain autograd.

    K/V lists `[[], []]` hold the up-projected keys and values of every step; `T x T` scores plus one column per earlier
    step; the target's head over all slots; ids, masks and teacher copied one slot to the left after each step. The
    weights and the small pieces (norms, RoPE, MLP) are the draft's own.
    """

    def __init__(self, draft, steps: int = STEPS):
        super().__init__()
        self.draft, self.steps = draft, steps

    @torch.no_grad()
    def teacher(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """p [B,T,Vd] of every token, and whether the target's choice [B,T] is in the draft vocabulary."""
        logits, ids = F.linear(batch.last_hidden, batch.head), self.draft.draft_ids
        covered = torch.isin(logits.argmax(-1), ids)
        return logits[..., ids].float().softmax(-1), covered

    def forward(self, batch: Batch, p: Tensor, covered: Tensor) -> Tensor:
        draft, layer, device = self.draft, self.draft.model.layers[0], batch.tokens.device
        attn, t = layer.self_attn, batch.tokens.shape[1]
        ids, p, target = shift(batch.tokens), shift(p), shift(batch.document, -1)
        mask = shift(batch.loss_mask.bool() & covered, False)
        visible = torch.ones(t, t, dtype=torch.bool, device=device).tril()
        visible = visible & (batch.document[:, :, None] == batch.document[:, None, :]) & (batch.document >= 0)[:, None]
        a = draft.project_hidden_states(batch.features)
        bias = torch.zeros(visible.shape, dtype=a.dtype, device=device)
        bias = bias.masked_fill_(~visible, torch.finfo(a.dtype).min)[:, None]
        cache, loss, weights = [[], []], 0.0, [STEP_DECAY**s for s in range(self.steps)]
        for s, weight in enumerate(weights):
            e = layer.input_layernorm(draft.embed_input_ids(ids).to(a.dtype))
            pre_q, pre_kv, pre_gate = attn.project(torch.cat([e, layer.hidden_norm(a)], dim=-1))
            k, v = attn.keys_values(attn.latents(pre_kv, batch.position + s))
            cache[0].append(k)
            cache[1].append(v)
            o = self.attend(attn.queries(pre_q, batch.position + s), *cache, bias, attn.scaling)
            a = layer.finish(a, attn.output(o, pre_gate))
            a = draft.model.norm(a) if draft.config.norm_output else a
            supervised = mask & (target == batch.document)
            cross_entropy = -(p * draft.compute_logits(a).float().log_softmax(-1)).sum(-1)
            loss = loss + weight / sum(weights) * (cross_entropy * supervised).sum() / supervised.sum().clamp(min=1)
            ids, p, mask, target = shift(ids), shift(p), shift(mask, False), shift(target, -1)
        return loss

    @staticmethod
    def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], bias: Tensor, scale: float) -> Tensor:
        t = q.shape[2]
        scores = [q @ keys[0].mT * scale + bias] + [(q * k).sum(-1, keepdim=True) * scale for k in keys[1:]]
        prob = torch.cat(scores, dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        o = prob[..., :t] @ values[0]
        for j, v in enumerate(values[1:], start=t):
            o = o + prob[..., j : j + 1] * v
        return o


class Dense:
    """The baseline as bench drives an implementation: `prepare` makes the teacher, `loss` what backward starts from."""

    def __init__(self, draft):
        self.model = DenseBaseline(draft)

    def prepare(self, batch: Batch):
        return batch, *self.model.teacher(batch)

    def loss(self, batch, p, covered) -> Tensor:
        return self.model(batch, p, covered)


class Ours:
    def __init__(self, draft, mode: str = "off", capacity: int | None = None):
        self.draft, self.capacity, self.dense_mask = draft, capacity, mode == "off"
        self.ttt_loss = TTTLoss(draft, steps=STEPS, step_decay=STEP_DECAY)
        compile_loss(self.ttt_loss, mode)

    def prepare(self, batch: Batch):
        ids, head = self.draft.draft_ids, batch.head
        rows = build_rows(ids, *batch[:-1], lambda x: F.linear(x, head), steps=STEPS, anchors=self.capacity)
        return (rows._replace(block_mask=None) if self.dense_mask else rows,)  # FlexAttention is for compiled graphs

    def loss(self, rows) -> Tensor:
        return self.ttt_loss(rows)[0]


def compile_loss(ttt_loss: nn.Module, mode: str) -> None:  # to be removed: train.py will have it
    if mode != "off":
        ttt_loss.compile(fullgraph=True, dynamic=False, mode=mode)
