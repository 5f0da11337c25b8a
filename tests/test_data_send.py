"""Claims about sending documents to a server: whatever it answers, and whatever fails, is one line."""

import fcntl
import io
import resource

import pytest

from data import send, server

# -------------------------------------------------------------------------------------------------------- failing disks


@pytest.mark.parametrize("name", ["index.jsonl", "sent"])
def test_a_full_disk_while_sending_is_one_line_that_names_the_file(tmp_path, documents, name, monkeypatch, capsys):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for module in (send, server):
        monkeypatch.setattr(module, "ask", lambda url, body=None: {"data": [{"id": "m"}]})
    if name == "sent":
        send.send("http://localhost", tmp_path, documents[:1])
        (tmp_path / "sent").unlink()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        with pytest.raises(OSError, match=name):
            send.send("http://localhost", tmp_path, documents[:1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    send.send("http://localhost", tmp_path, documents[:1])
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
    monkeypatch.setattr(server, "ANSWER", 150_000)
    said = {"/v1/models": models, "/v1/completions": completions}
    monkeypatch.setattr(
        server.urllib.request, "urlopen", lambda request, timeout: Answer(said[request.full_url.partition("host")[2]])
    )
    with pytest.raises(ValueError, match="http://host/v1/.* does not answer as vLLM does") as stopped:
        send.send("http://host", tmp_path / "out", documents)
    assert "\n" not in str(stopped.value) and len(str(stopped.value)) < 500
    assert not (tmp_path / "out/STOP").exists()


@pytest.mark.parametrize(
    "url", ["", "foo", "localhost:8000", "file:///etc", "http://", "http://a:b", "http://[", "ftp://a"]
)
def test_what_is_no_address_is_one_line(tmp_path, documents, url):
    with pytest.raises(ValueError, match="is no address of a running server; one as in .* is wanted"):
        send.send(url, tmp_path / "out", documents)
    for broken in ("http://a b", "http://a\nb", f"http://{'a' * 300}", "http://localhost:99999"):
        with pytest.raises(ValueError, match="does not answer as vLLM|is wanted") as stopped:
            send.send(broken, tmp_path / "out", documents)
        assert "\n" not in str(stopped.value)
    with pytest.raises(ValueError, match="a name or a password in it is not kept") as stopped:
        send.send("http://user:secret@localhost:8000", tmp_path / "out", documents)
    assert "secret" not in str(stopped.value) and server.address("https://host:1/v1/") == "https://host:1"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", [b"many\n", b"-1\n", b"9\n", b"\xff\n", b"1.5\n"])
def test_a_count_of_sent_documents_that_cannot_be_is_named(tmp_path, documents, text, monkeypatch):
    for module in (send, server):
        monkeypatch.setattr(module, "ask", lambda url, body=None: {"data": [{"id": "m"}]})
    (tmp_path / "sent").write_bytes(text)
    with pytest.raises(ValueError, match="sent cannot be used"):
        send.send("http://localhost", tmp_path, documents)
    (tmp_path / "sent").write_bytes(b"3\n5\n1")  # torn: the line before it counts
    send.send("http://localhost", tmp_path, documents)
    assert (tmp_path / "STOP").exists()
    with (tmp_path / "sent").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process writes into"):
            send.send("http://localhost", tmp_path, documents)
