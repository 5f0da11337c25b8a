"""What a training step costs: this repo beside the dense eager recurrence that EAGLE-3 trainers run today, in one run.

    python bench.py                                 mid size, deepseek-v3, T 2048, 25% and 100% supervised
    python bench.py --full --out bench.json         both drafts, T 512-4096, 10-100%, packed or not
    python bench.py --suite shapes                  the real drafts by formula: no GPU, little memory
    python bench.py --device cuda --suite h200      two shapes of the DeepSeek-V3 draft, compiled
    python bench.py --suite decode                  drafting, decoding with a trained draft (measuring/decoding.py)
    python bench.py --suite serve URL               what a server with a draft accepts and saves (measuring/serving.py)

A step is the teacher, zero_grad, forward and backward; the optimizer is apart, in the breakdown. The teacher counts for
both sides: the baseline applies the target's head to all T slots, `build_rows` to the supervised tokens alone. Nothing
is timed before loss and every gradient of each implementation agree with the baseline's (else exit code 1).

Times come from one process in which the implementations take turns, ratios from the same round: on a busy machine trust
the ratios alone. Memory on the CPU is the growth of a fresh process per number over its state before its first step;
before that, gradients are allocated and libraries warmed up, and malloc is told to give blocks of 128 KB and more back
at once, so that holes of its heap do not count. On CUDA it is the allocator's peak over its state before the step.

MFU is `model_flops` (what the mathematics needs at the supervised slots, forward and backward, nothing recomputed) over
time x the rate of a large matrix product, measured first; `floor` is the time they take at that rate.

Shapes: B rows (1 here), T slots, A anchors, S steps, H hidden, n heads, R kv_lora_rank, V and Vd vocabularies.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from training.entry import ending, guard_loading, handle_signals, interrupt

# OpenMP's threads must sleep while they wait: spinning ones make a step ten times slower, at random, when others work
# on the same cores. Read when torch loads.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if __name__ in ("__main__", "__mp_main__"):  # what follows takes seconds to load
    guard_loading(__name__)

import torch
from transformers.utils import logging as transformers_logging

from data.files import replace_with
from measuring import decoding, serving, shapes
from measuring.costs import FORMS
from measuring.step import DRAFTS, SIZES, STEPS, Cell, Disagreement, check_memory, in_child, make_draft
from training.settings import OneLineParser, as_path

RESULT_BYTES = 1 << 20  # of --out, at most

# ---------------------------------------------------------------------------------------------------- the shapes suite


def suite_shapes(args) -> dict:
    return shapes.suite(args, print_shapes)


def print_shapes(rows: list[dict], chunks: str) -> None:
    print(f"The real drafts by formula: S {STEPS}, bf16 activations, float32 weights, gradients and AdamW moments.\n")
    table, memory = [], []
    for row in rows:
        name, kept = (row["draft"], f"{row['draft_vocab_size']:,}"), row["saved_bytes"]
        parameters = f"{row['parameters'] / 1e9:.2f} ({row['trained'] / 1e9:.2f})"
        flops, cache = sum(row["flops_per_token"].values()) / 1e9, " / ".join(f"{x:,}" for x in row["cache_bytes"])
        megabytes = " / ".join(f"{(kept[form]['anchor'] or kept[form]['slot']) / 1e6:.2f}" for form in FORMS)
        table.append((*name, parameters, f"{flops:.1f}", cache, megabytes))
        sums = [[sum(forms[form].values()) / 1e9 for form in FORMS] for forms in row["memory"].values()]
        memory.append((*name, *(" / ".join(f"{x:,.0f}" for x in place) for place in sums)))
    head = ("draft", "Vd", "1e9 parameters (trained)", "GFLOP/token", "cache B/slot/step", "saved MB/anchor")
    print_table(head, table)
    print(
        "GFLOP/token: forward and backward of a supervised token, all of T 4096 supervised. cache: ours / K/V lists.\n"
        "saved for the backward: ours, of one chunk / K/V lists in the dense form (per slot; each step's log-\n"
        "probabilities and copy of the teacher included, T x T scores not).\n\n"
        "GB of a training step, by T and supervised share: ours in chunks / dense with its T x T scores.\n"
        f"Anchors of a chunk: {chunks}.\n"
    )
    print_table(("draft", "Vd", *rows[0]["memory"]), memory)


# ---------------------------------------------------------------------------------------------------- the train suite


def suite_train(args) -> dict:
    cells, rows, peaks, full = train_cells(args), [], {}, []
    for cell in cells:
        check_memory(cell)
    for cell in cells:
        result = in_child(cell)
        peak = result["peak_bytes"]
        if cell.device == "cpu":
            peak |= {name: in_child(replace(cell, memory_of=name))["peak_bytes"] for name in result["times"]}
        rows += train_rows(cell, result)
        peaks[cell] = peak.get("ours eager")
        full.append({"cell": asdict(cell), **result})
        print(f"{cell}: matrix rate {result['rate'] / 1e9:,.0f} GFLOP/s", flush=True)
    growth = {}
    for cell in cells:
        twice = replace(cell, slots=2 * cell.slots)
        if twice not in peaks and cell.device == "cpu" and not args.full:
            peaks[twice] = in_child(replace(twice, memory_of="ours eager"))["peak_bytes"]
        if peaks[cell] and peaks.get(twice):
            growth[str(cell)] = peaks[twice] / peaks[cell]
    print_train(rows, full, growth)
    machine = decoding.machine(args)
    return {"suite": args.suite, "machine": machine, "rows": rows, "peak_of_2t_over_t": growth, "cells": full}


def train_cells(args) -> list[Cell]:
    base = Cell(device=args.device, threads=args.threads, rounds=args.rounds, compile=args.compile, size=args.size)
    base = replace(base, chunk=args.chunk, baseline=not args.no_baseline)
    if args.suite == "h200":
        base = replace(base, size="deepseek-v3", dtype="bfloat16", slots=4096)
        return [base, replace(base, slots=32768, share=0.25)]
    drafts = args.draft or (list(DRAFTS) if args.full else ["deepseek-v3"])
    slots = args.row_tokens or ([512, 1024, 2048, 4096] if args.full else [2048])
    shares = args.share or ([0.1, 0.25, 0.5, 1.0] if args.full else [0.25, 1.0])
    packed = [True, False] if args.full else [True]
    matrix = itertools.product(drafts, packed, slots, shares)
    return [replace(base, draft=draft, packed=p, slots=t, share=share) for draft, p, t, share in matrix]


def train_rows(cell: Cell, result: dict) -> list[dict]:
    """One row per implementation: medians over the rounds; ratios are of the same round."""
    rows, floor = [], sum(result["flops"].values()) / result["rate"]
    total = {name: [sum(pieces) for pieces in times] for name, times in result["times"].items()}
    for name, times in result["times"].items():
        row = {"draft": cell.draft, "size": cell.size, "slots": cell.slots, "share": cell.share, "packed": cell.packed}
        row |= {"implementation": name, "floor_s": floor, "peak_bytes": result["peak_bytes"].get(name)}
        if times:
            medians = map(statistics.median, zip(*times, strict=True))
            row |= dict(zip(("teacher_s", "forward_s", "backward_s"), medians, strict=True))
            row["step_s"] = statistics.median(total[name])
            row |= {"tokens_per_s": result["work"]["taught"] / row["step_s"], "mfu": floor / row["step_s"]}
        if times and total.get("baseline"):
            row["faster_by_round"] = [a / b for a, b in zip(total["baseline"], total[name], strict=True)]
            row["faster"] = statistics.median(row["faster_by_round"])
        if row["peak_bytes"] and result["peak_bytes"].get("baseline"):
            row["memory_share"] = row["peak_bytes"] / result["peak_bytes"]["baseline"]
        rows.append(row)
    return rows


def print_train(rows: list[dict], full: list[dict], growth: dict[str, float]) -> None:
    milliseconds = {"teacher ms": "teacher_s", "forward": "forward_s", "backward": "backward_s", "step ms": "step_s"}
    columns = {head: (key, "{:,.0f}", 1e3) for head, key in milliseconds.items()}
    columns |= {"faster": ("faster", "{:.2f}x", 1), "tokens/s": ("tokens_per_s", "{:,.0f}", 1)}
    columns |= {"MFU": ("mfu", "{:.0%}", 1), "floor ms": ("floor_s", "{:,.0f}", 1e3)}
    columns |= {"peak MB": ("peak_bytes", "{:,.0f}", 1e-6), "of baseline": ("memory_share", "{:.0%}", 1)}
    table = []
    for row in rows:
        packed = "packed" if row["packed"] else "one document"
        table.append((row["draft"], row["slots"], f"{row['share']:.0%}", packed, row["implementation"]))
        found = ((row.get(key), form, scale) for key, form, scale in columns.values())
        table[-1] += tuple("-" if x is None else form.format(x * scale) for x, form, scale in found)
    print()
    print_table(("draft", "T", "supervised", "layout", "implementation", *columns), table)
    for cell in full:
        whole = sum(cell["breakdown"].values())
        pieces = (f"{name} {x * 1e3:,.0f} ms ({x / whole:.0%})" for name, x in cell["breakdown"].items())
        print(f"{Cell(**cell['cell'])}, ours eager: {', '.join(pieces)}")
    for name, ratio in growth.items():
        print(f"{name}, ours eager: peak memory at 2T is {ratio:.2f} times that at T")
    if any("step_s" not in row for row in rows):
        print("A row without a time ran out of memory.")


def print_table(head: tuple, rows: list[tuple]) -> None:
    widths = [max(len(str(row[i])) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, ["-" * width for width in widths], *rows):
        print(
            str(row[0]).ljust(widths[0]), *(str(x).rjust(w) for x, w in zip(row[1:], widths[1:], strict=True)), sep="  "
        )
    print(flush=True)


# --------------------------------------------------------------------------------------------------------------- main


def suite_decode(args) -> dict:
    names = args.draft or ["deepseek-v3"]
    cells = {name: Cell(draft=name, size=args.size, device=args.device) for name in names}
    return decoding.suite(args, lambda: {name: make_draft(cell) for name, cell in cells.items()}, print_table)


def suite_serve(args) -> dict:
    return serving.suite(args, print_table)


SUITES = {"train": suite_train, "shapes": suite_shapes, "h200": suite_train}
SUITES |= {"decode": suite_decode, "serve": suite_serve}


def parse(argv=None) -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", choices=SUITES, default="train")
    parser.add_argument("--full", action="store_true", help="the whole matrix, about an hour")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--compile", choices=("off", "default", "max-autotune"), help="max-autotune on cuda, else off")
    parser.add_argument("--draft", nargs="+", choices=DRAFTS, help="default deepseek-v3")
    parser.add_argument("--size", choices=SIZES, default="mid")
    parser.add_argument("--row-tokens", nargs="+", type=int, metavar="T", help="default 2048")
    parser.add_argument("--chunk", type=int, metavar="C", help="anchors of a chunk, default what training takes")
    parser.add_argument("--no-baseline", action="store_true", help="ours alone: its T x T scores soon fit nowhere")
    parser.add_argument("--share", nargs="+", type=float, help="supervised shares, default 0.25 1")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=as_path, help="a JSON file for the full numbers")
    decoding.add_flags(parser)
    serving.add_flags(parser)
    args = parser.parse_args(argv)
    if args.prompt_count is None:
        args.prompt_count = 2 * max(args.at_once) if args.suite == "serve" else 12
    on_cpu = "default" if args.suite == "decode" and not args.run else "off"  # a chain compiles in a minute
    args.compile = args.compile or ("max-autotune" if args.device == "cuda" else on_cpu)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no GPU; leave it out to measure on the CPU")
    if args.suite == "h200" and args.device != "cuda":
        parser.error("--suite h200 measures on a GPU: add --device cuda, or take --suite shapes for the formulas")
    bounds = [
        ("row-tokens", args.row_tokens or [64], 64, 1 << 20),
        ("chunk", [args.chunk or 1], 1, 1 << 20),
        ("rounds", [args.rounds], 1, 10_000),
        ("threads", [args.threads], 1, 1024),
        *serving.bounds(args),
        *decoding.bounds(args),
    ]
    for name, values, low, high in bounds:
        for value in values:
            if not low <= value <= high:  # a NaN, too
                parser.error(
                    f"--{name} is {value}; it must be at {f'most {high:,}' if value > high else f'least {low}'}"
                )
    if not all(0 < share <= 1 for share in args.share or []):
        parser.error(f"--share is {args.share}; a share lies above 0 and is at most 1")
    if not 0 < args.top_p <= 1:
        parser.error(f"--top-p is {args.top_p}; it lies above 0 and is at most 1")
    if wrong := serving.complaint(args):
        parser.error(wrong)
    if args.out and (complaint := unwritable(args.out)):
        parser.error(f"--out {args.out}: {complaint}")
    return args


def unwritable(out: Path) -> str | None:
    """Why the numbers, measured first, could not be written there."""
    if out.is_dir() or os.path.lexists(out):
        return "is a folder; name a file in it" if out.is_dir() else "exists already, nothing is overwritten"
    if not out.absolute().parent.is_dir():
        return "there is no such folder"
    try:
        with tempfile.TemporaryFile(dir=out.absolute().parent) as file:
            file.write(bytes(RESULT_BYTES))
            file.flush()
    except OSError as error:
        return f"nothing can be written there ({error.strerror})"


def main(argv=None) -> None:
    handle_signals(interrupt)
    args = parse(argv)
    transformers_logging.disable_progress_bar()
    try:
        result = SUITES[args.suite](args)
    except Disagreement as error:
        sys.exit(str(error))  # exit code 1
    print(json.dumps({key: value for key, value in result.items() if key != "cells"}), flush=True)
    if args.out:
        replace_with(args.out, lambda half: half.write_text(json.dumps(result, indent=1) + "\n"))


def cli(argv=None) -> int:
    return ending("bench.py", main, argv, "")


if __name__ == "__main__":
    sys.exit(cli())
