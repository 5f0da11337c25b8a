"""What the drafts of real targets take, by formula: the "shapes" suite of bench.py."""

import itertools
from collections.abc import Callable

import torch

from draft_deepseek import default_chunk
from measuring.costs import FORMS, even_workload, model_flops, saved, step_memory
from measuring.step import DRAFTS, STEPS, make_config


def suite(args, print_shapes: Callable[[list[dict], str], None]) -> dict:
    """The real drafts on the meta device: nothing is allocated."""
    chunk_of = lambda slots: args.chunk or default_chunk(slots, "cuda")  # noqa: E731
    rows, t, places = [], 4096, list(itertools.product((4096, 32768, 131072), (0.25, 1.0)))
    work = even_workload(t, t, t, STEPS * t * (t + 1) // 2, STEPS)
    for size, reduced in itertools.product(("deepseek-v3", "kimi-k2.5", "kimi-k3"), (True, False)):
        name = size if size in DRAFTS else "deepseek-v3"
        with torch.device("meta"):
            draft = DRAFTS[name](make_config(name, size, **{} if reduced else {"draft_vocab_size": None}))
        cfg, n, frozen = draft.config, draft.config.num_attention_heads, draft.model.embed_tokens.weight.numel()
        trained = sum(p.numel() for p in draft.parameters()) - frozen
        row = {"draft": size, "draft_vocab_size": cfg.draft_vocab_size, "parameters": trained + frozen}
        row |= {"trained": trained, "flops_per_token": {key: x / t for key, x in model_flops(cfg, **work).items()}}
        row["cache_bytes"] = [2 * (cfg.kv_lora_rank + cfg.qk_rope_head_dim), 2 * n * (cfg.qk_head_dim + cfg.v_head_dim)]
        row["saved_bytes"] = {form: saved(cfg, 2, STEPS, form)._asdict() for form in FORMS}
        row["memory"] = {
            f"T {slots} {share:.0%}": {
                form: step_memory(
                    cfg, trained, frozen, slots, min(chunk_of(slots), round(share * slots)), 2, form, STEPS
                )
                for form in FORMS
            }
            for slots, share in places
        }
        rows.append(row)
    chunks = {slots: chunk_of(slots) for slots, _ in places}
    print_shapes(rows, ", ".join(f"{chunk:,} at T {slots:,}" for slots, chunk in chunks.items()))
    drafts = [{key: x for key, x in row.items() if key not in ("memory", "saved_bytes")} for row in rows]
    return {"suite": "shapes", "steps": STEPS, "chunks": chunks, "drafts": drafts, "cells": rows}
