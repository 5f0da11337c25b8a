"""Claims about files: read whatever their kind, in bounded memory, or refused by name; written whole or absent."""

import gzip
import json
import os
import random
import socket
import tracemalloc

import pytest

from data import conversations, files
from data.conversations import read_conversations
from tests.helpers import GOOD, TEMPLATES, chat_tokenizer, turns, write_lines

# --------------------------------------------------------------------------------------------- conversations from files


def test_files_of_every_kind_and_folders_in_order(tmp_path):
    tokenizer, folder = chat_tokenizer(TEMPLATES["V3"]), tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.json").write_text(json.dumps([{"messages": turns("Q", str(i))} for i in range(2)], indent=1))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"messages": turns("Q", "2")}).encode()))
    (folder / "c.json").write_text("\n".join(json.dumps({"messages": turns("Q", str(i))}) for i in (3, 4)))
    write_lines(folder / "sub" / "d.jsonl", {"messages": turns("Q", "5")})
    (folder / "notes.txt").write_text("no")
    last = write_lines(tmp_path / "last.jsonl", {"messages": turns("Q", "6")})
    documents, report = read_conversations([folder, last], tokenizer, 64, progress=False)
    assert [bytes(d.tokens[d.loss_mask][:-1].tolist()).decode() for d in documents] == list(
        "0123456"
    ) and report.read == 7
    (tmp_path / "empty").mkdir()
    for path, message in ((tmp_path / "empty", "holds no"), (tmp_path / "absent.jsonl", "does not exist")):
        with pytest.raises(ValueError, match=message):
            read_conversations([last, path], tokenizer, 64, progress=False)
    (folder / "b.jsonl.gz").write_bytes((folder / "b.jsonl.gz").read_bytes()[:-9])
    with pytest.raises(ValueError, match="b.jsonl.gz cannot be read"):
        read_conversations([folder], tokenizer, 64, progress=False)
    with pytest.raises(ValueError, match="reasoning is 'drop'"):
        read_conversations([last], tokenizer, 64, reasoning="drop")


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json"])
def test_what_never_ends_or_is_no_file_is_refused_by_name(tmp_path, suffix, monkeypatch):
    tokenizer, path = chat_tokenizer(TEMPLATES["V3"]), tmp_path / f"x.{suffix}"
    os.mkfifo(path)
    for given in (path, tmp_path):  # named, or met in a folder
        with pytest.raises(ValueError, match=rf"--data .*x\.{suffix} is a FIFO"):
            read_conversations([given], tokenizer, 64, progress=False)
    path.unlink()
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(tmp_path)  # a socket's path has little room
        server.bind(path.name)
        with pytest.raises(ValueError, match="is a socket"):
            read_conversations([path], tokenizer, 64, progress=False)
    with pytest.raises(ValueError, match="--data /dev/zero is a device"):
        read_conversations(["/dev/zero"], tokenizer, 64, progress=False)


def test_a_gz_of_any_size_takes_bounded_memory(tmp_path, monkeypatch):
    """32 MB of newlines between two conversations, and pieces of a MB."""
    good, path = json.dumps(GOOD).encode() + b"\n", tmp_path / "x.jsonl.gz"
    monkeypatch.setattr(conversations, "PIECE", 1 << 20)
    with gzip.open(path, "wb", compresslevel=1) as file:
        for blob in (good, *[b"\n" * (1 << 22)] * 8, good):
            file.write(blob)
    tracemalloc.start()
    documents, report = read_conversations([path], chat_tokenizer(TEMPLATES["V3"]), 64, progress=False)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.read == report.used == 2 and peak < 25e6
    assert [documents[i].source for i in (0, 1)] == [f"{path}:1", f"{path}:{2 + (8 << 22)}"]


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json"])
def test_a_line_without_end_is_refused(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(conversations, "PIECE", 1000)
    monkeypatch.setattr(conversations, "LINE", 5000)
    blob, path = json.dumps(GOOD).encode() + b"\n" + b"x" * 50_000, tmp_path / f"x.{suffix}"
    path.write_bytes(gzip.compress(blob) if suffix.endswith("gz") else blob)
    with pytest.raises(ValueError, match=rf"--data .*x\.{suffix} has a line of more than"):
        read_conversations([path], chat_tokenizer(TEMPLATES["V3"]), 64, progress=False)


def test_marks_of_byte_order(tmp_path):
    tokenizer, path = chat_tokenizer(TEMPLATES["V3"]), tmp_path / "x.json"
    for text in (json.dumps(GOOD) + "\n" + json.dumps(GOOD), json.dumps([GOOD, GOOD])):
        path.write_text(text, encoding="utf-8-sig")
        assert read_conversations([path], tokenizer, 64, progress=False)[1].used == 2
        path.write_text(text, encoding="utf-16")
        with pytest.raises(ValueError, match="x.json is UTF-16"):
            read_conversations([path], tokenizer, 64, progress=False)


@pytest.mark.parametrize("suffix", ["jsonl", "json"])
def test_random_bytes_are_counted_not_fatal(tmp_path, suffix):
    rng = random.Random(1)
    good = json.dumps(GOOD).encode()
    for size in (0, 1, 7, 4096):
        path = tmp_path / f"{size}.{suffix}"
        path.write_bytes(rng.randbytes(size) + b"\n" + good + b"\r\n" + b"[" * (size % 2) + rng.randbytes(size))
        documents, report = read_conversations([path], chat_tokenizer(TEMPLATES["V3"]), 64, progress=False)
        assert len(documents) == 1 and report.read == 1 + report.skipped.total()
        path.write_bytes(b"[" + rng.randbytes(size))
        with pytest.raises(ValueError, match="none of"):
            read_conversations([path], chat_tokenizer(TEMPLATES["V3"]), 64, progress=False)


# ----------------------------------------------------------------------------------- whole or absent, and nobody else's


def test_writing_is_whole_or_absent(tmp_path):
    (tmp_path / "foo.part").write_text("the user's")
    halves = []

    def write(text):
        return lambda half: halves.append(half) or half.write_text(text)

    def broken(error):
        def write(half):
            half.mkdir()
            (half / "weights").write_text("some")
            raise error

        return write

    files.replace_with(tmp_path / "foo", write("one"))
    files.replace_with(tmp_path / "foo", write("two"))
    assert (tmp_path / "foo").read_text() == "two" and halves[0] != halves[1] and all(map(files.is_part, halves))
    for error in (OSError(28, "No space left on device"), RuntimeError("file write failed\n at 3")):
        with pytest.raises(OSError, match="bar cannot be written .*(No space left|file write failed at 3)"):
            files.replace_with(tmp_path / "bar", broken(error))
    for error in (KeyboardInterrupt(), TypeError("ours")):
        with pytest.raises(type(error)):
            files.replace_with(tmp_path / "bar", broken(error))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["foo", "foo.part"]
    for name in ("foo.part", ".foo.part", "step-00000001.part", ".foo-1-2.part", "foo-1-0123abcd.part"):
        assert not files.is_part(tmp_path / name)


def test_json_has_no_numbers_that_are_none():
    x = {"a": float("nan"), "b": [1.5, float("-inf"), (float("inf"), 2)], "c": {"d": True, "e": None}}
    assert json.loads(files.to_json(x)) == {"a": None, "b": [1.5, None, [None, 2]], "c": {"d": True, "e": None}}
