"""Captured hidden states that are damaged, foreign or false are refused by name, or skipped and counted."""

import json
import os
import random
from pathlib import Path

import pytest
import torch

from states import tensors
from states.read import open_captured
from tests.helpers import H, V, not_finite, rewrite, some_file, with_value

# --------------------------------------------------------------------------------------------- what is refused, and how


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
        monkeypatch.setattr(tensors.os, "preadv", cut_first)
    states = captured.states(captured.documents)
    lost = 2 if kind == "automodel" else 1
    assert path.stat().st_size < whole and sum(x is None for x in states) == lost == captured.unread["damaged"]
    assert path.name in captured.unread.named["damaged"][0] and captured.unread.kept == len(documents) - lost
    assert captured.states(captured.documents).count(None) == lost == captured.unread["damaged"]  # counted once
    captured = open_captured(folder, ends, skip_damaged=True)  # cut already
    assert captured.skipped["damaged"] == lost and not +captured.unread


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
