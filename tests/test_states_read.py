"""Captured hidden states: every layout read back to the same batch.

The batch that all are held to is made from the running target, as training without files makes it.
"""

import fcntl
import gzip
import json
import sys

import pytest
import torch
import torch.nn.functional as F

from states import specforge as specforge_module
from states.index import masks_of
from states.read import open_captured
from target.ends import load_ends
from tests.helpers import (
    AUX,
    DRAFT_IDS,
    LAYOUTS,
    H,
    V,
    automodel,
    batch_of,
    check_equal,
    connector,
    rewrite,
    some_file,
    specforge,
    with_value,
)


@pytest.fixture(scope="module")
def online(documents, states, target):
    rows = batch_of(documents, states, target.head)
    supervised, valid = rows.teacher_index >= 0, rows.valid
    assert supervised.any() and (valid & ~supervised).any()  # some argmax lies outside the draft vocabulary
    return rows


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_layout_gives_the_batch_that_the_running_target_gives(layout, kind, documents, ends, online, target):
    captured = open_captured(layout(kind), ends)
    assert len(captured.documents) == len(documents) and captured.aux_layers == AUX and not +captured.skipped
    for held, d in zip(captured.documents, documents, strict=True):
        assert torch.equal(held.tokens[1:], d.tokens[1:]) and torch.equal(held.loss_mask[1:], d.loss_mask[1:])
    states = captured.states(captured.documents)
    assert all(last.shape == (len(d.tokens), captured.width) for d, (_, last) in zip(documents, states, strict=True))
    check_equal(batch_of(captured.documents, states, captured.head), online)
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
    rows = batch_of(captured.documents, captured.states(captured.documents), captured.head, ids)
    check_equal(rows, batch_of(documents, states, target.head, ids))


def test_a_topk_cache_is_the_renormalised_top_k_and_exactly_zero_elsewhere(tmp_path, documents, states, target, online):
    automodel(tmp_path, documents, states, target, topk=5)
    captured = open_captured(tmp_path)
    rows = batch_of(captured.documents, captured.states(captured.documents), captured.head)
    assert torch.equal(rows.teacher_index, online.teacher_index) and torch.equal(rows.valid, online.valid)
    top, at = online.teacher.topk(5)
    expected = torch.zeros_like(online.teacher).scatter(-1, at, top / top.sum(-1, keepdim=True).clamp(min=1e-9))
    for r in range(len(rows.teacher)):
        learned = online.teacher_index[:, r][online.teacher_index[:, r] >= 0].unique()
        torch.testing.assert_close(rows.teacher[r, learned], expected[r, learned], atol=1e-6, rtol=0)
        assert ((rows.teacher[r, learned] == 0).sum(-1) == len(DRAFT_IDS) - 5).all()


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
    check_equal(batch_of(captured.documents, captured.states(captured.documents), captured.head), online)


def test_masks_of_vllms_files_come_from_the_conversations(layout, ends, documents, online):
    folder = layout("connector")
    (folder / "index.jsonl").unlink()
    with pytest.raises(ValueError, match=r"holds no loss masks: put an index\.jsonl"):
        open_captured(folder, ends)
    captured = open_captured(folder, ends, masks=masks_of(documents))
    check_equal(batch_of(captured.documents, captured.states(captured.documents), captured.head), online)
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
    real = specforge_module.open_checkpoint
    monkeypatch.setattr(
        specforge_module, "open_checkpoint", lambda path, names: looks.append(path) or real(path, names)
    )
    open_captured(folder, ends)
    assert len(looks) == 5
    rewrite(some_file(folder), lambda held: held | {"loss_mask": 1 - held["loss_mask"]})
    captured = open_captured(folder, ends)
    assert looks[5:] == [some_file(folder)]
    check_equal_masks = [d.loss_mask.int().tolist() for d in captured.documents]
    assert check_equal_masks == [d.loss_mask.int().tolist() for d in open_captured(folder, ends).documents]


def bomb(path):
    with gzip.open(path, "wb", 9) as file:
        for _ in range(90):
            file.write(bytes(1 << 20))


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
