"""Claims about how a run ends: failures have one line and their exit code, bugs their traceback."""

import errno
import io
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from tests.helpers import ROOT, error_line


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 2),
        (OSError("disk"), 1),
        (OSError(errno.ENOSPC, "No space left"), 1),
        (OSError(errno.EIO, "I/O error"), 1),
        (OSError(errno.ENAMETOOLONG, "too long"), 2),
        (FileNotFoundError(errno.ENOENT, "absent"), 2),
        (MemoryError(), 2),
        (torch.OutOfMemoryError("CUDA out of memory."), 2),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), 2),
    ],
)
def test_failures_have_one_line_and_their_exit_code(error, code, capsys, monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: (_ for _ in ()).throw(error))
    error_line([], capsys, code)


def test_a_bug_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(train, "main", lambda argv: {}["x"])
    with pytest.raises(KeyError):
        train.cli([])


def test_help_begins_with_what_the_script_is(capsys):
    assert train.cli(["--help"]) == 0
    assert train.__doc__.splitlines()[0] in capsys.readouterr().out


def test_a_terminal_that_knows_ascii_alone_is_written_to(runs, tmp_path, monkeypatch):
    (tmp_path / "läufe").symlink_to(runs)
    ascii_only = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", ascii_only)
    assert train.cli(["--runs", str(tmp_path / "läufe"), "--device", "cpu", "--documents", "20", "--dry-run"]) == 0
    assert rb"l\xe4ufe" in ascii_only.buffer.getvalue()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("script", "number"), [("train.py", signal.SIGINT), ("train.py", signal.SIGTERM), ("bench.py", signal.SIGINT)]
)
def test_a_signal_while_modules_load_is_one_line(script, number, tmp_path):
    said = (tmp_path / "said").open("w+")
    process = subprocess.Popen([sys.executable, ROOT / script, "--help"], stdout=said, stderr=said, cwd=tmp_path)
    while "libtorch_cpu" not in Path(f"/proc/{process.pid}/maps").read_text() and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(number)
    assert process.wait(60) == 130
    said.seek(0)
    assert said.read().split("\n") == ["", "interrupted before anything began", ""]
