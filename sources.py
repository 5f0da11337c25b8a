"""Where training rows come from: which documents, whose states at them, packed into micro-batches.

    built-in corpus, --data chats.jsonl    a target that runs here       its states captured as rows are made
    --data CAPTURED                        its embedding and head alone  states read from disk, ahead
    --follow DIR --data chats.jsonl        the same                      states taken as a running vLLM writes them

Shapes: T slots of a row, L tokens of a document, H the target's hidden size, V its vocabulary, W the
width of the states that the teacher is made from.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from capture import Follower, bytes_per_token, prefetched
from captured import is_captured, masks_of, open_captured, read_masks, token_key
from conversations import answered, read_conversations
from data import Document, Documents, Skipped, anchors_of, cut_to, lay_out, pack, python_documents, sizes_of, split
from draft_deepseek import RowChunks
from ends import TargetEnds, load_ends
from target import Target, check_aux_layers, load_target, tiny_target

NOT_ONE = 100  # documents that cannot be used, before a run is given up that has read no other
POOL_ROWS = 4  # documents that arrive are packed when they fill so many rows
TINY = {"deepseek-v3": "deepseek-v3", "kimi-k2": "deepseek-v3", "kimi-k2.5": "deepseek-v3", "kimi-k3": "kimi-k3"}


class Source(NamedTuple):
    """Documents, the target's states at them, and what a draft takes from the target."""

    training: Documents
    held_out: Documents
    states: Callable  # list of documents -> of each (features [L,3H], last [L,W]), or None for a damaged one
    head: Callable  # last [m,W] -> logits [m,V]
    width: int  # W
    aux_layers: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    embed_tokens: nn.Embedding
    target: Target | TargetEnds | None  # None: a cache that carries its teacher
    draft_ids: Tensor | None = None  # the draft vocabulary that the data is bound to
    on_disk: bool = False
    is_tiny: bool = False  # the built-in target
    follower: Follower | None = None
    unread: Skipped | None = None  # what could not be used when it was read

    def report_unread(self, args, ranks) -> None:
        """Says what of all ranks could not be used; ValueError where nothing else was read."""
        if self.unread is None:
            return
        found = Skipped()
        for counts, named, kept in ranks.gather([(dict(self.unread), self.unread.named, self.unread.kept)]):
            found.kept += kept
            for reason, n in counts.items():
                found.add(reason, named[reason], n)
        if +found:
            ranks.print("\n".join([f"left out of {args.follow or args.data[0]} when it was read:", *found.lines()]))
        check_some_left(found)

    @property
    def config(self) -> dict | None:
        return None if self.target is None else self.target.config.to_dict()

    @property
    def lm_head(self) -> nn.Linear | None:
        return None if self.target is None else self.target.lm_head

    @property
    def special_token_ids(self) -> list[int]:
        return [] if self.target is None else self.target.special_token_ids


def check_some_left(unread: Skipped) -> None:
    if +unread and not unread.kept:
        said = "; ".join(line.strip() for line in unread.lines())
        raise ValueError(
            f"nothing usable is left of the {unread.total():,} documents read ({said}); capture them again"
        )


def open_source(args, ranks) -> Source:
    """What the settings name. ValueError: data, target and layers that do not fit together, with what to do."""
    paths = [Path(path) for path in args.data or ()]
    captured = [path for path in paths if is_captured(path)]
    if captured and (len(paths) > 1 or args.follow):
        raise ValueError(f"{captured[0]} holds captured states; it is read alone, without other --data or --follow")
    if captured:
        source = captured_source(args, captured[0], ranks)
        if ranks.rank == 0:
            print(teacher_check(source, sampled(source)), flush=True)
        return source
    if args.follow:
        return followed_source(args, ranks)
    target = open_target(args, ranks)
    if paths:
        training, held_out = split_documents(args, conversations(args, target.tokenizer, ranks), ranks)
    else:
        training, held_out = (corpus(args, target, ranks, held_out) for held_out in (False, True))
    return Source(
        training,
        held_out,
        lambda documents: target.capture([d.tokens for d in documents]),
        target.head,
        target.hidden_size,
        target.aux_layers,
        target.hidden_size,
        target.vocab_size,
        target.embed_tokens,
        target,
        is_tiny=not args.model,
    )


def open_target(args, ranks) -> Target:
    if args.model:
        path, note = args.model, f"its config.json decides, not the preset {args.target}"
    else:
        with ranks.first_alone():
            path = tiny_target(TINY[args.target], Path(args.runs) / f"tiny-{TINY[args.target]}")
        note = "the built-in one"
    ranks.print(f"target: {path} ({note})")
    return load_target(path, layers_of(args), args.trust_remote_code, args.device)


def layers_of(args) -> list[int] | None:
    if args.aux_layers is None:
        return None
    try:
        return [int(part) for part in args.aux_layers.split(",")]
    except ValueError:
        raise ValueError(f"--aux-layers is {args.aux_layers!r}; three layers are wanted, as in 1,29,57") from None


def corpus(args, target: Target, ranks, held_out: bool) -> Documents:
    """The built-in one, in documents of at most a row; prints what was left out."""
    if target.tokenizer is None:
        raise ValueError(
            f"{args.model} has no tokenizer, and the corpus is text; put tokenizer.json beside config.json"
        )
    pairs = python_documents(held_out, args.seed)[: args.documents]
    whole = answered(target.tokenizer, pairs)
    kept = [d for d in (cut_to(d, args.row_tokens) for d in whole) if anchors_of(d.loss_mask, 1)]
    if not kept:
        raise ValueError(f"no document has a learned token within --row-tokens {args.row_tokens}; raise it")
    cut = sum(len(d.tokens) > args.row_tokens for d in whole)
    documents = Documents.gather(kept)
    left = f"{cut} cut to a row, {len(whole) - len(kept)} without any"
    ranks.print(f"{'held out' if held_out else 'training'}: {documents.summary()}; {left}")
    return documents


def conversations(args, tokenizer, ranks) -> Documents:
    """Those in the files of --data; prints what was skipped and why."""
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer for --data; put tokenizer.json beside config.json")
    cache, paths = Path(args.runs) / "tokens", [Path(path) for path in args.data]
    with ranks.first_alone():  # the others find all tokens in the cache
        documents, report = read_conversations(
            paths, tokenizer, args.row_tokens, args.reasoning, cache=cache, progress=ranks.rank == 0
        )
    ranks.print("data: " + "\n".join(report.lines()))
    return documents


def split_documents(args, documents: Documents, ranks) -> tuple[Documents, Documents]:
    training, held_out = split(documents, args.held_out, args.seed)
    training = training[: args.documents]
    ranks.print(f"training: {training.summary()}\nheld out: {held_out.summary()}")
    return training, held_out


def captured_source(args, path: Path, ranks) -> Source:
    """States on disk; of the target only embedding, final norm and head are read."""
    ends = None
    if args.model:
        ends = load_ends(args.model, args.device, trust_remote_code=args.trust_remote_code)
        ranks.print(f"target: {args.model} (embedding, norm and head; its config.json decides, not the preset)")
    captured = open_captured(path, ends, layers_of(args), skip_damaged=args.skip_damaged)
    fitting = [d for d in (cut_to(d, args.row_tokens) for d in captured.documents) if anchors_of(d.loss_mask, 1)]
    if not fitting:
        raise ValueError(f"no document in {path} has a learned token within --row-tokens {args.row_tokens}; raise it")
    kept = {d.source for d in fitting}
    empty = [d.source for d in captured.documents if d.source not in kept]
    captured.skipped.add("nothing to learn in the row", empty, len(empty))
    said = f"data: {path} ({captured.kind}), layers {list(captured.aux_layers)} by output"
    ranks.print("\n".join([said, *captured.skipped.lines()]))
    return Source(
        *split_documents(args, Documents.gather(fitting), ranks),
        captured.states,
        captured.head,
        captured.width,
        captured.aux_layers,
        captured.hidden_size,
        captured.vocab_size,
        captured.embed_tokens,
        ends,
        captured.draft_ids,
        on_disk=True,
        unread=captured.unread,
    )


def followed_source(args, ranks) -> Source:
    """States that a running vLLM writes, of conversations that are known before."""
    if not (args.model and args.data):
        raise ValueError("--follow takes the loss masks from --data and the head from --model; give both")
    ends = load_ends(args.model, args.device, trust_remote_code=args.trust_remote_code)
    training, held_out = split_documents(args, conversations(args, ends.tokenizer, ranks), ranks)
    index = Path(args.follow) / "index.jsonl"  # from --send: what was really sent
    masks = read_masks(index) if index.is_file() else masks_of([*training, *held_out])
    limit = None if args.follow_gb is None else int(args.follow_gb * 1e9)
    waiting = ranks.world * (POOL_ROWS + args.accumulate * args.batch_rows) * args.row_tokens  # tokens not done with
    need = 2 * waiting * bytes_per_token(ends.hidden_size, torch.float32)
    if limit is not None and limit < need:  # else the driver would pause for states that wait for more of them
        raise ValueError(f"--follow-gb is {args.follow_gb:g}; so many rows at once need {need / 1e9:.3g} at least")
    follower = Follower(args.follow, ends, masks, rank=ranks.rank, world=ranks.world, max_bytes=limit)
    return Source(
        training,
        held_out,
        None,
        ends.head,
        ends.hidden_size,
        check_aux_layers(layers_of(args), ends.config.num_hidden_layers),
        ends.hidden_size,
        ends.vocab_size,
        ends.embed_tokens,
        ends,
        on_disk=True,
        follower=follower,
        unread=follower.skipped,
    )


# ------------------------------------------------------------------------------------- are they the teacher's states?

SAMPLE_DOCUMENTS, SAMPLE_PLACES = 16, 64  # of each, so that the head is applied to a thousand states at most


def sampled(source: Source) -> list[tuple[Document, tuple[Tensor, Tensor]]]:
    """Documents from all over the training ones, cut behind their first places that count, with their states."""
    some = [d for d in source.training[:: -(-len(source.training) // SAMPLE_DOCUMENTS)] if len(taught_places(d))]
    short = [cut_to(d, int(taught_places(d)[-1]) + 2) for d in some]
    return [(d, states) for d, states in zip(short, source.states(short), strict=True) if states is not None]


def taught_places(document: Document) -> Tensor:
    """The first places whose state says what follows, that being known and learned from."""
    return document.loss_mask[:-1].nonzero().flatten()[:SAMPLE_PLACES]


@torch.no_grad()
def teacher_check(source: Source, sample: list[tuple[Document, tuple[Tensor, Tensor]]]) -> str:
    """How often the next token is the teacher's own choice, and how often by the states of another document: those of
    the sample's next one, its n-th learned place for the n-th (a document alone is taken for two, its halves). With a
    warning unless the former wins by more than chance (a sign test where just one is right, 2.5 sigma).
    """
    device = source.embed_tokens.weight.device
    choices, follows = [], []
    for document, (_, last) in sample:
        at = taught_places(document)
        for part in at.chunk(1 if len(sample) > 1 else 2):
            choices.append(source.head(last[part.to(last.device)].to(device)).argmax(-1).cpu())
            follows.append(document.tokens[part + 1])
    right = [torch.zeros(0, 2)]
    for mine, theirs, after in zip(choices, choices[1:] + choices[:1], follows, strict=True):
        n = min(len(mine), len(theirs))
        right.append(torch.stack([said[:n] == after[:n] for said in (mine, theirs)], dim=1).float())
    right = torch.cat(right)
    own, other = right.mean(0).nan_to_num().tolist()
    line = (
        f"teacher: its own choice is {own:.1%} of {len(right):,} learned tokens of {len(sample)} documents, "
        f"{other:.1%} by another document's states"
    )
    gain = right[:, 0] - right[:, 1]
    if gain.sum() > 2.5 * gain.abs().sum().sqrt():
        return line
    return line + (
        "\nWARNING: the teacher is no better than with another document's states. A draft learns nothing from these: "
        "they are random, of another model, misplaced, or not what the output head reads (final norm, last layer?)"
    )


# ---------------------------------------------------------------------------------------------------------------- rows


Filled = list[list[tuple[Document, tuple[Tensor, Tensor]]]]  # rows of documents with their features and last states


class Assembler:
    """Makes the rows of a micro-batch from documents and their states. make_mask: keep FlexAttention's block mask."""

    def __init__(self, args, source: Source, draft_ids: Tensor, make_mask: bool = True):
        self.args, self.source, self.draft_ids, self.make_mask = args, source, draft_ids, make_mask
        dtype, device = getattr(torch, args.precision), torch.device(args.device)
        features = torch.zeros(0, len(source.aux_layers) * source.hidden_size, dtype=dtype, device=device)
        is_state = source.width == source.hidden_size  # else probabilities, which bfloat16 would round
        last = torch.zeros(0, source.width, dtype=dtype if is_state else torch.float32, device=device)
        self.like = features, last

    def __call__(self, rows: Filled, choice: Tensor | None = None) -> RowChunks:
        """Filled up with rows of padding to args.batch_rows. choice: the target's, from a first call."""
        rows = [[(d.tokens, d.loss_mask, *states) for d, states in row] for row in rows]
        rows += [[]] * (self.args.batch_rows - len(rows))
        laid_out = lay_out(rows, self.args.row_tokens, self.like)
        how = {"steps": self.args.ttt_steps, "chunk": self.args.chunk, "make_mask": self.make_mask}
        return RowChunks(self.draft_ids, **laid_out, head=self.source.head, choice=choice, **how)


class Batch:
    """A micro-batch of documents with their states, which are laid out on the device when its rows are asked for.

    keep: hold them there, where no other micro-batch of the optimizer step wants the place.
    """

    def __init__(self, make: Assembler, filled: Filled, keep: bool):
        self.make, self.filled, self.keep = make, filled, keep
        self.choice, self.kept = None, None

    def rows(self) -> RowChunks:
        if self.kept is not None:
            return self.kept
        made = self.make(self.filled, self.choice)
        self.choice, self.kept = made.choice, made if self.keep else None
        return made


class Window(NamedTuple):
    """What one rank computes in one optimizer step."""

    batches: list[Batch]
    documents: list[Document]
    consumed: int  # micro-batches of all ranks, this window's included
    ended: bool = False  # the stream has no more


class Rows:
    """The stream of micro-batches: number i of it, its states read or captured when asked for, is always the same."""

    def __init__(self, args, source: Source, documents: Documents, sizes: list[tuple[int, int]], make: Assembler):
        self.args, self.source, self.documents, self.sizes, self.make = args, source, documents, sizes, make
        self.lengths, self.latest = [], (-1, [])

    def epoch(self, number: int) -> list[list[list[int]]]:
        """Micro-batches of rows of documents, in an order fixed by (seed, epoch).

        Rows of one micro-batch have about as many anchors each, since their chunks go side by side.
        """
        if self.latest[0] != number:
            b, rng = self.args.batch_rows, random.Random(f"{self.args.seed}/{number}")
            rows = pack([tokens for tokens, _ in self.sizes], self.args.row_tokens, rng)
            if b > 1:
                rows.sort(key=self.anchors)
            batches = [rows[i : i + b] for i in range(0, len(rows), b)]
            rng.shuffle(batches)
            self.latest = (number, batches)
        return self.latest[1]

    def anchors(self, row: list[int]) -> int:
        return sum(self.sizes[i][1] for i in row)

    @property
    def computed(self) -> int:
        """Anchors that the chunks of the first epoch have room for."""
        c = self.args.chunk
        return sum(c * self.args.batch_rows * max(1, -(-max(map(self.anchors, rows)) // c)) for rows in self.epoch(0))

    def count(self, epochs: int) -> int:
        while len(self.lengths) < epochs:
            self.lengths.append(len(self.epoch(len(self.lengths))))
        return sum(self.lengths[:epochs])

    @property
    def per_epoch(self) -> int:
        """Micro-batches of the first one."""
        return self.count(1)

    def steps_after(self, consumed: int, per_step: int) -> int:
        return -(-(self.count(self.args.epochs) - consumed) // per_step)

    def batch(self, i: int) -> list[list[int]]:
        """The documents of each row of micro-batch i; none past the last of `epochs` epochs."""
        epoch = 0
        while self.count(epoch + 1) <= i:
            epoch += 1
            if self.args.steps is None and epoch == self.args.epochs:
                return []
        return self.epoch(epoch)[i - self.count(epoch)]

    def windows(self, consumed: int, ranks) -> Iterator[Window]:
        """This rank's part of one optimizer step after another, from micro-batch `consumed` on."""

        def read():
            for first in itertools.count(consumed + ranks.rank, self.args.accumulate * ranks.world):
                numbers = range(first, first + self.args.accumulate * ranks.world, ranks.world)
                window, unread = [self.fill(self.batch(i)) for i in numbers], self.source.unread
                if unread is not None and unread.total() >= min(NOT_ONE, len(self.documents)):
                    check_some_left(unread)
                yield window

        with closing(prefetched(read(), 1) if self.source.on_disk else read()) as windows:
            for window in windows:
                consumed += self.args.accumulate * ranks.world
                batches = [Batch(self.make, filled, len(window) == 1) for filled in window]
                yield Window(batches, documents_in(window), consumed)

    def some(self, rows: int, ranks) -> Iterator[RowChunks]:
        """This rank's share of the first `rows` rows."""
        for batch in self.epoch(0)[: max(1, rows // self.args.batch_rows)][ranks.rank :: ranks.world]:
            yield self.make(self.fill(batch))

    def fill(self, batch: list[list[int]]) -> Filled:
        documents = [[self.documents[i] for i in row] for row in batch]
        states = iter(self.source.states([d for row in documents for d in row]))
        return [[(d, found) for d in row if (found := next(states)) is not None] for row in documents]

    def used(self, window: Window) -> None:
        """Nothing to clear away."""

    def stop(self) -> None:
        """Nothing to wake up."""


def documents_in(window: list[Filled]) -> list[Document]:
    return [d for rows in window for row in rows for d, _ in row]


class FollowedRows:
    """Rows of documents as a running vLLM delivers them, each seen once; those held out are kept in memory. What was
    used since the last checkpoint when a run is killed is gone: it goes on with what arrives.

    expected: the rows that the conversations of --data would make.
    """

    def __init__(self, args, source: Source, expected: Rows):
        self.args, self.follower, self.make = args, source.follower, expected.make
        self.per_epoch, self.sizes, self.computed = expected.per_epoch, expected.sizes, expected.computed
        self.keys, self.held = {token_key(d.tokens) for d in source.held_out}, []
        self.check = partial(teacher_check, source)

    def steps_after(self, consumed: int, per_step: int) -> int:
        return max(1, -(-(self.per_epoch - consumed) // per_step))

    def arriving(self) -> Iterator[tuple[Document, tuple[Tensor, Tensor]]]:
        """Those to train on; of those held out as many as evaluation rows hold are kept, all are done with at once."""
        room = self.args.eval_rows * self.args.row_tokens
        for whole, *states in self.follower:
            document = cut_to(whole, self.args.row_tokens)
            states = tuple(x[: len(document.tokens)] for x in states)
            if token_key(document.tokens) not in self.keys:
                yield document, states
                continue
            if sum(len(d.tokens) for d, _ in self.held) + len(document.tokens) <= room:
                self.held.append((document, states))
            self.follower.done(document)

    def rows(self, arriving: Iterator) -> Iterator[list]:
        pool, more, is_first = [], True, True
        while more:
            arrived = next(arriving, None)
            more = arrived is not None
            pool += [arrived] if more else []
            if pool and (not more or sum(len(d.tokens) for d, _ in pool) >= POOL_ROWS * self.args.row_tokens):
                if is_first and self.follower.rank == 0:
                    print(self.check(pool[:SAMPLE_DOCUMENTS]), flush=True)
                is_first = False
                *full, last = self.pack(pool)
                yield from full if more else [*full, last]
                pool = last

    def pack(self, pool: list) -> list[list]:
        """Rows of the pool, the emptiest last."""
        lengths = [len(d.tokens) for d, _ in pool]
        rows = pack(lengths, self.args.row_tokens, random.Random(self.args.seed))
        rows.sort(key=lambda row: -sum(lengths[i] for i in row))
        return [[pool[i] for i in row] for row in rows]

    def windows(self, consumed: int, ranks) -> Iterator[Window]:
        """One optimizer step's rows after another; once nothing arrives any more, empty ones for good."""
        rows = self.rows(self.arriving())
        while True:
            ours = list(itertools.islice(rows, self.args.accumulate * self.args.batch_rows))
            b = self.args.batch_rows
            batches = [ours[i : i + b] for i in range(0, self.args.accumulate * b, b)]
            consumed += self.args.accumulate * ranks.world
            made = [Batch(self.make, filled, len(batches) == 1) for filled in batches]
            yield Window(made, documents_in(batches), consumed, not ours)

    def some(self, rows: int, ranks) -> Iterator[RowChunks]:
        """Rows of what this rank has held out so far."""
        for row in self.pack(self.held) if self.held else []:
            yield self.make([row])

    def used(self, window: Window) -> None:
        for document in window.documents:
            self.follower.done(document)

    def stop(self) -> None:
        self.follower.stop()


def make_rows(
    args, source: Source, draft_ids: Tensor, make_mask: bool
) -> tuple[Rows | FollowedRows, Rows | FollowedRows]:
    """The rows to train on and those to evaluate on, of the same shapes."""
    sizes = [sizes_of(documents, args.ttt_steps) for documents in (source.training, source.held_out)]
    make = Assembler(args, source, draft_ids, make_mask)
    rows = [Rows(args, source, d, s, make) for d, s in zip((source.training, source.held_out), sizes, strict=True)]
    if source.follower is None:
        return tuple(rows)
    followed = FollowedRows(args, source, rows[0])
    return followed, followed
