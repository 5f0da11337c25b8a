"""Claims about draft vocabularies: counted from what is learned, or read from any tool's map."""

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from data.documents import Document
from data.vocabulary import draft_vocabulary, draft_vocabulary_map
from tests.helpers import DRAFT_IDS, V


def test_draft_vocabulary_counts_learned_tokens_and_keeps_special_ones():
    documents = [Document(torch.tensor([1, 2, 2, 3, 5, 5]), torch.tensor([0, 1, 1, 1, 0, 0], dtype=torch.bool), "")]
    assert draft_vocabulary(documents, 3, [9], 12).tolist() == [2, 3, 9]
    assert draft_vocabulary(documents, 6, [9], 12).tolist() == [0, 1, 2, 3, 4, 9]  # too few: the lowest ids fill up
    for size in (0, -1, 13, 2.5, True):
        with pytest.raises(ValueError, match="draft-vocab"):
            draft_vocabulary(documents, size, [9], 12)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("map.json", b"[" * 3000, "RecursionError"),
        ("map.json", b'{"selected_token_ids": [0.5, 1.5]}', "whole numbers"),
        ("map.json", b'{"selected_token_ids": [[0], [1]]}', "whole numbers"),
        ("map.json", b'{"selected_token_ids": [true, false]}', "whole numbers"),
        ("map.json", b'{"selected_token_ids": null}', "NoneType"),
        ("map.json", b'{"selected_token_ids": [1180591620717411303424]}', "verflow"),
        ("map.json", b"[]", "TypeError"),
        ("map.json", b"\xff\xfe", "map.json cannot be used"),
        ("d2t.npy", b"\x93NUMPY", "d2t.npy cannot be used"),
        ("d2t.npy", np.array([0.0, 1.0]), "whole numbers"),
        ("d2t.npy", np.array([{}], dtype=object), "allow_pickle"),
        ("map.pt", {"d2t": torch.tensor([0.0, 0.5])}, "whole numbers"),
        ("map.pt", {"d2t": [0, 0]}, "no row of offsets d2t"),
        ("map.pt", torch.zeros(3), "no row of offsets d2t"),
        ("map.pt", {"d2t": torch.zeros(3, 3, dtype=torch.long)}, "no row of offsets d2t"),
        ("map.pt", b"\x80\x04junk", "map.pt cannot be used"),
        ("map.pt", b"", "map.pt cannot be used"),
        ("map.safetensors", b"\xff" * 40, "map.safetensors cannot be used"),
        ("map.txt", b"1 2 3", "map.txt cannot be used"),
    ],
)
def test_a_damaged_vocabulary_map_is_named_in_one_line(tmp_path, name, content, said):
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, np.ndarray):
        np.save(path, content, allow_pickle=True)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=said) as caught:
        draft_vocabulary_map(path, 12)
    assert name in str(caught.value) and "\n" not in str(caught.value)


def test_no_pickle_of_a_vocabulary_map_is_executed_and_no_fifo_waited_for(tmp_path):
    class Planted:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    torch.save({"d2t": Planted()}, tmp_path / "map.pt")
    with (tmp_path / "d2t.npy").open("wb") as file:
        np.lib.format.write_array(file, np.array([Planted()], dtype=object), allow_pickle=True)
    os.mkfifo(tmp_path / "fifo.pt")
    for name, said in (("map.pt", "map.pt cannot"), ("d2t.npy", "d2t.npy cannot"), ("fifo.pt", "is a FIFO")):
        with pytest.raises(ValueError, match=said):
            draft_vocabulary_map(tmp_path / name, 12)
    assert not (tmp_path / "executed").exists()


def test_draft_vocabularies_of_all_tools_are_the_same_ids(tmp_path):
    ids = DRAFT_IDS
    d2t, t2d = ids - torch.arange(len(ids)), torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    folders = [tmp_path / name for name in ("specforge", "speculators", "sized", "automodel", "draft")]
    for folder in folders:
        folder.mkdir()
    torch.save({"d2t": d2t, "t2d": t2d}, folders[0] / "vocab_mapping.pt")
    for name, x in (("d2t", d2t), ("t2d", t2d)):
        np.save(folders[1] / f"{name}.npy", x.numpy())
        np.save(folders[2] / f"{name}-{len(ids)}.npy", x.numpy())
    (folders[3] / "manifest.json").write_text(json.dumps({"selected_token_ids": ids.flip(0).tolist()}))
    save_file({"d2t": d2t, "t2d": t2d, "fc.weight": torch.zeros(2)}, folders[4] / "model.safetensors")
    for folder in folders:
        assert torch.equal(draft_vocabulary_map(folder, V), ids)
        assert torch.equal(draft_vocabulary_map(next(folder.glob("[dmv]*")), V), ids)

    bad = {
        "absolute": {"d2t": ids, "t2d": t2d},
        "another t2d": {"d2t": d2t, "t2d": t2d.roll(1)},
        "short t2d": {"d2t": d2t, "t2d": t2d[:-1]},
        "twice": {"d2t": -torch.arange(4)},
        "none": {"t2d": t2d},
    }
    for held in bad.values():
        torch.save(held, tmp_path / "vocab_mapping.pt")
        with pytest.raises(ValueError, match=r"vocab_mapping\.pt cannot be used"):
            draft_vocabulary_map(tmp_path, V)
    (tmp_path / "vocab_mapping.pt").unlink()
    with pytest.raises(ValueError, match="one vocabulary map is wanted"):
        draft_vocabulary_map(tmp_path, V)
