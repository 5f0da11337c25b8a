"""A training step, ours beside the dense eager recurrence: what both compute, that they agree, their time and memory.

What is timed, and how, is told in bench.py. Shapes: B rows (1 here), T slots, A anchors, S steps, H hidden, n heads, R
kv_lora_rank, V and Vd vocabularies.
"""

import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import draft_deepseek
from draft_deepseek import DeepseekV3Eagle3DraftModel, RowChunks, TTTLoss, default_chunk
from draft_kimi_k3 import KimiK3Eagle3DraftModel
from measuring.costs import clock, matrix_rate, memory_of, model_flops, step_memory, workload
from training.compiling import compile_loss

STEPS, STEP_DECAY = 7, 0.8
DRAFTS = {"deepseek-v3": DeepseekV3Eagle3DraftModel, "kimi-k3": KimiK3Eagle3DraftModel}
SIZES = {  # H, n, q_lora, R, nope, rope, v, intermediate, V, Vd
    "tiny": (48, 3, 24, 16, 12, 8, 10, 72, 160, 96),
    "mid": (512, 8, 192, 64, 32, 16, 32, 1536, 8192, 4096),
    "deepseek-v3": (7168, 128, 1536, 512, 128, 64, 128, 18432, 129280, 32000),
    "kimi-k2.5": (7168, 64, 1536, 512, 128, 64, 128, 18432, 163840, 32000),
    "kimi-k3": (7168, 96, 1536, 512, 128, 64, 128, 33792, 163840, 32000),
}
YARN = dict(type="yarn", factor=40, original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)


@dataclass(frozen=True)
class Cell:
    """What one child process measures."""

    draft: str = "deepseek-v3"
    size: str = "mid"
    slots: int = 2048
    share: float = 1.0
    packed: bool = True
    device: str = "cpu"
    dtype: str = "float32"
    compile: str = "off"
    threads: int = 2
    rounds: int = 3
    chunk: int | None = None  # anchors of a chunk; None: what training takes
    baseline: bool = True
    memory_of: str | None = None  # an implementation; None: the times of all

    def __str__(self):
        layout = "packed" if self.packed else "one document"
        return f"{self.draft} {self.size} T {self.slots} {self.share:.0%} {layout}"


# ------------------------------------------------------------------------------------------------------ draft and batch


def make_config(draft: str, size: str, **changes):
    h, n, q_lora, r, nope, rope, v, intermediate, vocab, draft_vocab = SIZES[size]
    config = dict(hidden_size=h, num_attention_heads=n, q_lora_rank=q_lora, kv_lora_rank=r, qk_nope_head_dim=nope)
    config |= dict(qk_rope_head_dim=rope, v_head_dim=v, intermediate_size=intermediate, vocab_size=vocab)
    config |= dict(draft_vocab_size=draft_vocab, rms_norm_eps=1e-6, max_position_embeddings=163840)
    config |= {} if draft == "kimi-k3" else dict(rope_theta=10000.0, rope_scaling=YARN)
    return DRAFTS[draft].config_class(**config | changes)


def make_draft(cell: Cell) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(cell.device):
        draft = DRAFTS[cell.draft](make_config(cell.draft, cell.size))
    draft.set_vocab_mapping(torch.randperm(draft.config.vocab_size)[: draft.config.draft_vocab_size].sort().values)
    draft.freeze_embeddings()
    for p in draft.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    return draft


class Batch(NamedTuple):
    """One row before anything was computed from it; unshifted."""

    tokens: Tensor  # [B,T]
    document: Tensor  # [B,T]
    position: Tensor  # [B,T]
    features: Tensor  # [B,T,3H]
    loss_mask: Tensor  # [B,T]
    last_hidden: Tensor  # [B,T,H]
    head: Tensor  # [V,H]


def make_batch(cell: Cell, draft: nn.Module, seed: int = 0) -> Batch:
    """Synthetic documents (log-normal lengths, median T/8; or one), of which the last `share` is the answer."""
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
    tokens = torch.randint(cfg.vocab_size, (1, t), generator=g)
    new = dict(generator=torch.Generator(device).manual_seed(seed), device=device, dtype=getattr(torch, cell.dtype))
    features = torch.randn(1, t, 3 * cfg.target_hidden_size, **new)
    last_hidden = torch.randn(1, t, cfg.target_hidden_size, **new)
    head = torch.randn(cfg.vocab_size, cfg.target_hidden_size, **new) * cfg.target_hidden_size**-0.5
    head[draft.draft_ids] *= 2  # so the target's choices lie in the draft vocabulary, as they do after counting
    row = (x.to(device) for x in (tokens, document, position))
    return Batch(*row, features, mask.to(device), last_hidden, head)


# ------------------------------------------------------------------------------------------- the baseline, ours, theirs


class Baseline(nn.Module):
    """EAGLE-3's training-time test as trainers run it: every step over all T slots, plain autograd.

    K/V lists `[[], []]` hold the up-projected keys and values of every step; `T x T` scores plus one column per own key
    of a later step; the target's head over all slots; ids, teacher and masks copied one slot to the left after each
    step. The weights and the pieces that know no time (projections, norms, RoPE, MLP) are the draft's own.
    """

    def __init__(self, draft):
        super().__init__()
        self.draft = draft

    @torch.no_grad()
    def prepare(self, batch: Batch) -> tuple[Batch, Tensor, Tensor]:
        """p [B,T,Vd] of every token, and whether the target's choice [B,T] is in the draft vocabulary."""
        logits, ids = F.linear(batch.last_hidden, batch.head), self.draft.draft_ids
        drafted = torch.zeros(len(batch.head), dtype=torch.bool, device=ids.device).index_fill(0, ids, True)
        return batch, logits[..., ids].float().softmax(-1), drafted[logits.argmax(-1)]

    def forward(self, batch: Batch, p: Tensor, covered: Tensor) -> Tensor:
        draft, layer = self.draft, self.draft.model.layers[0]
        attn = layer.self_attn
        ids, p, target = shift(batch.tokens), shift(p), shift(batch.document, -1)
        mask = shift(batch.loss_mask.bool() & covered, False)
        visible = (batch.document[:, :, None] == batch.document[:, None, :]).tril() & (batch.document >= 0)[:, None]
        a = draft.project_hidden_states(batch.features)
        bias = torch.zeros(visible.shape, dtype=a.dtype, device=a.device)
        bias = bias.masked_fill_(~visible, torch.finfo(a.dtype).min)[:, None]
        cache, loss, weights = [[], []], 0.0, [STEP_DECAY**s for s in range(STEPS)]
        for s, weight in enumerate(weights):
            e = layer.input_layernorm(draft.embed_input_ids(ids).to(a.dtype))
            pre_q, pre_kv, pre_gate = attn.project(torch.cat([e, layer.hidden_norm(a)], dim=-1))
            for kept, new in zip(cache, attn.keys_values(attn.latents(pre_kv, batch.position + s)), strict=True):
                kept.append(new)
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


def shift(x: Tensor, fill=0) -> Tensor:
    """A copy of x [B,T,..], one slot to the left."""
    return torch.cat([x[:, 1:], torch.full_like(x[:, :1], fill)], dim=1)


class Ours:
    def __init__(self, draft, mode: str = "off", chunk: int | None = None):
        self.draft, self.mode, self.size = draft, mode, chunk
        self.ttt_loss = TTTLoss(draft, STEPS, step_decay=STEP_DECAY)
        compile_loss(self.ttt_loss, mode)

    def prepare(self, batch: Batch) -> tuple:
        *row, head = batch
        chunk = self.size or default_chunk(batch.tokens.shape[1], batch.features.device)
        compiled = self.mode != "off"  # FlexAttention is slow uncompiled, and only a graph wants chunks of one size
        how = {"steps": STEPS, "chunk": chunk, "make_mask": compiled, "even": not compiled}
        return (RowChunks(self.draft.draft_ids, *row, lambda x: F.linear(x, head), **how),)

    def __call__(self, rows: RowChunks) -> Tensor:
        """Adds the gradients too; the loss is detached."""
        return self.ttt_loss.learn(rows)[0]


def implementations(cell: Cell, draft) -> dict:
    make = {"baseline": lambda: Baseline(draft), "ours eager": lambda: Ours(draft, chunk=cell.chunk)}
    if cell.compile != "off":
        make["ours compiled"] = lambda: Ours(draft, cell.compile, cell.chunk)
    return {
        name: build()
        for name, build in make.items()
        if cell.memory_of in (None, name) and (cell.baseline or name != "baseline")
    }


# ------------------------------------------------------------------------------------------------------------ agreement


def check(cell: Cell, draft, batch: Batch, impls: dict) -> None:
    """Raises Disagreement. On CUDA, where the baseline may not fit, eager is compared with it in float32 over at most
    512 slots, and the compiled form with eager on the batch that is timed."""
    pairs = [("baseline", name, cell, batch) for name in impls if name != "baseline"]
    if cell.device == "cuda":
        short = replace(cell, slots=min(cell.slots, 512), dtype="float32")
        pairs = [("baseline", "ours eager", short, make_batch(short, draft))]
        pairs += [("ours eager", "ours compiled", cell, batch)]
    for want, got, cell, batch in pairs:
        if {want, got} <= impls.keys():
            wrong = differences(*(gradients(cell, draft, batch, impls[name]) for name in (want, got)), cell.dtype)
            if wrong:
                raise Disagreement(f"{cell}: {got} differs from {want}: {'; '.join(wrong)}")


class Disagreement(Exception):
    pass


def gradients(cell: Cell, draft, batch: Batch, implementation) -> dict[str, Tensor]:
    """The loss and every trainable parameter's gradient."""
    draft.zero_grad(set_to_none=False)
    with autocast(cell):
        loss = implementation(*implementation.prepare(batch))
    backward(loss)
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}


def backward(loss: Tensor) -> None:
    """Ours has done it: it learns chunk by chunk."""
    if loss.requires_grad:
        loss.backward()


def differences(want: dict[str, Tensor], got: dict[str, Tensor], dtype: str) -> list[str]:
    """float32: no number is off by more than 1e-4 of its tensor's largest. bfloat16: gradients point the same way
    (cosine above 0.999), the loss is within 1e-2. What is not finite differs."""
    wrong = []
    for name, x in want.items():
        y, bound = got[name], 1e-4 if dtype == "float32" else 1e-2
        error = ((x - y).abs().max() / x.abs().max().clamp(min=1e-12)).item()
        cosine = F.cosine_similarity(x.flatten(), y.flatten(), dim=0, eps=1e-20).item()
        if not (cosine > 0.999 if dtype == "bfloat16" and name != "loss" else error <= bound):
            wrong.append(f"{name} by {error:.1e} of its largest (allowed {bound:.0e}), cosine {cosine:.5f}")
    return wrong


def autocast(cell: Cell):
    return torch.autocast(cell.device, torch.bfloat16, enabled=cell.dtype == "bfloat16")


# ------------------------------------------------------------------------------------------------------ time and memory


def check_memory(cell: Cell) -> None:
    """ValueError where the implementation that takes most of what a CPU has cannot run; a GPU says so by itself."""
    with torch.device("meta"):
        draft = DRAFTS[cell.draft](make_config(cell.draft, cell.size))
    frozen = draft.model.embed_tokens.weight.numel()
    trained = sum(p.numel() for p in draft.parameters()) - frozen
    form, chunk = "dense" if cell.baseline else "ours", cell.chunk or default_chunk(cell.slots, cell.device)
    parts = step_memory(draft.config, trained, frozen, cell.slots, chunk, 4, form, STEPS)
    needed, there = sum(parts.values()), memory_of(cell.device)
    if cell.device == "cpu" and needed > there:
        what = "the baseline" if cell.baseline else "a step"
        raise ValueError(
            f"{cell}: {what} needs about {needed / 1e9:,.0f} GB, there are {there / 1e9:,.0f}; take fewer "
            "--row-tokens or another --size"
        )


def in_child(cell: Cell) -> dict:
    """`measure(cell)` in a fresh process: a fork of this one, which never ran a kernel, or a new one for CUDA."""
    method = "fork" if cell.device == "cpu" and sys.platform == "linux" else "spawn"
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context(method)) as pool:
        return pool.submit(measure, cell).result()


def measure(cell: Cell) -> dict:
    torch.set_num_threads(cell.threads)
    if cell.memory_of and sys.platform == "linux":
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            ctypes.CDLL(None).mallopt(parameter, 1 << 17)
    draft = make_draft(cell)
    batch, impls = make_batch(cell, draft), implementations(cell, draft)
    if cell.memory_of:
        (one,) = impls.values()
        small = make_batch(replace(cell, slots=64), draft)  # the compiled form must see its own shape: compiling is big
        one_step(cell, draft, batch if cell.memory_of == "ours compiled" else small, one)
        with PeakMemory(cell.device) as peak:
            one_step(cell, draft, batch, one)
        return {"peak_bytes": peak.growth}
    check(cell, draft, batch, impls)
    times, peaks, width = {name: [] for name in impls}, {}, 2048 if cell.device == "cpu" else 8192
    rate = matrix_rate(cell.device, getattr(torch, cell.dtype), width)
    work = workload(batch.document, batch.loss_mask, batch.position, STEPS)
    for _, (name, implementation) in itertools.product(range(cell.rounds), impls.items()):
        with contextlib.suppress(torch.OutOfMemoryError):
            peak = PeakMemory(cell.device) if cell.device == "cuda" else contextlib.nullcontext()
            with peak:
                times[name].append(one_step(cell, draft, batch, implementation))
            peaks |= {name: peak.growth} if cell.device == "cuda" else {}
    flops = model_flops(draft.config, **work)
    result = {"rate": rate, "work": work, "flops": flops, "times": times, "peak_bytes": peaks}
    return result | {"breakdown": breakdown(cell, draft, batch, impls["ours eager"])}


def one_step(cell: Cell, draft, batch: Batch, implementation) -> tuple[float, ...]:
    """Seconds of the counts or the teacher, of zero_grad and the forward (of ours: of the whole step), the backward."""
    marks = [clock(cell.device)]
    prepared = implementation.prepare(batch)
    marks.append(clock(cell.device))
    draft.zero_grad(set_to_none=False)
    with autocast(cell):
        loss = implementation(*prepared)
    marks.append(clock(cell.device))
    backward(loss)
    marks.append(clock(cell.device))
    return tuple(after - before for before, after in itertools.pairwise(marks))


class PeakMemory:
    """`growth`: by how many bytes memory grew at most. On the CPU this process's resident memory (Linux; else None):
    the kernel's high-water mark where it may be reset, else a thread's samples."""

    def __init__(self, device: str):
        self.cuda, self.growth, self.thread, self.sampled = device == "cuda", None, None, 0

    def __enter__(self):
        gc.collect()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        elif sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
            self.before = resident("VmRSS")
            try:
                Path("/proc/self/clear_refs").write_text("5")
            except OSError:
                self.thread = threading.Thread(target=self.sample, daemon=True)
                self.thread.start()
        return self

    def __exit__(self, *_):
        if self.cuda:
            self.growth = torch.cuda.max_memory_allocated() - self.before
        elif sys.platform == "linux":
            self.growth = (self.sampled if self.thread else resident("VmHWM")) - self.before

    def sample(self):
        while self.growth is None:
            self.sampled = max(self.sampled, resident("VmRSS"))
            time.sleep(0.002)


def resident(key: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key + ":"))
    return int(line.split()[1]) * 1024


def breakdown(cell: Cell, draft, batch: Batch, ours: Ours) -> dict[str, float]:
    """Seconds of the pieces of one step of ours, eager, none containing another.

    The fused loss makes its own gradients, so they are in `loss`; `keys` is their two forwards. `backward` of chunks
    and keys holds what is made again there and, on CUDA, the attention's. Waiting for the device around each piece
    makes them longer.
    """
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4)
    places = (
        (draft_deepseek, "attend", "attention"),
        (draft_deepseek, "attend_cpu_backward", "attention backward"),
        (draft_deepseek, "loss_and_gradients", "loss"),
        (RowChunks, "teacher", "teacher"),
        (Tensor, "backward", "backward"),
        (draft_deepseek.Leaves, "backward", "backward"),
        (ours.ttt_loss, "step", lambda s, *_: "later steps" if s else "step 0"),
        (ours.ttt_loss, "keys", "keys"),
    )
    watch = Stopwatch(cell)
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in places:
            stack.enter_context(patch.object(owner, attribute, watch.wrap(name, getattr(owner, attribute))))
        prepared = watch.wrap("counts", ours.prepare)(batch)
        draft.zero_grad(set_to_none=False)
        with autocast(cell):
            watch.wrap("rest", ours)(*prepared)
        watch.wrap("optimizer", optimizer.step)()
    return watch.seconds


class Stopwatch:
    """Seconds by name, each without those of the pieces called inside."""

    def __init__(self, cell: Cell):
        self.cell, self.seconds, self.inside = cell, {}, [0.0]

    def wrap(self, name, fn):
        def timed(*args, **kwargs):
            start = clock(self.cell.device)
            self.inside.append(0.0)
            out = fn(*args, **kwargs)
            elapsed, key = clock(self.cell.device) - start, name(*args) if callable(name) else name
            self.seconds[key] = self.seconds.get(key, 0.0) + elapsed - self.inside.pop()
            self.inside[-1] += elapsed
            return out

        return timed
