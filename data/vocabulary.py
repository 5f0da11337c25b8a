"""Draft vocabularies: counted from documents, or read from the maps that trainers and drafts store."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from data.documents import Document
from data.files import check_regular, holds, naming, shapes_in


def draft_vocabulary(documents: Sequence[Document], size: int, special_ids: list[int], vocab_size: int) -> Tensor:
    """`size` target ids, ascending: every special token, then the most frequent learned tokens, then the lowest ids.

    ValueError: a size outside 1..vocab_size, or too small for the special tokens.
    """
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= vocab_size:
        raise ValueError(f"--draft-vocab is {size}; it must be an integer in 1..{vocab_size}, the target's vocabulary")
    if size < len(special_ids):
        raise ValueError(f"--draft-vocab {size} cannot hold the target's {len(special_ids)} special tokens; raise it")
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for begin in range(0, len(documents), 1024):  # a count is V long: not one a document
        some = documents[begin : begin + 1024]
        counts += torch.bincount(torch.cat([d.tokens[d.loss_mask] for d in some]), minlength=vocab_size)
    counts[torch.tensor(special_ids, dtype=torch.long)] = counts.sum() + 1
    return counts.argsort(descending=True, stable=True)[:size].sort().values


def draft_vocabulary_map(path, vocab_size: int) -> Tensor:
    """The target ids of a draft vocabulary [Vd], ascending, as trainers and drafts store them.

    path: a file or the directory with SpecForge's vocab_mapping.pt, speculators' d2t.npy or d2t-{size}.npy (t2d
    beside), AutoModel's manifest.json, or a draft's safetensors. d2t are offsets: target id = draft id + d2t[draft id].
    ValueError: none or several of them, a d2t that is not one to one or does not fit its t2d or the vocabulary.
    """
    path = Path(path)
    if path.is_dir():
        names = ("vocab_mapping.pt", "d2t*.npy", "manifest.json", "*.safetensors")
        found = [x for name in names for x in sorted(path.glob(name)) if x.is_file()]
        found = [x for x in found if x.suffix != ".safetensors" or holds(x, "d2t")]
        if len(found) != 1:
            said = ", ".join(x.name for x in found) or f"none of {', '.join(names)}"
            raise ValueError(f"{path} has {said}; one vocabulary map is wanted, name its file")
        path = found[0]
    check_regular(path, "--draft-vocab")
    with naming(path, "make the map again"):
        ids, t2d = read_map(path)
        check_draft_ids(ids, vocab_size)
        if t2d is not None:
            t2d = t2d.bool()
            if t2d.shape != (vocab_size,) or not t2d[ids].all() or t2d.sum() != len(ids):
                raise ValueError(
                    f"t2d is {list(t2d.shape)} and marks {int(t2d.sum())} ids, d2t gives {len(ids)} of {vocab_size}, "
                    f"{int(t2d[ids[ids < len(t2d)]].sum())} of them marked"
                )
    return ids.sort().values


def read_map(path: Path) -> tuple[Tensor, Tensor | None]:
    """Target ids [Vd] and, where there is one, t2d [V]."""
    if path.suffix == ".json":
        return torch.tensor(json.loads(path.read_bytes())["selected_token_ids"]), None
    if path.suffix == ".npy":
        beside = path.with_name(path.name.replace("d2t", "t2d"))
        held = {x.name[:3]: torch.from_numpy(np.load(x)) for x in (path, beside) if x.is_file()}
    elif path.suffix == ".safetensors":
        with safe_open(path, "pt") as file:
            held = {name: file.get_tensor(name) for name in ("d2t", "t2d") if name in shapes_in(file)}
    else:
        held = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(held, dict) or not isinstance(held.get("d2t"), Tensor) or held["d2t"].ndim != 1:
        raise ValueError(f"it has no row of offsets d2t, but {list(held) if isinstance(held, dict) else type(held)}")
    check_whole(held["d2t"])
    return held["d2t"].long() + torch.arange(len(held["d2t"])), held.get("t2d")


def check_whole(x: Tensor) -> None:
    if x.ndim != 1 or x.is_floating_point() or x.is_complex() or x.dtype == torch.bool:
        raise ValueError(f"it gives {x.dtype} {list(x.shape)}; a row of whole numbers is wanted")


def check_draft_ids(ids: Tensor, vocab_size: int) -> None:
    check_whole(ids)
    distinct = ids.unique().numel()
    if not 0 < distinct == len(ids) or ids.min() < 0 or ids.max() >= vocab_size:
        span = f"{ids.min()}..{ids.max()}" if len(ids) else "nothing"
        raise ValueError(
            f"its {len(ids)} draft ids, {distinct} distinct, span {span}; the vocabulary is {vocab_size} wide"
        )
