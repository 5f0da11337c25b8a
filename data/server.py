"""Asking a running inference server over HTTP; what is wrong with its answer is one line that names the address."""

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ANSWER = 64 << 20  # bytes of an answer, or of an event of one, that are read
TIMEOUT = 600  # seconds without a byte
WRONG = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, EOFError)
WRONG += (http.client.HTTPException,)


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
    with answering(url):
        if not isinstance(said := json.loads(fetch(url, body)), dict):
            raise TypeError(f"the answer is a {type(said).__name__}")
        return said


def fetch(url: str, body: dict | None = None) -> bytes:
    with opened(url, body) as answer:
        text = answer.read(ANSWER + 1)
    if len(text) > ANSWER:
        raise ValueError(f"an answer of more than {ANSWER:,} bytes")
    return text


def stream(url: str, body: dict) -> Iterator[dict]:
    """The events of an answer that is streamed, each as it comes."""
    with answering(url):
        with opened(url, body) as answer:
            while line := answer.readline(ANSWER):
                name, _, text = line.partition(b":")
                if name == b"data" and text.strip() == b"[DONE]":
                    return
                if name == b"data":
                    yield json.loads(text)
        raise EOFError("the stream broke off")


def opened(url: str, body: dict | None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=TIMEOUT)


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Whatever is wrong with a server's answer is a ValueError that names the address, in one line."""
    try:
        yield
    except WRONG as error:
        said = error.read(ANSWER).decode(errors="replace") if isinstance(error, urllib.error.HTTPError) else ""
        reason = " ".join(f"{type(error).__name__}: {error} {said}".split())[:200]
        raise ValueError(
            f"{url} does not answer as vLLM does ({reason}); is the server up, does it fit the text?"
        ) from error
