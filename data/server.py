"""Asking a running inference server over HTTP; what is wrong with its answer is one line that names the address."""

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from email.utils import parsedate_to_datetime

ANSWER = 64 << 20  # bytes of an answer that are read
TRIES = 8  # of one request, with pauses of 1, 2, 4, .. 60 s: two minutes
PAUSE = 600.0  # seconds of the longest one that a server may ask for
PASSING = {408, 409, 425, 429}  # statuses that time may change, as all from 500 on
REFUSED = {400, 413, 422}  # statuses that are about the request alone
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
    with answering(url):
        return exchange(url, body)


def exchange(url: str, body: dict | None = None, timeout: float = 600) -> dict:
    """One request, and what it is answered; whatever is WRONG raises as it is."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        text = answer.read(ANSWER + 1)
    if len(text) > ANSWER:
        raise ValueError(f"an answer of more than {ANSWER:,} bytes")
    if not isinstance(said := json.loads(text), dict):
        raise TypeError(f"the answer is a {type(said).__name__}")
    return said


class Refused(ValueError):
    """What a server says about a request that it will never take."""


def insist(url: str, body: dict, read: Callable, timeout: float, wait: Callable[[float], bool]):
    """read(answer), of a request that is made again while time may help: after 429 and 5xx, a stall, a cut connection,
    an answer that is WRONG or that `read` finds so. wait(seconds): the pause between; true ends it.

    Refused: the request itself is. ValueError: the server takes none, or TRIES failed; it says what came last.
    """
    said = ""
    for n in range(TRIES):
        pause = min(2.0**n, 60)
        try:
            return read(exchange(url, body, timeout))
        except urllib.error.HTTPError as error:
            said = reason_of(error)
            if error.code in REFUSED:
                raise Refused(said) from None
            if error.code not in PASSING and error.code < 500:
                raise ValueError(f"{url} answers {said}; is the address right?") from None
            pause = max(pause, asked_pause(error.headers.get("Retry-After")))
        except WRONG as error:
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        if n + 1 < TRIES and wait(pause):
            break
    raise ValueError(f"{url} failed {TRIES} times, at last by {said}")


def reason_of(error: urllib.error.HTTPError) -> str:
    """Status and words of an answer that is an error, as servers of several kinds put it."""
    text = ""
    with suppress(*WRONG):
        text = error.read(1 << 16).decode(errors="replace")
        answer = json.loads(text)
        inner = answer.get("error", answer)
        text = str(inner.get("message", text) if isinstance(inner, dict) else inner)
    return " ".join(f"HTTP {error.code}: {text or error.reason}".split())[:200]


def asked_pause(value: str | None) -> float:
    """Seconds that a Retry-After header asks for, as a number or a date; 0 without one."""
    with suppress(ValueError, TypeError, OverflowError):
        return min(max(float(value), 0.0), PAUSE)
    with suppress(ValueError, TypeError, OverflowError):
        return min(max(parsedate_to_datetime(value).timestamp() - time.time(), 0.0), PAUSE)
    return 0.0


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Whatever is wrong with a server's answer is a ValueError that names the address, in one line."""
    try:
        yield
    except WRONG as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ValueError(
            f"{url} does not answer as vLLM does ({reason}); is the server up, does it fit the text?"
        ) from error
