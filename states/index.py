"""Which conversations a folder of states holds: index.jsonl, a line each, and their loss masks by their token ids."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from torch import Tensor

from data.documents import Document, Skipped, listed
from data.files import Damaged, naming, open_regular


def read_index(path: Path, keys: tuple[str, ...]) -> tuple[list[dict], int]:
    """Rows of a .jsonl file and how many bytes they take; a torn last line is left out. ValueError: no such index."""
    rows, used = [], 0
    with naming(path, "copy it again, or write it anew"), open_regular(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            row = read_row(line, f"line {len(rows) + 1}")
            if missing := [key for key in keys if key not in row]:
                raise ValueError(f"line {len(rows) + 1} lacks {missing}")
            rows.append(row)
            used += len(line)
    return rows, used


def read_row(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{where} is no JSON") from None
    if not isinstance(row, dict):
        raise ValueError(f"{where} is a {type(row).__name__}, not an object")
    return row


def token_key(tokens: Tensor | list[int]) -> str:
    """Names a conversation by its token ids."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()


def masks_of(documents: Iterable[Document]) -> dict[str, Tensor]:
    """Loss masks by `token_key`."""
    return {token_key(document.tokens): document.loss_mask for document in documents}


def read_masks(path, skipped: Skipped | None = None) -> dict[str, np.ndarray]:
    """The same out of a .jsonl file whose lines hold `input_ids` and `loss_mask`. ValueError: a line that does not, or
    the same ids with two masks; with `skipped` such lines are left out and named there."""
    masks = {}
    for number, row in enumerate(read_index(Path(path), ("input_ids", "loss_mask"))[0], start=1):
        try:
            with naming(f"line {number} of {path}", "write it anew, or skip what is damaged"):
                tokens, mask = listed(row["input_ids"], row["loss_mask"])
                before = masks.setdefault(token_key(tokens), mask)
                if not np.array_equal(before, mask):
                    raise ValueError("another line gives the same input_ids another loss_mask")
        except Damaged as error:
            if skipped is None:
                raise
            skipped.add("damaged", [str(error).rpartition("; ")[0]])
    return masks
