"""Captured hidden states: every layout read back to the same batch, and what is damaged or foreign refused.

The batch that all are held to is made from the running target, as training without files makes it.
"""

import fcntl
import gzip
import json
import os
import random
import sys
import types
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file

import captured as captured_module
import stored
from capture import write_capture
from captured import masks_of, open_captured
from data import Document
from draft_deepseek import build_rows
from ends import load_ends
from target import byte_tokenizer, load_target

os.environ["HF_HUB_OFFLINE"] = "1"
H, V, AUX = 24, 262, (1, 2, 3)
DRAFT_IDS = torch.randperm(V, generator=torch.Generator().manual_seed(3))[:150].sort().values


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A random DeepSeek-V3 of seven layers, saved in several files, whose final norm is not one."""
    torch.manual_seed(0)
    sizes = {"vocab_size": V, "hidden_size": H, "intermediate_size": 40, "num_attention_heads": 2, "q_lora_rank": 8}
    sizes |= {
        "num_key_value_heads": 2,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 4,
        "v_head_dim": 5,
    }
    sizes |= {"num_hidden_layers": 7, "first_k_dense_replace": 7, "tie_word_embeddings": False}
    model = transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(**sizes, rope_theta=1e4, pad_token_id=None)
    )
    with torch.no_grad():
        model.model.norm.weight.normal_(1, 0.5)
        model.lm_head.weight.normal_(0, 1)
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.normal_(0, 0.5)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path, max_shard_size="20KB")
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def target(home):
    return load_target(home)


@pytest.fixture(scope="module")
def ends(home):
    return load_ends(home)


@pytest.fixture(scope="module")
def documents():
    generator = torch.Generator().manual_seed(1)
    made = []
    for i, length in enumerate([9, 17, 2, 12, 5]):
        loss_mask = torch.rand(length, generator=generator) < 0.6
        loss_mask[-1] = i < 4  # one ends in a prompt
        made.append(Document(torch.randint(V, (length,), generator=generator), loss_mask, str(i)))
    return made


@pytest.fixture(scope="module")
def states(target, documents):
    return target.capture([d.tokens for d in documents])


@pytest.fixture(scope="module")
def raw_last(target, documents):
    """The last layer's output before the final norm, from a hook on it, in the batch that `states` come from."""
    lengths, found = [len(d.tokens) for d in documents], []
    handle = target.layers[-1].register_forward_hook(lambda module, args, out: found.append(out.detach()))
    target.capture([d.tokens for d in documents])
    handle.remove()
    ((rows,), (order,)) = found, target.batches(lengths)
    return [rows[order.index(i), :length].clone() for i, length in enumerate(lengths)]


def batch(documents, states, head, draft_ids=DRAFT_IDS):
    """Documents in rows of two, as build_rows makes them from unshifted tensors."""
    rows, t = [(0, 1), (2, 3), (4,)], 30
    out = {}
    for r, row in enumerate(rows):
        begin = 0
        for number, i in enumerate(row):
            n = len(documents[i].tokens)
            values = {"tokens": documents[i].tokens, "document": torch.full((n,), number), "position": torch.arange(n)}
            values |= {"loss_mask": documents[i].loss_mask, "features": states[i][0], "last_hidden": states[i][1]}
            for name, x in values.items():
                fill = -1 if name == "document" else 0
                out.setdefault(name, torch.full((len(rows), t, *x.shape[1:]), fill, dtype=x.dtype))
                out[name][r, begin : begin + n] = x
            begin += n
    return build_rows(draft_ids, **out, head=head, steps=4)


@pytest.fixture(scope="module")
def online(documents, states, target):
    rows = batch(documents, states, target.head)
    supervised, valid = rows.teacher_index >= 0, rows.valid
    assert supervised.any() and (valid & ~supervised).any()  # some argmax lies outside the draft vocabulary
    return rows


def check_equal(rows, expected):
    for name in ("document", "position", "anchors", "teacher_index", "valid", "denominators"):
        assert torch.equal(getattr(rows, name), getattr(expected, name)), name
    fed = expected.position > 0  # a document's first token is fed nowhere
    assert torch.equal(rows.tokens[fed], expected.tokens[fed])
    torch.testing.assert_close(rows.features.float(), expected.features, atol=1e-6, rtol=0)
    learned = expected.teacher_index[expected.teacher_index >= 0].unique()
    assert len(learned) > 3
    taught = torch.zeros(expected.teacher.shape[:2], dtype=torch.bool)
    for r in range(len(taught)):
        taught[r, expected.teacher_index[:, r][expected.teacher_index[:, r] >= 0]] = True
    torch.testing.assert_close(rows.teacher[taught], expected.teacher[taught], atol=1e-6, rtol=0)


# ----------------------------------------------------------------------------- what other tools write, made from states


def four_layers(features, last):
    return torch.cat([features.view(len(features), 3, H), last[:, None]], 1).contiguous()


def save_layers(path, document, features, last):
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"hidden_states": four_layers(features, last), "token_ids": document.tokens}, path)


def write_index(path, documents):
    rows = [{"input_ids": d.tokens.tolist(), "loss_mask": d.loss_mask.int().tolist()} for d in documents]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def speculators(folder, documents, states, raw_last):
    for i, (d, (features, _), last) in enumerate(zip(documents, states, raw_last, strict=True)):
        save_layers(folder / f"hidden_states/hs_{i}.safetensors", d, features, last)
    write_index(folder / "index.jsonl", documents)


def connector(folder, documents, states, raw_last):
    for i, (d, (features, _), last) in enumerate(zip(documents, states, raw_last, strict=True)):
        save_layers(folder / f"cmpl-{i}.safetensors", d, features, last)
        (folder / f"cmpl-{i}.safetensors.lock").touch()  # vLLM leaves it behind
    write_index(folder / "index.jsonl", documents)


def specforge(folder, documents, states, suffix):
    for i, (d, (features, last)) in enumerate(zip(documents, states, strict=True)):
        path = folder / f"rows_{i // 2 * 2}-{i // 2 * 2 + 2}" / f"data_{i}.ckpt{suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        held = {"input_ids": d.tokens, "loss_mask": d.loss_mask.long()}
        held |= {"hidden_state": last[None], "aux_hidden_state": features[None]}
        with (gzip.open if suffix else open)(path, "wb") as file:
            torch.save(held, file)


def automodel(folder, documents, states, target, topk=0, left=False, draft_ids=DRAFT_IDS, shard_size=3):
    """The producer's own recipe: pad, then move ids, masks and logits left by one with zeros behind, features not."""
    size, samples = 17, []  # the longest fills its row

    def pad(x):
        n = size - len(x)
        return F.pad(x, (0,) * (2 * x.ndim - 2) + ((n, 0) if left else (0, n)))

    def left_by_one(x):
        return torch.cat([x[1:], torch.zeros_like(x[:1])])

    for d, (features, last) in zip(documents, states, strict=True):
        ids, mask = left_by_one(pad(d.tokens)), left_by_one(pad(d.loss_mask.long()))
        logits = left_by_one(pad(target.head(last)))
        row = {"input_ids": ids, "attention_mask": pad(torch.ones(len(d.tokens), dtype=torch.long)), "loss_mask": mask}
        row["aux_hidden_states"] = pad(features)
        row["position_mask"] = (torch.isin(logits.argmax(-1), draft_ids) & mask.bool())[:, None]
        p = logits[:, draft_ids].float().softmax(-1)
        if topk:
            values, indices = p.topk(topk)
            row["target_probs_values"] = values / values.sum(-1, keepdim=True)
            row["target_probs_indices"] = indices.int()
        else:
            row["target_probs"] = p
        samples.append(row)
    for i in range(0, len(samples), shard_size):
        shard = {name: torch.stack([row[name] for row in samples[i : i + shard_size]]) for name in samples[0]}
        save_file(shard, folder / f"shard-{i // shard_size:06d}.safetensors")
    save_file({"weight": target.embed_tokens.weight.data}, folder / "target_embeddings.safetensors")
    manifest = {"format_version": 2, "target_model": "m", "target_vocab_size": V, "draft_vocab_size": len(draft_ids)}
    manifest |= {"seq_length": size, "dtype": "fp32", "num_samples": len(samples), "shard_size": shard_size}
    manifest |= {"target_probs_topk": topk, "aux_hidden_dim": 3 * H, "aux_layer_ids": list(AUX)}
    manifest |= {"selected_token_ids": draft_ids.tolist()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


LAYOUTS = ["own", "speculators", "arrow", "connector", "specforge", "specforge.gz", "automodel", "automodel-left"]


@pytest.fixture
def layout(tmp_path, monkeypatch, documents, states, raw_last, target):
    """Makes a directory of the given layout, without touching disk twice."""

    def make(kind):
        folder = tmp_path / kind
        folder.mkdir()
        if kind == "own":
            write_capture(folder, target, documents, torch.float32)
        elif kind == "speculators":
            speculators(folder, documents, states, raw_last)
        elif kind == "arrow":
            speculators(folder, documents, states, raw_last)
            (folder / "index.jsonl").rename(folder / "data-00000.arrow")
            rows = {
                "input_ids": [d.tokens.tolist() for d in documents],
                "loss_mask": [d.loss_mask.int().tolist() for d in documents],
            }
            table = types.SimpleNamespace(with_format=lambda kind: rows)
            monkeypatch.setitem(
                sys.modules, "datasets", types.SimpleNamespace(load_from_disk=lambda path, keep_in_memory: table)
            )
        elif kind == "connector":
            connector(folder, documents, states, raw_last)
        elif kind.startswith("specforge"):
            specforge(folder, documents, states, kind.removeprefix("specforge"))
        else:
            automodel(folder, documents, states, target, left=kind == "automodel-left")
        return folder

    return make


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_gives_the_batch_that_the_running_target_gives(layout, kind, documents, ends, online, target):
    captured = open_captured(layout(kind), ends)
    assert len(captured.documents) == len(documents) and captured.aux_layers == AUX and not +captured.skipped
    for held, d in zip(captured.documents, documents, strict=True):
        assert torch.equal(held.tokens[1:], d.tokens[1:]) and torch.equal(held.loss_mask[1:], d.loss_mask[1:])
    states = captured.states(captured.documents)
    assert all(last.shape == (len(d.tokens), captured.width) for d, (_, last) in zip(documents, states, strict=True))
    check_equal(batch(captured.documents, states, captured.head), online)
    assert torch.equal(captured.embed_tokens.weight, target.embed_tokens.weight)
    cut = [d._replace(tokens=d.tokens[:7], loss_mask=d.loss_mask[:7]) for d in captured.documents]
    for part, whole in zip(captured.states(cut), states, strict=True):  # a document cut to a row
        assert torch.equal(part[0], whole[0][:7]) and torch.equal(part[1], whole[1][:7])


@pytest.mark.parametrize(
    "ids", [DRAFT_IDS, DRAFT_IDS.flip(0), torch.arange(V)], ids=["ascending", "descending", "full"]
)
def test_an_automodel_cache_needs_no_target_and_binds_the_draft_vocabulary(tmp_path, documents, states, target, ids):
    automodel(tmp_path, documents, states, target, draft_ids=ids)
    captured = open_captured(tmp_path)
    assert torch.equal(captured.draft_ids, ids) and captured.width == len(ids) + 1
    assert torch.equal(captured.embed_tokens.weight, target.embed_tokens.weight)
    rows = batch(captured.documents, captured.states(captured.documents), captured.head, ids)
    check_equal(rows, batch(documents, states, target.head, ids))


def test_a_topk_cache_is_the_renormalised_top_k_and_exactly_zero_elsewhere(tmp_path, documents, states, target, online):
    automodel(tmp_path, documents, states, target, topk=5)
    captured = open_captured(tmp_path)
    rows = batch(captured.documents, captured.states(captured.documents), captured.head)
    assert torch.equal(rows.teacher_index, online.teacher_index) and torch.equal(rows.valid, online.valid)
    top, at = online.teacher.topk(5)
    expected = torch.zeros_like(online.teacher).scatter(-1, at, top / top.sum(-1, keepdim=True).clamp(min=1e-9))
    for r in range(len(rows.teacher)):
        learned = online.teacher_index[:, r][online.teacher_index[:, r] >= 0].unique()
        torch.testing.assert_close(rows.teacher[r, learned], expected[r, learned], atol=1e-6, rtol=0)
        assert ((rows.teacher[r, learned] == 0).sum(-1) == len(DRAFT_IDS) - 5).all()


# --------------------------------------------------------------------------------------------- what is refused, and how


def test_the_kind_is_never_guessed(tmp_path, ends, documents, states, raw_last, target):
    with pytest.raises(ValueError, match="no mark of any"):
        open_captured(tmp_path, ends)
    with pytest.raises(ValueError, match="is no directory"):
        open_captured(tmp_path / "none", ends)
    connector(tmp_path, documents, states, raw_last)
    with pytest.raises(ValueError, match="holds no output head"):
        open_captured(tmp_path)
    specforge(tmp_path, documents, states, "")
    with pytest.raises(ValueError, match=r"rows_.*SpecForge.*vLLM connector"):
        open_captured(tmp_path, ends)


def test_other_layers_are_named_in_both_numberings(layout, ends):
    for kind in ("own", "automodel"):
        folder = layout(kind)
        said = r"layers \[1, 2, 3\] by output, \[2, 3, 4\] by input; wanted are \[0, 2, 4\] by output, \[1, 3, 5\]"
        with pytest.raises(ValueError, match=said):
            open_captured(folder, ends, [4, 0, 2])


def test_our_capture_is_read_with_the_target_it_was_made_from(layout, home, ends):
    folder = layout("own")
    assert open_captured(folder, load_ends(home, dtype=torch.bfloat16)).documents
    other = load_ends(home)
    other.lm_head.weight.data = other.lm_head.weight.roll(1, 0)
    with pytest.raises(ValueError, match="another output head; give its target"):
        open_captured(folder, other)
    other.hidden_size = H + 1
    with pytest.raises(ValueError, match=f"'hidden_size': {H}.*not of hidden size {H + 1}"):
        open_captured(folder, other)


def test_layers_in_another_order_are_put_in_ascending_order(tmp_path, documents, states, target, online, ends):
    mixed = [(features.view(-1, 3, H)[:, [2, 0, 1]].flatten(1), last) for features, last in states]
    automodel(tmp_path, documents, mixed, target)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"aux_layer_ids": [3, 1, 2]}))
    captured = open_captured(tmp_path, ends)
    check_equal(batch(captured.documents, captured.states(captured.documents), captured.head), online)


def some_file(folder):
    return next(x for x in sorted(folder.rglob("*")) if x.name.endswith(("1.safetensors", "1.ckpt", "1.ckpt.gz")))


def rewrite(path, change):
    """The tensors of a file of any layout, changed."""
    if path.suffix == ".safetensors":
        return save_file({k: x.contiguous() for k, x in change(load_file(path)).items()}, path)
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rb") as file:
        held = torch.load(file, weights_only=True)
    with opened(path, "wb") as file:
        torch.save(change(held), file)


def not_finite(held):
    name = next(k for k in ("hidden_states", "hidden_state", "target_probs") if k in held)
    held[name].view(-1)[:: held[name][0].numel() // 2 + 1] = float("nan")  # in every row
    return held


def narrower(held):
    name = next(k for k in ("hidden_states", "hidden_state", "aux_hidden_states") if k in held)
    return held | {name: held[name][..., :-1].contiguous()}


def fewer_tokens(held):
    name = next(k for k in ("token_ids", "loss_mask") if k in held)
    return held | {name: held[name][..., :-1].contiguous()}


FAULTS = {
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "random bytes": lambda path: path.write_bytes(random.Random(0).randbytes(3000)),
    "missing": Path.unlink,
    "foreign": lambda path: rewrite(path, lambda held: {"weight": torch.zeros(3)}),
    "not finite": lambda path: rewrite(path, not_finite),
    "narrower": lambda path: rewrite(path, narrower),
    "fewer tokens": lambda path: rewrite(path, fewer_tokens),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", ["own", "speculators", "connector", "specforge", "specforge.gz", "automodel"])
def test_a_damaged_file_is_named_or_skipped_and_counted(layout, ends, documents, kind, fault):
    folder = layout(kind)
    FAULTS[fault](path := some_file(folder))
    if fault == "missing" and kind not in ("own", "automodel"):  # the others do not say how many there should be
        assert len(open_captured(folder, ends).documents) == len(documents) - 1
        return

    def read(**options):
        captured = open_captured(folder, ends, **options)
        return captured, captured.states(captured.documents)

    with pytest.raises(ValueError) as stopped:
        read()
    assert path.name in str(stopped.value) and "\n" not in str(stopped.value)
    captured, states = read(skip_damaged=True)
    lost = 2 if kind == "automodel" else 1  # its second shard holds two documents
    left_out = [line for found in (captured.skipped, captured.unread) for line in found.lines()]
    assert len(left_out) == 1 and left_out[0].startswith(f"  skipped {lost}: damaged (") and path.name in left_out[0]
    assert sum(x is not None for x in states) == len(documents) - lost


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format_version": 1}, "format_version 1"),
        ({"selected_token_ids": [1, 1, 2]}, "3 draft ids, 2 distinct"),
        ({"selected_token_ids": [1, V]}, f"span 1..{V}"),
        ({"aux_layer_ids": []}, "manifest.json cannot be used"),
        ({"target_vocab_size": 2 * V}, f"vocabulary {2 * V}, not of {H}, {V}"),
        ({"selected_token_ids": [1, 2, 3]}, "shard-000000.*3 draft ids"),
        ({"num_samples": None}, "lacks .*num_samples"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(layout, ends, change, said):
    folder = layout("automodel")
    manifest = json.loads((folder / "manifest.json").read_text()) | change
    (folder / "manifest.json").write_text(json.dumps({k: x for k, x in manifest.items() if x is not None}))
    with pytest.raises(ValueError, match=said):
        open_captured(folder, ends)


def test_ids_that_are_not_the_listed_ones_are_found(layout, ends):
    folder = layout("own")
    rewrite(some_file(folder), lambda held: held | {"token_ids": held["token_ids"].flip(0)})
    captured = open_captured(folder, ends)
    with pytest.raises(ValueError, match="hs_1.*not those that index.jsonl has"):
        captured.states(captured.documents)


def test_masks_of_vllms_files_come_from_the_conversations(layout, ends, documents, online):
    folder = layout("connector")
    (folder / "index.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds no loss masks: put an index\.jsonl"):
        open_captured(folder, ends)
    captured = open_captured(folder, ends, masks=masks_of(documents))
    check_equal(batch(captured.documents, captured.states(captured.documents), captured.head), online)
    assert len(open_captured(folder, ends, masks=masks_of(documents[:2])).documents) == 2
    (folder / "index.jsonl").write_text('{"input_ids": [1, 2], "loss_mask": [1]}\n')
    with pytest.raises(ValueError, match=r"line 1 of .*index\.jsonl cannot be used .*of different length"):
        open_captured(folder, ends)
    with (folder / "cmpl-1.safetensors.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        captured = open_captured(folder, ends, masks=masks_of(documents[:3]))
    assert captured.skipped == {"unfinished": 1, "no mask": 2} and len(captured.documents) == 2


def test_an_arrow_dataset_names_the_package_that_reads_it(layout, ends, monkeypatch):
    folder = layout("arrow")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="`datasets`"):
        open_captured(folder, ends)


def test_specforge_files_are_looked_into_once(layout, ends, monkeypatch, online):
    folder, looks = layout("specforge.gz"), []
    real = captured_module.open_checkpoint
    monkeypatch.setattr(captured_module, "open_checkpoint", lambda path, names: looks.append(path) or real(path, names))
    open_captured(folder, ends)
    assert len(looks) == 5
    rewrite(some_file(folder), lambda held: held | {"loss_mask": 1 - held["loss_mask"]})
    captured = open_captured(folder, ends)
    assert looks[5:] == [some_file(folder)]
    check_equal_masks = [d.loss_mask.int().tolist() for d in captured.documents]
    assert check_equal_masks == [d.loss_mask.int().tolist() for d in open_captured(folder, ends).documents]


# ----------------------------------------------------------------------------------- while it is read, and odd contents

ALL = ["own", "speculators", "connector", "specforge", "specforge.gz", "automodel"]


@pytest.mark.parametrize("when", ["between", "during"])
@pytest.mark.parametrize("kind", ALL)
def test_a_file_that_is_cut_while_it_is_read_is_named(layout, ends, documents, kind, when, monkeypatch):
    folder = layout(kind)
    path = some_file(folder)
    captured = open_captured(folder, ends, skip_damaged=True)
    whole, preadv = path.stat().st_size, os.preadv

    def cut_first(fd, buffers, begin):  # the states, once more than the header was read
        if os.fstat(fd).st_ino == path.stat().st_ino and buffers[0].nbytes > 1500:
            os.truncate(path, begin + 1000)
        return preadv(fd, buffers, begin)

    if when == "between" or kind == "specforge.gz":
        os.truncate(path, whole - 700)
    else:
        monkeypatch.setattr(stored.os, "preadv", cut_first)
    states = captured.states(captured.documents)
    lost = 2 if kind == "automodel" else 1
    assert path.stat().st_size < whole and sum(x is None for x in states) == lost == captured.unread["damaged"]
    assert path.name in captured.unread.named["damaged"][0] and captured.unread.kept == len(documents) - lost
    assert captured.states(captured.documents).count(None) == lost == captured.unread["damaged"]  # counted once
    captured = open_captured(folder, ends, skip_damaged=True)  # cut already
    assert captured.skipped["damaged"] == lost and not +captured.unread


def with_value(names, change):
    def changed(held):
        name = next(k for k in names if k in held)
        return held | {name: change(held[name])}

    return changed


def second(x, value):
    x.view(-1)[x.numel() // 2 :] = value  # of the last row, too
    return x


STATES, IDS = ("hidden_states", "hidden_state", "aux_hidden_states"), ("token_ids", "input_ids")
FALSE = {
    "whole states": (with_value(STATES, lambda x: x.long()), "are int64; floating-point"),
    "bool states": (with_value(STATES, lambda x: x > 0), "are bool; floating-point"),
    "ids with a fraction": (with_value(IDS, lambda x: x + 0.5), "are float32; whole numbers"),
    "negative ids": (with_value(IDS, lambda x: second(x, -1)), "outside the vocabulary|ids span -1|not those that"),
    "a mask of 2": (with_value(["loss_mask"], lambda x: second(x, 2)), "other numbers than 0 and 1"),
    "a mask of fractions": (with_value(["loss_mask"], lambda x: x * 0.5), "whole numbers are wanted|are float32"),
    "an attention mask of 2": (with_value(["attention_mask"], lambda x: x * 2), "no single stretch of 1"),
}


@pytest.mark.parametrize("fault", FALSE)
@pytest.mark.parametrize("kind", ["own", "connector", "specforge", "specforge.gz", "automodel"])
def test_values_that_are_not_what_they_claim_are_refused(layout, ends, documents, kind, fault):
    folder, (change, said) = layout(kind), FALSE[fault]
    path = some_file(folder)
    if "mask" in fault and (kind in ("own", "connector") or "attention" in fault and kind != "automodel"):
        return  # its masks lie in the index
    rewrite(path, change)
    with pytest.raises(ValueError, match=said) as stopped:
        captured = open_captured(folder, ends)
        captured.states(captured.documents)
    assert path.name in str(stopped.value) and "\n" not in str(stopped.value)
    captured = open_captured(folder, ends, skip_damaged=True)
    assert sum(x is not None for x in captured.states(captured.documents)) < len(documents)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('"loss_mask": [0, 2]', "other numbers than 0 and 1"),
        ('"loss_mask": [0, 0.5]', "no lists of integers"),
        ('"loss_mask": null', "no lists of integers"),
        ('"loss_mask": [0]', "different length"),
        ('"input_ids": [1, 2.5]', "no lists of integers"),
        ('"input_ids": [1, "2"]', "no lists of integers"),
        ('"input_ids": [1, -2]', "outside the vocabulary"),
        ('"input_ids": [1, 1e400]', "no lists of integers"),
    ],
)
def test_the_index_is_blamed_for_what_it_says(layout, ends, documents, line, said):
    for kind in ("own", "connector"):
        index = (folder := layout(kind)) / "index.jsonl"
        lines = index.read_text().splitlines()
        lines[2] = json.dumps(json.loads(lines[2]) | json.loads(f"{{{line}}}"))
        index.write_text("\n".join(lines) + "\n")
        with pytest.raises(ValueError, match=rf"line 3 of \S*/index.jsonl cannot be used \(.*{said}"):
            open_captured(folder, ends)
        captured = open_captured(folder, ends, skip_damaged=True)
        assert captured.skipped["damaged"] == 1 and len(captured.documents) == 4
        assert "line 3 of" in captured.skipped.named["damaged"][0]


@pytest.mark.parametrize("text", ["no json", "[1]", "3", '{"input_ids": [1]}', "[" * 100_000, "\x00\xff"])
def test_an_index_that_is_none_is_named(layout, ends, text):
    for kind in ("own", "connector"):
        index = (folder := layout(kind)) / "index.jsonl"
        index.write_text(text + "\n")
        with pytest.raises(ValueError, match="index.jsonl cannot be used .*line 1"):
            open_captured(folder, ends)
    (folder := layout("specforge")).joinpath("specforge_index.jsonl").write_text(text + "\n")
    assert len(open_captured(folder, ends).documents) == 5  # it is made anew


def test_entries_that_stand_twice_are_refused(layout, ends):
    index = (folder := layout("own")) / "index.jsonl"
    index.write_text(index.read_text() * 2)
    with pytest.raises(ValueError, match="index.jsonl lists 10 documents in 5 files, capture.json says 5"):
        open_captured(folder, ends, skip_damaged=True)
    index = (folder := layout("connector")) / "index.jsonl"
    row = json.loads(index.read_text().splitlines()[0])
    index.write_text(index.read_text() + json.dumps(row) + "\n")
    assert len(open_captured(folder, ends).documents) == 5
    index.write_text(index.read_text() + json.dumps(row | {"loss_mask": [1] * 9}) + "\n")
    with pytest.raises(ValueError, match="line 7 of .* gives the same input_ids another loss_mask"):
        open_captured(folder, ends)


BAD_WHOLE = [None, True, "5", 2.5, -1, 0, [], {}, 10**12, 10**400]
BAD_LAYERS = [None, 3, "123", [], [1, 2], [1, 1, 2], [1, 2, "3"], [1, 2, 3.5], [1, 2, -3], [1, 2, 10**30], {"a": 1}]
BAD_IDS = [None, 3, "abc", [], [1, 1], [0.5], [None], [-1], [10**30], {}]


@pytest.mark.parametrize("skip", [False, True])
def test_every_field_of_a_manifest_is_checked(layout, ends, skip):
    fields = dict.fromkeys(("hidden_size", "vocab_size", "documents"), BAD_WHOLE) | {"version": [None, "1", 2, [], {}]}
    fields |= {"aux_layers": BAD_LAYERS, "last_hidden": [None, 3, [], "raw"], "head": [None, "a", [], [1.0], ["b"], {}]}
    cache = dict.fromkeys(
        ("target_vocab_size", "num_samples", "shard_size", "aux_hidden_dim", "format_version"), BAD_WHOLE
    )
    cache |= {"aux_layer_ids": BAD_LAYERS, "selected_token_ids": BAD_IDS}
    for kind, name, wrong in (("own", "capture.json", fields), ("automodel", "manifest.json", cache)):
        path = (folder := layout(kind)) / name
        good = json.loads(path.read_text())
        for field, values in wrong.items():
            for value in values:
                path.write_text(json.dumps(good | {field: value}))
                for head in (ends, None) if kind == "automodel" else (ends,):
                    if skip and value == 10**12 and field in ("documents", "num_samples"):  # what is missing is counted
                        assert sum(open_captured(folder, head, skip_damaged=True).skipped.values()) >= 10**12 - 5
                        continue
                    with pytest.raises(ValueError) as stopped:
                        open_captured(folder, head, skip_damaged=skip)
                    assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 900, (field, value)
        for text in ("", "[]", "3", "{", "[" * 100_000):
            path.write_text(text)
            with pytest.raises(ValueError, match=f"{name} cannot be used"):
                open_captured(folder, ends, skip_damaged=skip)


@pytest.mark.parametrize("kind", ALL)
def test_what_is_no_file_never_blocks(layout, ends, documents, kind):
    folder = layout(kind)
    (path := some_file(folder)).unlink()
    os.mkfifo(path)
    if kind == "connector":
        (path.with_name(f"{path.name}.lock")).unlink()
        os.mkfifo(f"{path}.lock")
    with pytest.raises(ValueError, match=f"{path.name} cannot be used .it is no regular file"):
        open_captured(folder, ends)
    lost = 2 if kind == "automodel" else 1
    assert len(open_captured(folder, ends, skip_damaged=True).documents) == len(documents) - lost
    path.unlink()
    path.mkdir()
    with pytest.raises(ValueError, match=f"{path.name} cannot be used"):
        open_captured(folder, ends)
    for name in ("index.jsonl", "capture.json", "manifest.json"):
        if (folder / name).exists():
            (folder / name).unlink()
            os.mkfifo(folder / name)
            with pytest.raises(ValueError, match="index.jsonl cannot be used|no mark of any|vLLM|holds no loss masks"):
                open_captured(folder, ends)


def bomb(path):
    with gzip.open(path, "wb", 9) as file:
        for _ in range(90):
            file.write(bytes(1 << 20))


def with_header(path, text, length=None):
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text.encode() + bytes(100))


F32 = '{"dtype":"F32","shape":[%s],"data_offsets":[%s]}'
HEADERS = {
    "beyond the file": ("{}", 10**12),
    "beyond what there can be": ("{}", 2**64 - 1),
    "no json": ("{", None),
    "no object": ("[]", None),
    "nested": ("[" * 100_000, None),
    "no entry": ('{"hidden_states": 3}', None),
    "twice": (f'{{"a":{F32 % (25, "0,100")},"a":{F32 % (25, "0,100")}}}', None),
    "huge": (f'{{"hidden_states":{F32 % (10**30, f"0,{4 * 10**30}")}}}', None),
    "too short": (f'{{"hidden_states":{F32 % (25, "0,96")}}}', None),
    "negative": (f'{{"hidden_states":{F32 % (-25, "0,-100")}}}', None),
    "of another type": (f'{{"hidden_states":{F32 % (25, "0,100")}}}'.replace("F32", "F4"), None),
    "short of the file": (f'{{"hidden_states":{F32 % (24, "0,96")}}}', None),
}


@pytest.mark.parametrize("header", HEADERS)
def test_a_header_that_cannot_be_is_one_line(layout, ends, header):
    for kind in ("connector", "automodel"):
        path = some_file(folder := layout(kind))
        with_header(path, *HEADERS[header])
        with pytest.raises(ValueError, match=f"{path.name} cannot be used") as stopped:
            open_captured(folder, ends)
        assert "\n" not in str(stopped.value)


def odd(value):
    return lambda path: rewrite(path, with_value(["hidden_state"], value))


ODD = {
    "sparse": odd(lambda x: x[0].to_sparse()),
    "meta": odd(lambda x: x.to("meta")),
    "no tensor": odd(lambda x: x.tolist()),
    "stretched": odd(lambda x: x[:1, :1, :1].clone().expand(x.shape)),
    "a list": lambda path: torch.save([1, 2], path),
    "the older format": lambda path: torch.save({}, path, _use_new_zipfile_serialization=False),
}


@pytest.mark.parametrize("what", ODD)
def test_a_checkpoint_without_stored_numbers_is_refused(layout, ends, what):
    path = some_file(folder := layout("specforge"))
    ODD[what](path)
    with pytest.raises(ValueError, match=f"{path.name} cannot be used") as stopped:
        open_captured(folder, ends)
    assert "\n" not in str(stopped.value)
    assert len(open_captured(folder, ends, skip_damaged=True).documents) == 4


def test_views_are_read_as_what_they_show_and_packed_zeros_are_not_unpacked(layout, ends):
    path = some_file(folder := layout("specforge"))
    wanted = open_captured(folder, ends)
    before = wanted.states(wanted.documents)
    rewrite(path, with_value(["hidden_state"], lambda x: F.pad(x, (3, 4))[..., 3:-4]))
    after = (again := open_captured(folder, ends)).states(again.documents)
    assert all(torch.equal(a, b) for x, y in zip(before, after, strict=True) for a, b in zip(x, y, strict=True))
    path = some_file(folder := layout("specforge.gz"))
    bomb(path)
    with pytest.raises(ValueError, match=f"{path.name} cannot be used .it unpacks to more than 67,108,864 bytes"):
        open_captured(folder, ends)
