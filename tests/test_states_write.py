"""Captured hidden states are written whole, or resumed to the same bytes."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import types

import pytest
import torch

from data import files
from states import write
from states.read import open_captured
from states.write import write_capture
from target.model import load_target
from tests.helpers import ROOT, H, batch_of, check_equal

# ------------------------------------------------------------------------------------------------------------- writing


def contents(folder):
    return {x.relative_to(folder).as_posix(): x.read_bytes() for x in sorted(folder.rglob("*")) if x.is_file()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_capture_killed_anywhere_resumes_to_the_same_bytes(tmp_path, target, documents, dtype, monkeypatch, capsys):
    monkeypatch.setattr(write, "CHUNK_TOKENS", 20)  # chunks of two
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
import os, sys, torch
from data.documents import Document
from states.write import write_capture
from target.model import load_target
renames, replace = [], os.replace

def replace_or_die(half, path):
    renames.append(path)
    if len(renames) == 40:
        os.kill(os.getpid(), 9)
    replace(half, path)

os.replace = replace_or_die
documents = [Document(*x) for x in torch.load(sys.argv[1])]
write_capture(sys.argv[2], load_target(sys.argv[3]), documents, torch.float32)
"""


def test_a_killed_process_leaves_a_directory_that_resumes(tmp_path, home, target, documents, ends):
    many, out = documents * 20, tmp_path / "out"
    torch.save([tuple(d) for d in many], tmp_path / "many.pt")
    command = [sys.executable, "-c", KILLED, str(tmp_path / "many.pt"), str(out), str(home)]
    process = subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"})
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
    rows = batch_of(captured.documents, [(f.float(), x.float()) for f, x in held], captured.head)
    check_equal(rows, batch_of(documents, rounded, target.head))


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


# ------------------------------------------------------------------------------------ others at work, and failing disks


def test_two_writers_never_share_a_directory(tmp_path, target, documents, monkeypatch):
    out, second = tmp_path / "out", []
    real = write.write_document

    def meanwhile(*args):
        with pytest.raises(ValueError, match="another process writes into .*out; wait for it") as stopped:
            write_capture(out, target, documents, torch.float32)
        second.append(str(stopped.value))
        with pytest.raises(ValueError, match="another capture|another process"):
            write_capture(out, target, documents[:2], torch.float32)
        real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(write, "write_document", meanwhile)
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
