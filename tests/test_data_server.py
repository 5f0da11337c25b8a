"""Claims about asking a server that fails for a while: how often, with which pauses, and what is said in the end."""

import io
import json
import time
from email.utils import formatdate

import pytest

from data import server


def failed(status, text=b"", later=None):
    """What urllib raises for an answer that is an error."""
    headers = {} if later is None else {"Retry-After": later}
    return server.urllib.error.HTTPError("http://s", status, "Busy", headers, io.BytesIO(text))


@pytest.fixture
def ask(monkeypatch):
    """ask(failures, ..): how often a server that fails so is asked, with which pauses, and what came of it."""

    def make(*failures, read=lambda answer: answer["a"]):
        left, pauses = [*failures], []

        def urlopen(request, timeout):
            if left and isinstance(left[0], Exception):
                raise left.pop(0)
            return io.BytesIO(left.pop(0) if left else json.dumps({"a": 1}).encode())

        monkeypatch.setattr(server.urllib.request, "urlopen", urlopen)
        monkeypatch.setattr(server.time, "sleep", pauses.append)
        try:
            return pauses, server.ask_again("http://s/v1", {}, read)
        except (ValueError, server.Refused) as error:
            return pauses, error

    return make


def test_pauses_grow_and_are_at_least_what_the_server_asks_for(ask):
    soon, late = formatdate(time.time() + 30, usegmt=True), "Wed, 21 Oct 2065 07:28:00 GMT"
    failures = [TimeoutError(), failed(429, later="7.5"), failed(503, later=soon), failed(500, later=late)]
    failures += [failed(500, later="never"), ConnectionResetError(), b"<html>"]
    pauses, answer = ask(*failures)
    assert answer == 1 and pauses[:2] == [1, 7.5] and 28 < pauses[2] < 31
    assert pauses[3:] == [server.LONGEST, 16, 32, 60]
    pauses, error = ask(*failures, failed(500, b"gone at last"))
    assert len(pauses) == 7 and type(error) is ValueError and "(Status: 500, gone at last)" in str(error)
    pauses, error = ask(*failures, OSError("gone"))
    assert type(error) is server.Away
    for later in ("nan", "-5", "inf", "", "soon"):
        assert ask(failed(429, later=later))[0] == [server.LONGEST if later == "inf" else 1]


def test_what_reading_finds_wrong_is_asked_again_and_other_statuses_are_not(ask):
    answers = [b"{}", b'{"a": 3}', b"[1]", b'{"a": 2}']
    pauses, answer = ask(*answers, read=lambda answer: [4, 5][answer["a"] - 1])
    assert answer == 5 and pauses == [1, 2, 4]
    for status in (301, 401, 403, 404, 405):
        pauses, error = ask(failed(status))
        assert pauses == [] and f"Status: {status}, Busy" in str(error)
    for status in (400, 413, 422):
        pauses, error = ask(failed(status, b"at least 17 `tokens`"))
        assert pauses == [] and isinstance(error, server.Refused) and str(error) == "at least N"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "too long"),
        (b'{"object": "error", "message": "too long"}', "too long"),
        (b'{"error": "too long"}', "too long"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"<html>", "<html>"),
        (b"[1]", "[1]"),
        (b"\xff" * 500, "\ufffd" * 500),
        (b"", "Busy"),
    ],
)
def test_what_a_server_says_of_an_error_is_one_line(text, said):
    assert server.Status(failed(400, text)).words == said


@pytest.mark.parametrize("key", ["sk-1", None])
def test_a_key_goes_to_the_server_that_was_named_alone(monkeypatch, key):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    if key:
        monkeypatch.setenv("OPENAI_API_KEY", key)
    seen = []

    def urlopen(request, timeout):
        seen.append(request)
        return io.BytesIO(b"{}")

    monkeypatch.setattr(server.urllib.request, "urlopen", urlopen)
    server.ask("http://s/v1", {})
    assert seen[0].get_header("Authorization") == (key and f"Bearer {key}") and "Authorization" not in seen[0].headers


def test_a_key_that_cannot_be_sent_is_not_shown(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-1\nsk-2")
    with pytest.raises(ValueError, match="OPENAI_API_KEY") as error:
        server.ask("http://127.0.0.1:9/v1", {})
    assert "sk-" not in str(error.value)
