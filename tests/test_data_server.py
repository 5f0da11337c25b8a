"""Claims about asking a server that fails for a while: how often, with which pauses, and what is said in the end."""

import io
import time
from email.utils import formatdate

import pytest

from data import server


def failed(status, text=b"", **headers):
    """What urllib raises for an answer that is an error."""
    return server.urllib.error.HTTPError("http://s", status, "Busy", headers, io.BytesIO(text))


def test_pauses_grow_and_are_at_least_what_the_server_asks_for(monkeypatch):
    later = {"Retry-After": "Wed, 21 Oct 2065 07:28:00 GMT"}
    soon = {"Retry-After": formatdate(time.time() + 30, usegmt=True)}
    failures = [TimeoutError(), failed(429, **{"Retry-After": "7.5"}), failed(503, **soon), failed(500, **later)]
    failures += [failed(500, **{"Retry-After": "never"}), ConnectionResetError(), OSError("gone")]
    pauses, left = [], [*failures]

    def exchange(url, body, timeout):
        if left:
            raise left.pop(0)
        return {"a": 1}

    monkeypatch.setattr(server, "exchange", exchange)
    wait = lambda seconds: pauses.append(seconds)  # noqa: E731
    assert server.insist("u", {}, lambda answer: answer["a"], 1, wait) == 1
    assert pauses[:2] == [1, 7.5] and 28 < pauses[2] < 31 and pauses[3:] == [server.PAUSE, 16, 32, 60]
    left[:] = [*failures, OSError("gone at last")]
    with pytest.raises(ValueError, match="u failed 8 times, at last by OSError: gone at last"):
        server.insist("u", {}, lambda answer: answer, 1, wait)
    left[:], pauses[:] = [OSError("gone")] * 9, []
    with pytest.raises(ValueError, match="failed"):
        server.insist("u", {}, lambda answer: answer, 1, lambda seconds: pauses.append(1) or True)  # was stopped
    assert len(pauses) == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"error": {"message": "too\\nlong"}}', "HTTP 400: too long"),
        (b'{"object": "error", "message": "too long"}', "HTTP 400: too long"),
        (b'{"error": "too long"}', "HTTP 400: too long"),
        (b'{"detail": [1]}', 'HTTP 400: {"detail": [1]}'),
        (b"<html>", "HTTP 400: <html>"),
        (b"[1]", "HTTP 400: [1]"),
        (b"\xff" * 500, "HTTP 400: " + "\ufffd" * 190),
        (b"", "HTTP 400: Busy"),
    ],
)
def test_what_a_server_says_of_an_error_is_one_short_line(text, said):
    assert server.reason_of(failed(400, text)) == said
