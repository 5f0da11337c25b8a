"""Asking a running inference server over HTTP; what is wrong with its answer is one line that names the address."""

import http.client
import json
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWER = 64 << 20  # bytes of an answer that are read
AT_ONCE = 64  # requests in flight
WAITS = (0.5, 1, 2, 4)  # seconds before a request is made again
REFUSALS = (400, 413, 422)  # of HTTP: the request is no good, whenever it is made
WRONG = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, http.client.HTTPException)


def served_model(url: str) -> str:
    check_url(url)
    answer = ask(place := f"{url}/v1/models")
    with answering(place):
        if not isinstance(name := answer["data"][0]["id"], str):
            raise TypeError(f"the model's id is {name!r}")
        return name


def check_url(url: str) -> None:
    with suppress(ValueError):  # of a port or an address that cannot be
        parts = urllib.parse.urlsplit(url)
        written = url.isprintable() and " " not in url
        if written and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return
    raise ValueError(f"{url!r} is no address of a running server; one as in http://localhost:8000 is wanted")


def ask(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    with answering(url):
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            text = answer.read(ANSWER + 1)
        if len(text) > ANSWER:
            raise ValueError(f"an answer of more than {ANSWER:,} bytes")
        if not isinstance(said := json.loads(text), dict):
            raise TypeError(f"the answer is a {type(said).__name__}")
        return said


class Away(ValueError):
    """There is no server, or it cut the connection."""


class Refused(Exception):
    """A server says that a request is no good."""


def ask_again(url: str, body: dict) -> dict:
    """`ask`, for seconds on while the server fails or is away."""
    for wait in (*WAITS, None):
        try:
            return ask(url, body)
        except ValueError as error:
            status = getattr(error.__cause__, "code", 0)
            if status in REFUSALS:
                raise Refused(message_of(error.__cause__)) from None
            if wait is None or not (isinstance(error, Away) or status == 429 or status >= 500):
                raise
            time.sleep(wait)


def message_of(error: urllib.error.HTTPError) -> str:
    """What the server says of a refusal, without what it quotes: that is another one's in every conversation."""
    text = error
    with suppress(*WRONG):
        text = error.read(1 << 16).decode(errors="replace")
        text = json.loads(text)["error"]["message"]
    text = " ".join(str(text).split())
    return (re.split("[`{]", text)[0].strip() or text)[:100].encode(errors="replace").decode()


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Whatever is wrong with a server's answer is a ValueError that names the address, in one line."""
    try:
        yield
    except WRONG as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        gone = isinstance(error, OSError | http.client.HTTPException) and not hasattr(error, "code")
        raise (Away if gone else ValueError)(
            f"{url} does not answer as vLLM does ({reason}); is the server up, does it fit the text?"
        ) from error
