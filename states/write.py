"""Writing states, in a layout of our own: whole documents, the same bytes whether it was interrupted or not."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from einops import rearrange
from safetensors.torch import save_file
from tqdm import tqdm

from data.documents import Document
from data.files import append, is_part, opened_alone, read_json, remove_parts, replace_with
from states.index import read_index, token_key
from states.layer_files import CAPTURE_KEYS, CAPTURE_VERSION, head_sample
from target.model import Target

CHUNK_TOKENS = 16384  # captured together


def write_capture(out, target: Target, documents: list[Document], dtype=torch.bfloat16, note: str = "") -> None:
    """Capture all documents into the directory `out`, in float32 or bf16; goes on where a killed call stopped.

    hidden_states/hs_{i}.safetensors in the layout of speculators but for the last layer, which is stored as training
    reads it, after the final norm (capture.json says so); index.jsonl gets a conversation's line once its file is
    whole. Interrupted or not, the bytes are the same.
    ValueError: the disk is too small (before anything is written), `out` holds anything but the same capture.
    """
    out, meta = Path(out), describe(target, documents, dtype, note)
    lengths = [len(d.tokens) for d in documents]
    check_space(out, lengths, check_out(out, meta)[0], bytes_per_token(target.hidden_size, dtype))
    out.mkdir(parents=True, exist_ok=True)
    with opened_alone(out / "index.jsonl") as index:
        done, used = check_out(out, meta)  # as it is now that nobody else writes
        index.truncate(used)
        for folder in (out, out / "hidden_states"):
            remove_parts(folder)  # of a killed call
        replace_with(out / "capture.json", lambda half: half.write_text(json.dumps(meta, indent=1) + "\n"))
        (out / "hidden_states").mkdir(exist_ok=True)
        capture_rest(out, target, documents, dtype, index, done)


def capture_rest(out: Path, target: Target, documents: list[Document], dtype, index, done: int) -> None:
    lengths = [len(d.tokens) for d in documents]
    with tqdm(total=sum(lengths), desc="capturing", unit="token") as bar:
        bar.update(sum(lengths[:done]))
        for chunk in chunks(lengths):
            if chunk[-1] < done:
                continue
            # whole chunks, also after an interruption: the same batches give the same bits
            captured = target.capture([documents[i].tokens for i in chunk])
            for i, states in zip(chunk, captured, strict=True):
                if i >= done:
                    write_document(out, index, f"hidden_states/hs_{i}.safetensors", documents[i], states, dtype)
                    bar.update(lengths[i])


def write_document(out: Path, index, name: str, document: Document, states, dtype) -> None:
    features, last = (x.to("cpu", dtype) for x in states)
    hidden = torch.cat([rearrange(features, "s (l h) -> s l h", l=3), last[:, None]], dim=1)
    tensors = {"hidden_states": hidden, "token_ids": document.tokens.cpu()}
    replace_with(out / name, lambda half: save_file(tensors, half, metadata={"last_hidden": "after_norm"}))
    row = {"file": name, "input_ids": document.tokens.tolist(), "loss_mask": document.loss_mask.int().tolist()}
    append(index, row)


def describe(target: Target, documents: list[Document], dtype, note: str) -> dict:
    """capture.json: what a directory holds, and by digests of what."""
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"states are stored in float32 or bfloat16, not in {dtype}")
    if not documents:
        raise ValueError("there are no documents to capture")
    texts, weights = hashlib.sha256(), hashlib.sha256()
    for d in documents:
        texts.update(f"{token_key(d.tokens)} {token_key(d.loss_mask)}\n".encode())
    for name, x in target.model.named_parameters():  # a few numbers of each tell fine-tuned weights apart
        weights.update(f"{name} {list(x.shape)} {x.detach().flatten()[:8].float().tolist()}\n".encode())
    return {
        "version": CAPTURE_VERSION,
        "note": note,
        "target": target.config.model_type,
        "target_digest": weights.hexdigest(),
        "documents": len(documents),
        "documents_digest": texts.hexdigest(),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "aux_layers": list(target.aux_layers),
        "dtype": str(dtype).removeprefix("torch."),
        "last_hidden": "after_norm",
        "head": head_sample(target.lm_head),
    }


def check_out(out: Path, meta: dict) -> tuple[int, int]:
    """How many documents of this very capture `out` holds already, and the bytes of their lines in its index: behind
    them stands what an interruption left half done."""
    index = out / "index.jsonl"
    if not (out / "capture.json").is_file():
        if out.exists() and any(not is_beginning(x) for x in out.iterdir()):
            raise ValueError(f"{out} exists and holds no capture; name another directory, or remove it")
        return 0, 0
    held = read_json(out / "capture.json", CAPTURE_KEYS)
    if other := [key for key in meta if key != "note" and held.get(key) != meta[key]]:
        said = ", ".join(f"{key} {held.get(key)!r}, not {meta[key]!r}"[:200] for key in other)
        raise ValueError(f"{out} holds another capture ({said}); name another directory, or remove it")
    rows, used = read_index(index, ("file", "input_ids", "loss_mask")) if index.exists() else ([], 0)
    for i, row in enumerate(rows):
        if i >= meta["documents"] or row["file"] != f"hidden_states/hs_{i}.safetensors":
            raise ValueError(f"line {i + 1} of {index} lists {row['file']!r}, which is not its place; remove {out}")
    return len(rows), used


def is_beginning(path: Path) -> bool:
    """What a call that was killed at once leaves."""
    return path.name == "index.jsonl" and path.stat().st_size == 0 or is_part(path)


def check_space(out: Path, lengths: list[int], done: int, per_token: int) -> None:
    left = per_token * sum(lengths[done:])
    parent = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free = shutil.disk_usage(parent).free
    print(
        f"capture: {sum(lengths):,} tokens of {per_token:,} bytes, {per_token * sum(lengths) / 1e9:,.2f} GB in {out}; "
        f"{left / 1e9:,.2f} GB to write, {free / 1e9:,.2f} GB free"
    )
    if left > free:
        raise ValueError(
            f"{left / 1e9:,.2f} GB do not fit into the {free / 1e9:,.2f} GB left at {parent}; free some first"
        )


def bytes_per_token(hidden: int, dtype) -> int:
    return 4 * hidden * dtype.itemsize + torch.long.itemsize


def chunks(lengths: list[int]) -> Iterator[list[int]]:
    """Consecutive indices of CHUNK_TOKENS at most, or of one document: they depend on the documents alone."""
    chunk = []
    for i, length in enumerate(lengths):
        if chunk and sum(lengths[j] for j in chunk) + length > CHUNK_TOKENS:
            yield chunk
            chunk = []
        chunk.append(i)
    yield chunk
