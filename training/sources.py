"""Where training data come from: which documents, and whose states at them.

    built-in corpus, --data chats.jsonl    a target that runs here       its states captured as rows are made
    --data CAPTURED                        its embedding and head alone  states read from disk, ahead
    --follow DIR --data chats.jsonl        the same                      states taken as a running vLLM writes them

Shapes: L tokens of a document, H the target's hidden size, V its vocabulary, W the width of the states that the teacher
is made from.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from data.conversations import answered, read_conversations
from data.corpus import python_documents
from data.documents import Document, Documents, Skipped, cut_to, split
from data.engine import Engine
from data.files import check_regular, naming
from data.packing import anchors_of
from data.rendering import read_arguments
from states.follow import Follower
from states.index import masks_of, read_masks
from states.read import is_captured, open_captured
from states.write import bytes_per_token
from target.ends import TargetEnds, load_ends
from target.model import Target, check_aux_layers, load_target, usual_names
from target.tiny import tiny_target

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
        return None if self.target is None else usual_names(self.target.config.to_dict())

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
    tokenizer = with_template(args, target.tokenizer)
    pairs, how = python_documents(held_out, args.seed)[: args.documents], read_arguments(args.template_args)
    whole = answered(tokenizer, pairs, template_args=how, engine=engine_of(args, tokenizer))
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
    tokenizer, template_args = with_template(args, tokenizer), read_arguments(args.template_args)
    cache, paths = Path(args.runs) / "tokens", [Path(path) for path in args.data]
    with ranks.first_alone():  # the others find all tokens in the cache
        documents, report = read_conversations(
            paths,
            tokenizer,
            args.row_tokens,
            args.reasoning,
            cache=cache,
            progress=ranks.rank == 0,
            template_args=template_args,
            engine=engine_of(args, tokenizer),
        )
    ranks.print("data: " + "\n".join(report.lines()))
    return documents


def with_template(args, tokenizer):
    """A target's tokenizer, with the template of --chat-template. ValueError: there is none, or no such file."""
    if tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer, and the data are text; put tokenizer.json beside config.json")
    if args.chat_template:
        with naming(path := Path(args.chat_template), "--chat-template names a file of a chat template (Jinja)"):
            check_regular(path, "--chat-template")
            tokenizer.chat_template = path.read_text(encoding="utf-8")
    return tokenizer


def engine_of(args, tokenizer) -> Engine | None:
    return Engine(args.render, tokenizer) if args.render else None


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


# --------------------------------------------------------------------------------------- are they the teacher's states?

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
