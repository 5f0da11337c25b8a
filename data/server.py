"""Asking a running inference server over HTTP; what is wrong with its answer is one line that names the address."""

import http.client
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime

ANSWER = 64 << 20  # bytes of an answer, or of an event of one, that are read
AT_ONCE = 64  # requests in flight
TIMEOUT = 600.0  # seconds without a byte of an answer, where nothing else is asked for
WAITS = (1, 2, 4, 8, 16, 32, 60)  # seconds before a request is made again
LONGEST = 600.0  # of them, where a server asks for more
REFUSALS = (400, 413, 422)  # of HTTP: the request is no good, whenever it is made
PASSING = (408, 409, 425, 429)  # and all from 500 on: another time it may be answered
WRONG = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, EOFError)
WRONG += (http.client.HTTPException,)


def served_model(url: str) -> str:
    answer = ask(place := f"{url}/v1/models")
    with answering(place):
        if not isinstance(name := answer["data"][0]["id"], str):
            raise TypeError(f"the model's id is {name!r}")
        return name


def address(url: str) -> str:
    """That of a server, without the slash or the /v1 that it may be given with. ValueError: it is none, or holds a
    password, which would stand in logs and settings."""
    wanted = "one as in http://localhost:8000 is wanted"
    if "@" in url:
        raise ValueError(f"an address with a name or a password in it is not kept; {wanted}, a key in $OPENAI_API_KEY")
    with suppress(ValueError):  # of a port or an address that cannot be
        parts = urllib.parse.urlsplit(url)
        written = url.isprintable() and " " not in url
        if written and parts.scheme in ("http", "https") and parts.hostname and parts.port != 0:
            return url.rstrip("/").removesuffix("/v1")
    raise ValueError(f"{url!r} is no address of a running server; {wanted}")


def ask(url: str, body: dict | None = None, timeout: float | None = None) -> dict:
    with answering(url):
        if not isinstance(said := json.loads(fetch(url, body, timeout)), dict):
            raise TypeError(f"the answer is a {type(said).__name__}")
        return said


def fetch(url: str, body: dict | None = None, timeout: float | None = None) -> bytes:
    with opened(url, body, timeout) as answer:
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


def opened(url: str, body: dict | None, timeout: float | None = None):
    """The answer, to be read and closed. timeout: seconds without a byte of it. A server that wants a key gets
    $OPENAI_API_KEY. Status: the answer is an error."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if key := os.environ.get("OPENAI_API_KEY", "").strip():
        if not (key.isascii() and key.isprintable()):  # http.client would show it in its complaint
            raise ValueError("$OPENAI_API_KEY holds characters that no key has; set it anew")
        request.add_unredirected_header("Authorization", f"Bearer {key}")  # for this server alone
    try:
        return urllib.request.urlopen(request, timeout=timeout or TIMEOUT)
    except urllib.error.HTTPError as error:
        raise Status(error) from None


class Status(OSError):
    """An answer that is an error: its code, its words as servers of several kinds put them, its Retry-After."""

    def __init__(self, error: urllib.error.HTTPError):
        self.code, self.later, words = error.code, error.headers.get("Retry-After"), ""
        with suppress(*WRONG):
            words = error.read(1 << 16).decode(errors="replace")
            answer = json.loads(words)
            inner = answer.get("error", answer)
            words = str(inner["message"] if isinstance(inner, dict) else inner)
        self.words = " ".join((words or error.reason).split())
        super().__init__(f"{self.code}, {self.words}")


class Away(ValueError):
    """There is no server, or it cut the connection."""


class Refused(Exception):
    """A server says that a request is no good."""


def ask_again(url: str, body: dict, read: Callable = lambda answer: answer, timeout: float | None = None):
    """read(`ask`), again for two minutes while the server fails, is busy or away, or says what `read` finds WRONG.

    Refused: it will never take this request. ValueError: it answers none, or none of so many tries.
    """
    for wait in (*WAITS, None):
        try:
            answer = ask(url, body, timeout)
            with answering(url):
                return read(answer)
        except ValueError as error:
            status = error.__cause__ if isinstance(error.__cause__, Status) else None
            if status and status.code in REFUSALS:
                raise Refused(reason_of(status)) from None
            if wait is None or status and status.code not in PASSING and status.code < 500:
                raise
            time.sleep(max(wait, asked_wait(status and status.later)))


def asked_wait(value: str | None) -> float:
    """Seconds that a Retry-After asks for, as a number or a date; 0 without one."""
    for read in (float, lambda text: parsedate_to_datetime(text).timestamp() - time.time()):
        with suppress(*WRONG):
            return min(max(0.0, read(value)), LONGEST)  # 0 for a NaN
    return 0.0


def reason_of(status: Status) -> str:
    """What the server says of a refusal, without what it quotes and counts: those are others in every conversation."""
    text = re.sub(r"\d+", "N", status.words)
    return (re.split("[`{]", text)[0].strip() or text)[:100].encode(errors="replace").decode()


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Whatever is wrong with a server's answer is a ValueError that names the address, in one line."""
    try:
        yield
    except WRONG as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        gone = isinstance(error, OSError | http.client.HTTPException) and not isinstance(error, Status)
        raise (Away if gone else ValueError)(
            f"{url} does not answer as vLLM does ({reason}); is the server up, does it fit the text?"
        ) from error
