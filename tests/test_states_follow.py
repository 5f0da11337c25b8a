"""Captured hidden states read ahead and followed: each file that arrives is taken once, in order, and given back."""

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from states import follow as follow_module
from states.follow import Follower, prefetched
from states.index import masks_of, token_key
from tests.helpers import connector, not_finite, rewrite, save_layers

# ------------------------------------------------------------------------------------------------- ahead, and following


def threads():
    return [t for t in threading.enumerate() if t.name == "prefetched"]


def test_prefetch_keeps_order_passes_errors_on_and_ends_with_its_consumer():
    made = []

    def numbers(limit):
        for i in range(limit):
            made.append(i)
            yield i
        raise KeyError("broken")

    got = []
    with pytest.raises(KeyError, match="broken"):
        for i in prefetched(numbers(20), depth=3):
            got.append(i)
            assert len(made) <= i + 6  # ready, one in each hand
    assert got == list(range(20)) and not threads()
    made.clear()
    for i in prefetched(numbers(1000), depth=3):
        if i == 4:
            break
    assert not threads() and len(made) < 12
    assert list(prefetched(iter(()))) == []


def follow(folder, ends, documents, **options):
    return Follower(folder, ends, masks_of(documents), poll_s=0.01, **options)


def test_a_follower_takes_each_finished_file_once_and_deletes_it(tmp_path, ends, documents, states, raw_last):
    def produce():
        for i, (d, (features, _), last) in enumerate(zip(documents, states, raw_last, strict=True)):
            path = tmp_path / f"cmpl-{i}.safetensors"
            with open(f"{path}.lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                save_layers(tmp_path / "made/x", d, features, last)
                whole = (tmp_path / "made/x").read_bytes()
                path.write_bytes(whole[: len(whole) // 2])
                time.sleep(0.05)
                path.write_bytes(whole)
        (tmp_path / "STOP").touch()

    follower = follow(tmp_path, ends, documents, patience=2)
    producer = threading.Thread(target=produce)
    producer.start()
    for i, (document, features, last) in enumerate(prefetched(follower, depth=2)):
        assert torch.equal(document.tokens, documents[i].tokens) and torch.equal(
            document.loss_mask, documents[i].loss_mask
        )
        torch.testing.assert_close(features, states[i][0], atol=0, rtol=0)
        torch.testing.assert_close(last, states[i][1], atol=1e-5, rtol=1e-5)
        assert Path(document.source).exists()
        follower.done(document)
        assert not Path(document.source).exists() and not Path(f"{document.source}.lock").exists()
    producer.join()
    assert i == len(documents) - 1 and not follower.skipped and not threads()
    assert [x.name for x in tmp_path.iterdir() if x.is_file()] == ["STOP"]


def test_a_follower_sets_damaged_and_unknown_files_aside(tmp_path, ends, documents, states, raw_last):
    connector(tmp_path, documents, states, raw_last)
    os.truncate(tmp_path / "cmpl-1.safetensors", 3000)
    rewrite(tmp_path / "cmpl-3.safetensors", not_finite)
    (tmp_path / "STOP").touch()
    follower = follow(tmp_path, ends, documents[:4], patience=3)
    got = [d.tokens for d, *_ in follower]
    assert len(got) == 2 and all(
        torch.equal(a, b.tokens) for a, b in zip(got, (documents[0], documents[2]), strict=True)
    )
    assert follower.skipped == {"damaged": 2, "unknown": 1}
    left = sorted(x.name for x in tmp_path.glob("cmpl-*") if x.suffix != ".lock")
    names = ["cmpl-0.safetensors", "cmpl-1.safetensors.bad", "cmpl-2.safetensors", "cmpl-3.safetensors.bad"]
    assert left == [*names, "cmpl-4.safetensors.unknown"]


def test_ranks_share_the_files_and_a_full_disk_pauses_the_producer(tmp_path, ends, documents, states, raw_last, capsys):
    connector(tmp_path, documents, states, raw_last)
    (tmp_path / "STOP").touch()
    followers = [follow(tmp_path, ends, documents, rank=r, world=2, max_bytes=5000) for r in range(2)]
    taken = [list(f) for f in followers]
    assert sorted(token_key(d.tokens) for share in taken for d, *_ in share) == sorted(masks_of(documents))
    assert (tmp_path / "PAUSE").exists() and capsys.readouterr().out.count("warning") == 1
    for follower, share in zip(followers, taken, strict=True):
        for document, *_ in share:
            follower.done(document)
    assert next(followers[0], None) is None and not (tmp_path / "PAUSE").exists()


def test_a_follower_that_waits_ends_with_its_consumer(tmp_path, ends, documents, states, raw_last):
    connector(tmp_path, documents[:1], states[:1], raw_last[:1])
    for _ in prefetched(Follower(tmp_path, ends, masks_of(documents), poll_s=100)):
        break
    assert not threads()


# ---------------------------------------------------------------------------------------------- what a follower refuses


def test_a_follower_names_what_it_sets_aside_and_stops_when_nothing_is_usable(
    tmp_path, ends, documents, states, raw_last, monkeypatch
):
    connector(tmp_path, documents, states, raw_last)
    (tmp_path / "STOP").touch()
    paths = sorted(tmp_path.glob("*.safetensors"))
    rewrite(paths[0], lambda held: held | {"hidden_states": held["hidden_states"].long()})
    rewrite(paths[1], lambda held: held | {"token_ids": held["token_ids"] + 0.5})
    paths[2].unlink()
    os.mkfifo(paths[2])
    preadv = os.preadv

    def cut_first(fd, buffers, begin):
        if buffers[0].nbytes > 3000 and paths[3].exists() and os.fstat(fd).st_ino == paths[3].stat().st_ino:
            os.truncate(paths[3], begin + 1000)
        return preadv(fd, buffers, begin)

    monkeypatch.setattr(os, "preadv", cut_first)
    follower = follow(tmp_path, ends, documents, patience=2)
    assert [d.tokens.tolist() for d, *_ in follower] == [documents[4].tokens.tolist()]
    (said,) = follower.skipped.lines()
    assert said.startswith("  skipped 4: damaged (") and said.endswith(", ...)")
    assert "cmpl-0.safetensors cannot be used (its hidden_states are int64" in said
    assert len(list(tmp_path.glob("*.bad"))) == 4
    for bad in tmp_path.glob("*.bad"):
        bad.rename(bad.with_suffix(""))
    monkeypatch.setattr(follow_module, "UNUSED", 4)
    with pytest.raises(ValueError, match="none of the first 4 files in .* is a whole one"):
        list(follow(tmp_path, ends, documents[:4], patience=1))
