"""Text for training: the built-in corpus (the running Python's own standard library), documents with a loss mask, rows.

Knows tokenizers and files, never models.
"""

import ast
import functools
import hashlib
import json
import random
import sysconfig
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from files import check_regular, holds, naming, shapes_in

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MIN_DOCUMENT, MAX_DOCUMENT, MIN_ANSWER = 160, 768, 64  # bytes, which are the tokens of the built-in vocabulary
HELD_OUT_SHARE = 12  # one file in so many is held out


class Document(NamedTuple):
    """One conversation as tokens; `loss_mask[i]` is set where token i is learned: the answer and its end of turn."""

    tokens: Tensor  # [L] long
    loss_mask: Tensor  # [L] bool
    source: str  # where it came from, for messages


class Skipped(Counter):
    """What was left out: how many by reason, the first few of each by name; and how many were `kept`."""

    few = 3

    def __init__(self):
        super().__init__()
        self.named, self.kept = {}, 0

    def add(self, reason: str, names: Iterable[str] = (), n: int = 1) -> None:
        self[reason] += n
        known = self.named.setdefault(reason, [])
        known += list(names)[: self.few - len(known)]

    def lines(self) -> Iterator[str]:
        """For people."""
        for reason, n in (+self).most_common():
            names = ", ".join(self.named.get(reason, ()))
            more = ", ..." if n > len(self.named.get(reason, ())) else ""
            yield f"  skipped {n:,}: {reason}" + (f" ({names}{more})" if names else "")


def listed(ids, loss_mask, vocab_size: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids [S] int64 and loss mask [S] bool out of what a file says they are; ValueError with the reason if it
    says anything else. vocab_size None: ids may be any."""
    try:
        ids, mask = np.array(ids), np.array(loss_mask)
    except (ValueError, OverflowError):
        ids = mask = np.empty(0)
    if ids.ndim != 1 or mask.ndim != 1 or ids.dtype.kind not in "iu" or mask.dtype.kind not in "biu":
        raise ValueError("input_ids and loss_mask that are no lists of integers")
    if len(ids) != len(mask):
        raise ValueError("input_ids and loss_mask of different length")
    if ids.min() < 0 or ids.max() >= (1 << 31 if vocab_size is None else vocab_size):
        raise ValueError("input_ids outside the vocabulary")
    if mask.min() < 0 or mask.max() > 1:
        raise ValueError("a loss_mask of other numbers than 0 and 1")
    return ids.astype(np.int64), mask.astype(bool)


class Documents(Sequence):
    """Documents as views of one array of tokens [N] int32 and one mask [N] bool.

    An index makes a `Document` (with int64 tokens, a copy), a slice another `Documents` over the same arrays.
    """

    def __init__(self, tokens: Tensor, loss_mask: Tensor, begins, lengths, sources: list[str]):
        self.tokens, self.loss_mask = tokens, loss_mask
        self.begins, self.lengths, self.sources = begins, lengths, sources

    @classmethod
    def gather(cls, documents: list[Document]) -> "Documents":
        lengths = np.array([len(d.tokens) for d in documents])
        tokens, loss_mask = torch.cat([d.tokens.int() for d in documents]), torch.cat([d.loss_mask for d in documents])
        return cls(tokens, loss_mask, lengths.cumsum() - lengths, lengths, [d.source for d in documents])

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int | slice) -> "Document | Documents":
        if isinstance(i, slice):
            return self.take(range(len(self))[i])
        at = slice(self.begins[i], self.begins[i] + self.lengths[i])
        return Document(self.tokens[at].long(), self.loss_mask[at], self.sources[i])

    def take(self, indices: Iterable[int]) -> "Documents":
        i = np.fromiter(indices, np.int64)
        return Documents(self.tokens, self.loss_mask, self.begins[i], self.lengths[i], [self.sources[j] for j in i])

    @property
    def learned(self) -> int:
        return sum(int(self.loss_mask[b : b + n].sum()) for b, n in zip(self.begins, self.lengths, strict=True))

    def summary(self) -> str:
        tokens = self.lengths.sum()
        return f"{len(self):,} documents, {tokens:,} tokens, {self.learned / tokens:.0%} learned"


def split(documents: Documents, share: float, seed: int = 0) -> tuple[Documents, Documents]:
    """(training, held out): about `share` of the conversations is held out, each side shuffled by `seed`.

    A hash of the tokens of a conversation's first document alone decides the side. So it is the same on every machine
    and for every seed and stays when data are added, and identical conversations never part, nor do the documents of
    one; nor does the order depend on that of the files. Neither side is empty. ValueError: a share outside 0..1, fewer
    than two different conversations.
    """
    if not 0 < share < 1:
        raise ValueError(f"the held-out share is {share}; it must lie between 0 and 1")
    positions, source = [], None
    for document in documents:
        if document.source != source:  # the documents of one conversation are neighbours
            digest = hashlib.sha256(document.tokens.numpy().astype("<i4").tobytes()).digest()
            source, position = document.source, int.from_bytes(digest[:8], "big") / 2**64
        positions.append(position)
    positions = np.array(positions)
    if len(np.unique(positions)) < 2:
        raise ValueError(
            f"{len(documents)} documents of one conversation: one is held out, so two different ones are needed"
        )
    edge = np.clip(share, np.nextafter(positions.min(), 1), positions.max())  # one conversation a side at least
    held_out = positions < edge
    order = positions.argsort(kind="stable")[np.random.default_rng(seed).permutation(len(documents))]
    return documents.take(order[~held_out[order]]), documents.take(order[held_out[order]])


# ------------------------------------------------------------------------------------------------ the built-in corpus


def python_documents(held_out: bool, seed: int = 0) -> list[tuple[str, str]]:
    """Functions and classes of the standard library as (prompt, answer) pairs, 160 to 768 bytes together.

    The split is by file and the same for every seed, so that what is held out was never shown to a target or a draft;
    the seed only shuffles. ValueError where this Python comes without its sources.
    """
    pairs = list(cut_standard_library(held_out))
    random.Random(seed).shuffle(pairs)
    return pairs


@functools.cache  # seconds; a run that first makes its target asks twice
def cut_standard_library(held_out: bool) -> tuple[tuple[str, str], ...]:
    root, pairs = Path(sysconfig.get_paths()["stdlib"]), {}  # a dict for its order: some functions stand in two files
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not is_test_file(relative) and is_held_out(relative) == held_out:
            pairs.update(dict.fromkeys(cut_into_documents(path)))
    if not pairs:
        raise ValueError(
            f"no Python sources in {root}, and the built-in corpus is cut from them; use a Python that comes with its "
            "standard library as .py files"
        )
    shown = set() if held_out else set(cut_standard_library(True))  # copies of a held-out function are not learned
    return tuple(pair for pair in pairs if pair not in shown)


def is_test_file(relative: Path) -> bool:
    return bool(SKIPPED_FOLDERS & set(relative.parts[:-1])) or relative.name.startswith("test_")


def is_held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()  # hash() differs between processes
    return digest[0] % HELD_OUT_SHARE == 0


def cut_into_documents(path: Path) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of one file; none for a file that is no UTF-8 or does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")  # not splitlines(): that also splits at form feeds, which ast does not count
    pairs = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pairs.append(cut(node, lines))
        elif isinstance(node, ast.ClassDef):
            whole = cut(node, lines)
            methods = [] if whole else [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            pairs += [whole] + [cut(method, lines) for method in methods]
    return [pair for pair in pairs if pair is not None]


def cut(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> tuple[str, str] | None:
    """Signature and docstring, or the first third if that is more, as prompt, the rest as answer. None: a bad size."""
    start = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list]) - 1
    block = textwrap.dedent("\n".join(lines[start : node.end_lineno]) + "\n")
    size = len(block.encode())
    if not MIN_DOCUMENT <= size <= MAX_DOCUMENT:
        return None
    first = node.body[0]
    head = first.end_lineno if ast.get_docstring(node, clean=False) is not None else first.lineno - 1
    rows, n = block.split("\n"), max(1, head - start)
    while n < len(rows) and len("\n".join(rows[:n]).encode()) < size / 3:
        n += 1
    prompt, answer = "\n".join(rows[:n]) + "\n", "\n".join(rows[n:])
    return (prompt, answer) if len(answer.encode()) >= MIN_ANSWER else None


# --------------------------------------------------------------------------------------------------------------- rows


def anchors_of(loss_mask: Tensor, steps: int) -> int:
    """Slots of one document [L] that are valid at one of `steps` steps: those within reach of a learned token."""
    learned = F.pad(loss_mask[1:].float(), (0, steps))
    return int(learned.unfold(0, steps, 1).amax(1).sum()) if len(loss_mask) > 1 else 0


def sizes_of(documents: Iterable[Document], steps: int) -> list[tuple[int, int]]:
    """(tokens, anchors) of every document."""
    return [(len(d.tokens), anchors_of(d.loss_mask, steps)) for d in documents]


PACKING = 2  # of the order that `pack` gives, in which checkpoints count


def pack(lengths: Sequence[int], row_tokens: int, rng: random.Random) -> list[list[int]]:
    """Indices of documents of so many tokens, in rows of at most `row_tokens`.

    Best fit: in pools of 1024 shuffled documents the longest goes first, into the row that it leaves fullest. The rows
    are shuffled; the same `rng` state gives the same rows.
    """
    order, rows = list(range(len(lengths))), []
    rng.shuffle(order)
    for start in range(0, len(order), 1024):
        rows += best_fit(order[start : start + 1024], lengths, row_tokens)
    rng.shuffle(rows)
    return rows


def best_fit(pool: list[int], lengths: Sequence[int], row_tokens: int) -> list[list[int]]:
    rows, left = [], []  # left: free tokens of each row
    for i in sorted(pool, key=lambda i: -lengths[i]):
        fitting = [(free, r) for r, free in enumerate(left) if free >= lengths[i]]
        if fitting:
            _, r = min(fitting)
            rows[r].append(i)
            left[r] -= lengths[i]
        else:
            rows.append([i])
            left.append(row_tokens - lengths[i])
    return rows


def cut_to(document: Document, row_tokens: int) -> Document:
    return Document(document.tokens[:row_tokens], document.loss_mask[:row_tokens], document.source)


def lay_out(rows: list[list[tuple]], row_tokens: int, like: tuple[Tensor, Tensor]) -> dict:
    """Rows of (tokens [L], loss_mask [L], features [L,n_aux*H], last_hidden [L,W]) as build_rows wants them, [B,T,...].

    like: features and last hidden states of the widths, dtypes and devices wanted, of no tokens at all. Documents are
    numbered from 0 and positions restart with each; behind the last lies padding (document -1), and a row without
    documents is nothing else.
    """
    b = len(rows)
    features, last_hidden = (x.new_zeros(b, row_tokens, x.shape[-1]) for x in like)
    out = {
        "tokens": torch.zeros(b, row_tokens, dtype=torch.long),
        "loss_mask": torch.zeros(b, row_tokens, dtype=torch.bool),
        "document": torch.full((b, row_tokens), -1),
        "position": torch.zeros(b, row_tokens, dtype=torch.long),
        "features": features,
        "last_hidden": last_hidden,
    }
    for r, row in enumerate(rows):
        begin = 0
        for number, (tokens, loss_mask, features, last_hidden) in enumerate(row):
            at = slice(begin, begin := begin + len(tokens))
            out["tokens"][r, at], out["loss_mask"][r, at] = tokens, loss_mask
            out["features"][r, at], out["last_hidden"][r, at] = features, last_hidden
            out["document"][r, at], out["position"][r, at] = number, torch.arange(len(tokens))
    return out


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
