"""Captured hidden states: written whole or resumed, the target's ends, vocabularies, reading ahead, following."""

import fcntl
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import capture
import files
from capture import Follower, prefetched, write_capture
from captured import masks_of, open_captured, token_key
from data import draft_vocabulary_map
from draft_deepseek import Eagle3MLAConfig
from ends import load_ends
from target import byte_tokenizer, load_target
from test_captured import (  # noqa: F401  fixtures work by their names
    DRAFT_IDS,
    H,
    V,
    automodel,
    batch,
    check_equal,
    connector,
    documents,
    ends,
    home,
    not_finite,
    raw_last,
    rewrite,
    save_layers,
    specforge,
    speculators,
    states,
    target,
)

os.environ["HF_HUB_OFFLINE"] = "1"

# ------------------------------------------------------------------------------------------------------------- writing


def contents(folder):
    return {x.relative_to(folder).as_posix(): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capture_killed_anywhere_resumes_to_the_same_bytes(tmp_path, target, documents, dtype, monkeypatch, capsys):
    monkeypatch.setattr(capture, "CHUNK_TOKENS", 20)  # chunks of two
    write_capture(tmp_path / "whole", target, documents, dtype)
    assert f"45 tokens of {4 * H * dtype.itemsize + 8} bytes" in capsys.readouterr().out
    whole, replaced = contents(tmp_path / "whole"), os.replace
    assert len(whole) == 7 and not any(name.endswith(".part") for name in whole)
    for stop in range(6):  # before each rename, and with the file's line torn
        out, left = tmp_path / f"cut-{stop}", [stop]

        def killed(half, path, left=left):
            assert not path.exists()  # what bears its name is whole
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
            replaced(half, path)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(files.os, "replace", killed)
            write_capture(out, target, documents, dtype)
        if stop > 1:
            os.truncate(out / "index.jsonl", (out / "index.jsonl").stat().st_size - 3)
        write_capture(out, target, documents, dtype)
        assert contents(out) == whole, stop


KILLED = """
import os, sys, torch, capture, data, target
renames, replace = [], os.replace

def replace_or_die(half, path):
    renames.append(path)
    if len(renames) == 40:
        os.kill(os.getpid(), 9)
    replace(half, path)

os.replace = replace_or_die
documents = [data.Document(*x) for x in torch.load(sys.argv[1])]
capture.write_capture(sys.argv[2], target.load_target(sys.argv[3]), documents, torch.float32)
"""


def test_a_killed_process_leaves_a_directory_that_resumes(tmp_path, home, target, documents, ends):
    many, out = documents * 20, tmp_path / "out"
    torch.save([tuple(d) for d in many], tmp_path / "many.pt")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "many.pt"), str(out), str(home)]
    process = subprocess.run(command, cwd=Path(__file__).parent, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.returncode == -signal.SIGKILL
    with pytest.raises(ValueError, match="lacks 62 of 100"):
        open_captured(out, ends)
    captured = open_captured(out, ends, skip_damaged=True)
    assert captured.skipped["unfinished"] == 62 and len(captured.documents) == 38
    before = (out / "hidden_states/hs_7.safetensors").stat().st_mtime_ns
    write_capture(out, target, many, torch.float32)
    assert (out / "hidden_states/hs_7.safetensors").stat().st_mtime_ns == before
    write_capture(tmp_path / "whole", target, many, torch.float32)
    assert contents(out) == contents(tmp_path / "whole")


def test_a_bfloat16_capture_is_the_rounded_states(tmp_path, target, documents, states):
    write_capture(tmp_path, target, documents, torch.bfloat16)
    captured = open_captured(tmp_path, target)
    held = captured.states(captured.documents)
    for got, exact in zip(held, states, strict=True):
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(got, exact, strict=True))
    rounded = [tuple(x.bfloat16().float() for x in pair) for pair in states]
    rows = batch(captured.documents, [(f.float(), x.float()) for f, x in held], captured.head)
    check_equal(rows, batch(documents, rounded, target.head))


def test_another_capture_is_never_written_over(tmp_path, home, target, documents, monkeypatch):
    write_capture(tmp_path / "out", target, documents, torch.float32, "first")
    before = contents(tmp_path / "out")
    others = {
        "documents": (target, documents[:-1], torch.float32),
        "documents_digest": (target, documents[::-1], torch.float32),
        "dtype": (target, documents, torch.bfloat16),
        "aux_layers": (load_target(home, [0, 2, 4]), documents, torch.float32),
        "target_digest": (tuned := load_target(home), documents, torch.float32),
    }
    with torch.no_grad():
        tuned.layers[3].mlp.down_proj.weight.mul_(1.01)
    for what, other in others.items():
        with pytest.raises(ValueError, match=f"holds another capture .*{what}"):
            write_capture(tmp_path / "out", *other)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/thesis.txt").touch()
    with pytest.raises(ValueError, match="holds no capture"):
        write_capture(tmp_path / "foreign", target, documents, torch.float32)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="do not fit"):
        write_capture(tmp_path / "small", target, documents, torch.float32)
    assert not (tmp_path / "small").exists()
    write_capture(tmp_path / "out", target, documents, torch.float32, "first")  # nothing left to write
    assert contents(tmp_path / "out") == before


# ---------------------------------------------------------------------------------------------------- the target's ends


def test_ends_equal_the_model_from_sharded_files(home, target, ends, states, raw_last):
    assert len(list(home.glob("*.safetensors"))) > 2
    for name in ("embed_tokens", "lm_head"):
        assert torch.equal(getattr(ends, name).weight, getattr(target, name).weight)
    for (_, last), raw in zip(states, raw_last, strict=True):
        torch.testing.assert_close(ends.norm(raw), last, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ends.head(ends.norm(raw)), target.head(last), atol=1e-5, rtol=1e-5)
    for name in ("hidden_size", "vocab_size", "device", "dtype", "special_token_ids", "stop_token_ids"):
        assert getattr(ends, name) == getattr(target, name), name
    drafts = [Eagle3MLAConfig.from_any(x.config.to_dict()).to_dict() for x in (ends, target)]
    assert drafts[0] == drafts[1]  # a draft made from either is the same
    assert ends.norm(raw_last[0].bfloat16()).dtype == torch.bfloat16 and ends.head(last.bfloat16()).dtype == ends.dtype


@pytest.mark.parametrize("inner, outer", [("language_model.model.", "language_model.lm_head."), ("model.", None)])
def test_ends_of_nested_names_unknown_model_types_and_tied_embeddings(tmp_path, target, inner, outer):
    config = {"hidden_size": H, "vocab_size": V, "num_hidden_layers": 7, "rms_norm_eps": 1e-5, "mla_use_nope": True}
    nested = {
        "model_type": "kimi_k3",
        "text_config": config,
        "eos_token_id": [3, 4],
        "tie_word_embeddings": outer is None,
    }
    (tmp_path / "config.json").write_text(json.dumps(nested))
    byte_tokenizer().save_pretrained(tmp_path)
    embed, head, norm = (
        x.data for x in (target.embed_tokens.weight, target.lm_head.weight, target.backbone.norm.weight)
    )
    tensors = {f"{inner}embed_tokens.weight": embed, f"{inner}norm.weight": norm}
    tensors |= {f"{inner}layers.7.embed_tokens.weight": -embed}  # as an MTP layer has it
    if outer:
        tensors[f"{outer}weight"] = head
    save_file(tensors, tmp_path / "model.safetensors")
    ends = load_ends(tmp_path)
    assert torch.equal(ends.embed_tokens.weight, embed) and torch.equal(ends.lm_head.weight, head if outer else embed)
    assert (
        ends.stop_token_ids == [3, 4] and ends.config.mla_use_nope and set(range(256, 262)) < {*ends.special_token_ids}
    )
    x = torch.randn(5, H)
    expected = norm * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(ends.norm(x), expected, atol=1e-6, rtol=1e-6)
    assert load_ends(tmp_path, dtype=torch.bfloat16).head(x).dtype == torch.bfloat16

    for change, said in (
        (lambda held: {k: x for k, x in held.items() if "norm" not in k}, f"lacks {inner}norm.weight"),
        (lambda held: held | {f"{inner}norm.weight": norm[:-1].clone()}, rf"norm.weight is .*\[{H - 1}\]"),
    ):
        rewrite(tmp_path / "model.safetensors", change)
        with pytest.raises(ValueError, match=said):
            load_ends(tmp_path)
        save_file(tensors, tmp_path / "model.safetensors")
    os.truncate(tmp_path / "model.safetensors", 5000)
    with pytest.raises(ValueError, match="model.safetensors cannot be used"):
        load_ends(tmp_path)
    with pytest.raises(ValueError, match="is no directory"):
        load_ends(tmp_path / "none")


# --------------------------------------------------------------------------------------------------------- vocabularies


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


# ------------------------------------------------------------------------------------ others at work, and failing disks


def test_two_writers_never_share_a_directory(tmp_path, target, documents, monkeypatch):
    out, second = tmp_path / "out", []
    real = capture.write_document

    def meanwhile(*args):
        with pytest.raises(ValueError, match="another process writes into .*out; wait for it") as stopped:
            write_capture(out, target, documents, torch.float32)
        second.append(str(stopped.value))
        with pytest.raises(ValueError, match="another capture|another process"):
            write_capture(out, target, documents[:2], torch.float32)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(capture, "write_document", meanwhile)
        write_capture(out, target, documents, torch.float32)
    assert len(second) == 5 == len((out / "index.jsonl").read_text().splitlines())
    write_capture(tmp_path / "alone", target, documents, torch.float32)
    assert contents(out) == contents(tmp_path / "alone")


@pytest.mark.parametrize("stop", range(5))
def test_a_capture_killed_before_its_first_document_begins_anew(tmp_path, target, documents, stop):
    write_capture(tmp_path / "whole", target, documents, torch.float32)
    out = tmp_path / "out"
    out.mkdir()
    if stop > 0:
        (out / "index.jsonl").touch()
    if stop > 1:
        (out / "capture.json.part").write_text("{")
        (out / ".capture.json-17-0123abcd.part").write_text("{")
    if stop > 2:
        (out / "capture.json").write_bytes((tmp_path / "whole/capture.json").read_bytes())
    if stop > 3:
        (out / "hidden_states").mkdir()
        (out / "hidden_states/.hs_0.safetensors-17-0123abcd.part").write_text("half")
    write_capture(out, target, documents, torch.float32)
    assert contents(out) == contents(tmp_path / "whole")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign/index.jsonl").write_text("mine")
    with pytest.raises(ValueError, match="holds no capture"):
        write_capture(tmp_path / "foreign", target, documents, torch.float32)
    assert contents(tmp_path / "foreign") == {"index.jsonl": b"mine"}
    (tmp_path / "foreign/index.jsonl").unlink()
    os.mkfifo(tmp_path / "foreign/index.jsonl")
    with pytest.raises(ValueError, match="index.jsonl is no regular file"):
        write_capture(tmp_path / "foreign", target, documents, torch.float32)


@pytest.mark.parametrize("limit", [100, 300, 1500, 4000, 7000])
def test_a_full_disk_is_one_line_that_names_the_file_and_loses_nothing(tmp_path, target, documents, limit, capsys):
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    long = [d._replace(tokens=d.tokens.repeat(9), loss_mask=d.loss_mask.repeat(9)) for d in documents[:1]] + documents
    try:  # what no file may grow beyond fails as a full disk does
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        with pytest.raises(OSError) as stopped:
            write_capture(out, target, long, torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(out) in str(stopped.value) and "\n" not in str(stopped.value)
    assert not isinstance(stopped.value, PermissionError)  # exit code 1
    write_capture(out, target, long, torch.float32)
    write_capture(tmp_path / "whole", target, long, torch.float32)
    assert contents(out) == contents(tmp_path / "whole")


@pytest.mark.parametrize("name", ["index.jsonl", "sent"])
def test_a_full_disk_while_sending_is_one_line_that_names_the_file(tmp_path, documents, name, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr(capture, "ask", lambda url, body=None: {"data": [{"id": "m"}]})
    if name == "sent":
        capture.send("http://localhost", tmp_path, documents[:1])
        (tmp_path / "sent").unlink()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(OSError, match=name):
            capture.send("http://localhost", tmp_path, documents[:1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    capture.send("http://localhost", tmp_path, documents[:1])
    assert (tmp_path / "STOP").exists() and (tmp_path / "sent").read_text() == "1\n"


# --------------------------------------------------------------------------------------------------- answers, addresses

MODELS = b'{"data": [{"id": "m"}]}'
ANSWERS = {
    "html": (b"<html>no</html>", b""),
    "nothing": (b"", b""),
    "a list": (b"[1]", b""),
    "a number": (b"3", b""),
    "no data": (b"{}", b""),
    "empty data": (b'{"data": []}', b""),
    "data of another type": (b'{"data": {"a": 1}}', b""),
    "no id": (b'{"data": [{}]}', b""),
    "an id of another type": (b'{"data": [{"id": 3}]}', b""),
    "nested": (b"[" * 100_000, b""),
    "bytes": (bytes(range(256)), b""),
    "huge": (b" " * 200_000, b""),
    "completions as html": (MODELS, b"<html>"),
    "completions as a list": (MODELS, b"[]"),
    "parameters of another type": (MODELS, b'{"kv_transfer_params": [1]}'),
    "a path of another type": (MODELS, b'{"kv_transfer_params": {"hidden_states_path": 3}}'),
}


class Answer(io.BytesIO):
    """What urlopen returns."""


@pytest.mark.parametrize("what", ANSWERS)
def test_an_answer_that_is_not_vllms_is_one_line(tmp_path, documents, what, monkeypatch):
    models, completions = ANSWERS[what]
    monkeypatch.setattr(capture, "ANSWER", 150_000)
    said = {"/v1/models": models, "/v1/completions": completions}
    monkeypatch.setattr(
        capture.urllib.request, "urlopen", lambda request, timeout: Answer(said[request.full_url.partition("host")[2]])
    )
    with pytest.raises(ValueError, match="http://host/v1/.* does not answer as vLLM does") as stopped:
        capture.send("http://host", tmp_path / "out", documents)
    assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 500
    assert not (tmp_path / "out/STOP").exists()


@pytest.mark.parametrize(
    "url", ["", "foo", "localhost:8000", "file:///etc", "http://", "http://a:b", "http://[", "ftp://a"]
)
def test_what_is_no_address_is_one_line(tmp_path, documents, url):
    with pytest.raises(ValueError, match="--send is given .*; the address of a running vLLM is wanted"):
        capture.send(url, tmp_path / "out", documents)
    for broken in ("http://a b", "http://a\nb", f"http://{'a' * 300}", "http://localhost:99999"):
        with pytest.raises(ValueError, match="does not answer as vLLM|is wanted") as stopped:
            capture.send(broken, tmp_path / "out", documents)
        assert "\n" not in str(stopped.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [b"many\n", b"-1\n", b"9\n", b"\xff\n", b"1.5\n"])
def test_a_count_of_sent_documents_that_cannot_be_is_named(tmp_path, documents, text, monkeypatch):
    monkeypatch.setattr(capture, "ask", lambda url, body=None: {"data": [{"id": "m"}]})
    (tmp_path / "sent").write_bytes(text)
    with pytest.raises(ValueError, match="sent cannot be used"):
        capture.send("http://localhost", tmp_path, documents)
    (tmp_path / "sent").write_bytes(b"3\n5\n1")  # torn: the line before it counts
    capture.send("http://localhost", tmp_path, documents)
    assert (tmp_path / "STOP").exists()
    with (tmp_path / "sent").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process writes into"):
            capture.send("http://localhost", tmp_path, documents)


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
    monkeypatch.setattr(capture, "UNUSED", 4)
    with pytest.raises(ValueError, match="none of the first 4 files in .* is a whole one"):
        list(follow(tmp_path, ends, documents[:4], patience=1))
