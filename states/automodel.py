"""NeMo AutoModel's hidden states, with the teacher's probabilities."""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from einops import rearrange
from torch import Tensor, nn

from data.documents import Document, listed
from data.files import Damaged, naming, read_json
from data.vocabulary import check_draft_ids
from states.captured import Captured, check_layers, check_types, check_whole
from states.tensors import Tensors, open_safetensors


class AutoModelCache(Captured):
    """NeMo AutoModel's precompute_eagle3, format 2: padded rows in shards, with the teacher instead of last states.

    Stored ids, loss mask, p and position_mask stand one place early: place t holds what belongs to token t+1, with the
    features of token t. They move back by one, which leaves token 0 without an id (0 stands in), a mask and a p.
    Nothing reads those: slot t is fed token t+1+s and learns about it, so token 0 only gives features.
    position_mask is the loss mask where the argmax over all V is a draft id.

    `last` of a token is [p over the draft ids, position_mask], W = Vd + 1, stored top-k or not.
    """

    kind, sign = "AutoModel", "manifest.json"
    needs_ends = False
    keys = ("target_vocab_size", "num_samples", "shard_size", "aux_hidden_dim")

    def declared_layers(self) -> list[int]:
        path = self.directory / self.sign
        meta = self.meta = read_json(path, (*self.keys, "format_version", "aux_layer_ids", "selected_token_ids"))
        if meta["format_version"] != 2:
            raise ValueError(f"{path} says format_version {meta['format_version']}; version 2 is read")
        with naming(path, "copy it again"):
            check_whole(meta, *self.keys)
            check_layers(meta["aux_layer_ids"])
            hidden, vocab = meta["aux_hidden_dim"] // 3, meta["target_vocab_size"]
            if meta["aux_hidden_dim"] % 3:
                raise ValueError(f"it says aux_hidden_dim {meta['aux_hidden_dim']}, which is not of 3 layers")
            ids, _ = listed(meta["selected_token_ids"], [0] * len(meta["selected_token_ids"]))
            self.draft_ids = torch.from_numpy(ids)
            check_draft_ids(self.draft_ids, vocab)
        if self.ends is not None and (hidden, vocab) != (self.hidden_size, self.vocab_size):
            raise ValueError(
                f"{path} is of a target of hidden size {hidden}, vocabulary {vocab}, not of {self.hidden_size}, "
                f"{self.vocab_size}; give its target"
            )
        self.hidden_size, self.vocab_size = hidden, vocab
        self.width = len(self.draft_ids) + 1
        if self.ends is None:
            self.embedding(slice(0))  # are these sizes those of what is there?
        drafted = torch.zeros(vocab, dtype=torch.bool).index_fill(0, self.draft_ids, True)
        self.undrafted = None if drafted.all() else int(drafted.int().argmin())  # some id that no draft says
        return meta["aux_layer_ids"]

    def scan(self) -> Iterator[Document]:
        samples, size = self.meta["num_samples"], self.meta["shard_size"]
        count, found = -(-samples // size), []
        for path in self.directory.glob("shard-*.safetensors"):
            number = path.stem.removeprefix("shard-")
            if re.fullmatch(r"\d{6,}", number) and int(number) < count and path.name == shard_name(int(number)):
                found.append(int(number))
        found.sort()
        lost = samples - sum(min(size, samples - size * shard) for shard in found)
        if lost:  # however many the manifest says there are
            first = next((i for i, shard in enumerate(found) if i != shard), len(found))
            name = (
                f"{self.directory / shard_name(first)} cannot be used (it is missing, with {count - len(found):,} of "
            )
            error = Damaged(f"{name}{count:,} shards in all by {self.sign}); copy them again, or skip damaged files")
            self.skip_or_raise(error, self.skipped, lost)
        for shard in found:
            path, rows = self.directory / shard_name(shard), min(size, samples - size * shard)
            try:
                with naming(path):
                    ids, learned, real = self.open_shard(path, rows)
            except Damaged as error:
                self.skip_or_raise(error, self.skipped, rows)
                continue
            yield from self.look_at(range(rows), partial(self.row, path, ids, learned, real))

    def open_shard(self, path: Path, rows: int) -> list[Tensor]:
        """input_ids, loss_mask and attention_mask [n,S]; ValueError: other tensors, types or shapes."""
        whole = ["input_ids", "loss_mask", "attention_mask", "position_mask"]
        with open_safetensors(path) as file:
            is_dense = "target_probs" in file.held
            states = ["aux_hidden_states", "target_probs" if is_dense else "target_probs_values"]
            names = [*whole, *states] + ([] if is_dense else ["target_probs_indices"])
            check_types(file, states, [name for name in names if name not in states])
            held = file.shapes
            s, k = held["input_ids"][-1], len(self.draft_ids) if is_dense else held[names[-1]][-1]
            widths = [1, self.meta["aux_hidden_dim"], k, k]
            wanted = [[rows, s]] * 3 + [[rows, s, width] for width in widths]
            if [held[name] for name in names] != wanted[: len(names)]:
                said = f"{rows} rows, features {widths[1]} wide, {len(self.draft_ids)} draft ids"
                raise ValueError(f"its tensors are {held}; {self.sign} says {said}")
            return [file.read(name) for name in names[:3]]

    def row(self, path: Path, ids: Tensor, learned: Tensor, real: Tensor, i: int) -> Document | tuple[str, str]:
        name = f"{path.name}[{i}]"
        with naming(self.directory / name):
            at = stretch(real[i])
            if at.start == at.stop:
                return "empty", name
            # token 0 has neither an id nor a mask, whatever stands before it
            tokens, loss_mask = (moved_back(x[i])[at].numpy() for x in (ids, learned))
            tokens, loss_mask = listed(tokens, loss_mask, self.vocab_size)
            return Document(torch.from_numpy(tokens), torch.from_numpy(loss_mask), name)

    def read(self, document: Document) -> tuple[Tensor, Tensor]:
        shard, i = re.fullmatch(r"(.*)\[(\d+)\]", document.source).groups()
        with open_safetensors(self.directory / shard) as file:
            at = stretch(file.read("attention_mask", int(i), slice(None)))
            here = int(i), slice(at.start, min(at.stop, at.start + len(document.tokens)))
            early = int(i), slice(max(here[1].start - 1, 0), here[1].stop - 1)  # a place before
            features = file.read("aux_hidden_states", *here)
            covered = file.read("position_mask", *early)
            p = file.read("target_probs", *early) if "target_probs" in file.held else self.dense(file, early)
        if covered.numel() and not (covered.min() >= 0 and covered.max() <= 1):
            raise ValueError("its position_mask has other numbers than 0 and 1")
        last = p.new_zeros(len(features), self.width)
        last[len(last) - len(p) :, :-1], last[len(last) - len(p) :, -1:] = p, covered
        mass = last[document.loss_mask, :-1].float().sum(-1)
        if (last < 0).any() or (mass - 1).abs().gt(0.1).any():  # bf16 and fp16 round each entry
            raise ValueError(f"its target_probs sum to {mass.min():.3f}..{mass.max():.3f} at learned tokens, not to 1")
        order = torch.tensor(self.meta["aux_layer_ids"]).argsort()
        if not torch.equal(order, torch.arange(3)):
            features = rearrange(rearrange(features, "s (l h) -> s l h", l=3)[:, order], "s l h -> s (l h)")
        return features, last

    def dense(self, file: Tensors, at: tuple) -> Tensor:
        values, indices = (file.read(f"target_probs_{name}", *at) for name in ("values", "indices"))
        return values.new_zeros(len(values), len(self.draft_ids)).scatter_(-1, indices.long(), values)

    def head(self, last: Tensor) -> Tensor:
        """last [m,Vd+1] -> logits [m,V] whose softmax over the draft ids is p, exactly 0 where p is, and whose argmax
        is a draft id where position_mask is set alone."""
        p, covered = last[:, :-1].float(), last[:, -1] > 0.5
        logits = p.new_full((len(p), self.vocab_size), -torch.inf)
        logits[:, self.draft_ids.to(p.device)] = p.log()
        if self.undrafted is not None:
            logits[:, self.undrafted] = torch.where(covered, -torch.inf, 1.0)  # log p stays below
        return logits

    @property
    def embed_tokens(self) -> nn.Embedding:
        if self.ends is not None:
            return self.ends.embed_tokens
        return nn.Embedding.from_pretrained(self.embedding(slice(None)))

    def embedding(self, rows: slice) -> Tensor:
        """Rows of the target's embedding [V,H]; ValueError where the file has another."""
        path = self.directory / "target_embeddings.safetensors"
        with naming(path, "copy it again"), open_safetensors(path) as file:
            check_types(file, ["weight"], [])
            if file.shapes["weight"] != [self.vocab_size, self.hidden_size]:
                sizes = f"{self.sign} says [{self.vocab_size}, {self.hidden_size}]"
                raise ValueError(f"weight is {file.shapes['weight']}, {sizes}")
            return file.read("weight", rows)


def shard_name(number: int) -> str:
    return f"shard-{number:06d}.safetensors"


def stretch(real: Tensor) -> slice:
    """Where the attention mask [S] is set; ValueError: not in one stretch, or other numbers than 0 and 1."""
    at = real.nonzero().flatten()
    begin, end = (int(at[0]), int(at[-1]) + 1) if len(at) else (0, 0)
    if not bool((real[begin:end] == 1).all()):
        raise ValueError("its attention_mask is no single stretch of 1 between 0")
    return slice(begin, end)


def moved_back(x: Tensor) -> Tensor:
    """x [S,..]: what stands at place t goes to t+1; zeros at 0. With padding on the left nothing is lost."""
    return torch.cat([torch.zeros_like(x[:1]), x[:-1]])
