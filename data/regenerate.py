"""Conversations answered anew by a running server, so that a draft learns what its target says.

    data      user   assistant            tool   assistant   user   assistant
    asked     user   -> answer (a call)   tool   -> answer   user   -> answer       each behind the answers before it

Any OpenAI-compatible server renders and answers. A conversation ends early where its answer leaves the data: cut by
length, with calls of tools that the data has no results for, refused by the server.

Knows HTTP and JSON, never tokenizers.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from tqdm import tqdm

from data.conversations import SUFFIXES, find_files, records
from data.documents import Skipped
from data.files import append, naming, open_regular, opened_alone, read_json
from data.grammar import AS_SERVED
from data.records import CUT, arguments_of, parse, read_message, read_whole
from data.rendering import Skip
from data.server import Refused, address, ask_again, served_model

SENT = ("role", "content", "reasoning_content", "reasoning", "tool_calls", "tool_call_id", "name")  # of a message
ENDED = ("stop", "tool_calls", "function_call")  # finish_reasons of turns that the target ended itself
BROKEN = ("abort", "error")  # those of answers that are none
OTHER_CALLS = "calls of tools that the data has no results for"
HEAD = b'{"source": "'  # of every line that is written
REASONS = 20  # that are reported


class Asked(NamedTuple):
    turns: list[dict]  # messages
    asked: list[bool]  # of each, whether the server says it
    beside: dict  # tools and chat_template_kwargs


class Answered(NamedTuple):
    """What became of a conversation."""

    messages: list[dict]  # up to its last answer; empty: there is none
    ended: str | None  # why it has fewer turns than the data
    tokens: int


def regenerate(url: str, out, paths: list[Path], how, model=None, template_args: dict | None = None) -> list[str]:
    """Has the server at `url` answer all conversations of `paths` into `out`, a line each as they come; a report.

    how: `at_once` conversations, `timeout` seconds for an answer, `drop_cut`, and what `sampling` reads of it.
    A line names its source, so that a second call goes on; conversations without an answer are named with the reason
    in `out`.left-out, and not asked again while they stand there. ValueError: no server, one that fails for long, data
    that are not those of the lines in `out`, no answer at all.
    """
    url, out = address(url), Path(out)
    files, request = files_beside(paths, out), sampling(how, model)
    request |= {"model": served_model(url)}

    def say(body: dict) -> tuple[dict, bool, int]:
        return ask_again(f"{url}/v1/chat/completions", request | body, read_answer, how.timeout)

    out.parent.mkdir(parents=True, exist_ok=True)
    with opened_alone(out, named=out) as file:
        book = Book(file, out)
        total = book.check(files)
        todo = (record for record in records(files) if not book.has(*record[:2]))
        work = partial(ask_record, say, template_args or {}, how.drop_cut)
        with tqdm(total=total, initial=book.answered + book.left.total(), desc="answered") as bar:
            for answered in each_at_once(how.at_once, work, todo):
                book.add(*answered)
                bar.set_postfix_str(f"{book.speed():,.0f} tokens/s", refresh=False)
                bar.update()
    return book.report(total)


def ask_record(say: Callable, given: dict, drop_cut: bool, record: tuple) -> "tuple[str, str, Asked | None, Answered]":
    """Source, hash, what was asked (None: nothing that can be) and what became of it."""
    source, digest, text = record
    try:
        asked = read_asked(text, given)
        return source, digest, asked, converse(say, asked, drop_cut)
    except Skip as skip:
        return source, digest, None, Answered([], str(skip), 0)
    except ValueError as error:
        raise ValueError(f"{error} ({source}; what was answered is kept, the same command goes on)") from None


def sampling(how, model) -> dict:
    """What requests say of it: what is asked for, or what the directory `model`, where one is given, says; the rest is
    left to the server. ValueError: no such directory, a generation_config.json that cannot be."""
    own, path = {}, Path(model or "") / "generation_config.json"
    if model is not None and not path.parent.is_dir():
        raise ValueError(f"no target in {model}: it is no directory; give a local Hugging Face model directory")
    if model is not None and path.is_file():
        config = read_json(path, ())
        with naming(path, "copy the target's own"):
            own = {name: float(config[name]) for name in ("temperature", "top_p") if config.get(name) is not None}
    asked = {"temperature": how.temperature, "top_p": how.top_p, "max_tokens": how.max_new_tokens}
    return own | {name: x for name, x in asked.items() if x is not None}


def files_beside(paths: list[Path], out: Path) -> list[Path]:
    """The files of --data. ValueError: `out` is or will be one of them."""
    here = out.resolve()
    for path in map(Path, paths):
        inside = path.is_dir() and path.resolve() in here.parents and out.name.endswith(SUFFIXES)
        if inside or path.resolve() == here:
            raise ValueError(f"{out} would be read as part of --data {path}; name an OUT outside it")
    return find_files(paths)


def each_at_once(n: int, work: Callable, items: Iterable) -> Iterator:
    """work(item) of every item, as they come. Its threads are daemons: whoever stops does not wait for the requests in
    flight, as with a ThreadPoolExecutor."""
    results, lock, items, end = SimpleQueue(), threading.Lock(), iter(items), object()
    stopping = threading.Event()

    def run() -> None:
        try:
            while not stopping.is_set():
                with lock:
                    item = next(items, end)
                if item is end:
                    break
                results.put(work(item))
            results.put(end)
        except BaseException as error:  # for whoever waits for the results
            results.put(error)

    for _ in range(n):
        threading.Thread(target=run, daemon=True).start()
    try:
        while n:
            result = results.get()
            if isinstance(result, BaseException):
                raise result
            n -= result is end
            if result is not end:
                yield result
    finally:
        stopping.set()


# ----------------------------------------------------------------------------------------------------- one conversation


def read_asked(text: bytes, template_args: dict) -> Asked:
    """What is asked of a record: its assistant turns but those of weight 0, and an answer to what it ends in. Skip:
    nothing."""
    record = parse(text)
    if isinstance(record, dict) and {"input_ids", "loss_mask"} <= record.keys():
        raise Skip("token ids, which have no turns to ask for")
    arguments, chat = arguments_of(record, template_args), read_whole(record, AS_SERVED)
    turns = [sent(message) for message in chat.messages]
    asked = [n > 0 and m["role"] == "assistant" and chat.learned[n] for n, m in enumerate(turns)]
    if turns[-1]["role"] in ("user", "tool"):
        turns, asked = [*turns, {"role": "assistant", "content": ""}], [*asked, True]
    if not any(asked):
        raise Skip("no turn to ask for")
    beside = {"tools": [as_function(tool) for tool in chat.tools or ()], "chat_template_kwargs": arguments}
    try:
        json.dumps([turns, beside], ensure_ascii=False).encode()  # JSON can hold half a surrogate pair
    except (UnicodeEncodeError, RecursionError):
        raise Skip("text that is not Unicode, or nested without end") from None
    return Asked(turns, asked, {name: x for name, x in beside.items() if x})


def as_function(tool: dict) -> dict:
    return tool if "function" in tool else {"type": "function", "function": tool}


def read_answer(answer: dict) -> tuple[dict, bool, int]:
    """The message that a server answers, whether the target was cut short in it, and its tokens."""
    choice = answer["choices"][0]
    reason = choice.get("finish_reason") or "stop"
    if reason in BROKEN:
        raise ValueError(f"an answer that ends by {reason!r}")
    try:
        message = read_message({**choice["message"], "role": "assistant"}, AS_SERVED)
    except Skip as skip:
        raise TypeError(str(skip)) from None
    tokens = (answer.get("usage") or {}).get("completion_tokens")
    return sent(message), reason not in ENDED, tokens if isinstance(tokens, int) else 0


def converse(say: Callable, asked: Asked, drop_cut: bool) -> Answered:
    """say({"messages", ..}): the next one, whether it was cut, its tokens; Refused ends the conversation there."""
    messages, i, last, tokens, ended = [], 0, 0, 0, None
    while i < len(asked.turns):
        turn, i = asked.turns[i], i + 1
        if not asked.asked[i - 1]:
            messages.append(turn | {"weight": 0} if turn["role"] == "assistant" else turn)
            continue
        try:
            answer, is_cut, n = say({"messages": [sent(message) for message in messages], **asked.beside})
        except Refused as refused:
            ended = f"the server refuses it ({refused})"
            break
        tokens += n
        if is_cut and (reason := why_dropped(answer, asked, drop_cut)):
            ended = reason
            break
        messages.append(whole(answer) | {"finish_reason": CUT} if is_cut else answer)
        last = len(messages)
        results = list(takewhile(lambda turn: turn["role"] == "tool", asked.turns[i:]))
        fitted = results_for(answer, turn, results)
        if is_cut or fitted is None:
            ended = "cut by length" if is_cut else OTHER_CALLS if i < len(asked.turns) else None
            break
        messages, i = messages + fitted, i + len(results)
    return Answered(messages[:last], ended, tokens)


def sent(message: dict) -> dict:
    return {key: message[key] for key in SENT if message.get(key) is not None}


def whole(answer: dict) -> dict:
    """Without the half of a character that a cut may leave."""
    cut = {key: answer[key].rstrip("\ufffd") for key in ("content", "reasoning_content", "reasoning") if key in answer}
    return answer | cut


def why_dropped(answer: dict, asked: Asked, drop_cut: bool) -> str | None:
    """Of an answer that was cut, why it is not kept."""
    if drop_cut:
        return "cut by length and dropped"
    if "tools" in asked.beside:  # what a server makes of half a call is not what the target said
        return "cut by length, where it may have been calling a tool"
    return None if any(map(str.strip, (answer["content"], answer.get("reasoning_content", "")))) else "cut to nothing"


def results_for(answer: dict, turn: dict, results: list[dict]) -> list[dict] | None:
    """The data's results of tools under the ids of the calls that `answer` makes. None: they are not results of its
    calls, by the names that the data's own `turn` called."""
    given, left, fitted = turn.get("tool_calls", []), list(answer.get("tool_calls", [])), []
    names = {str(call["id"]): call["function"]["name"] for call in given if "id" in call}
    for n, result in enumerate(results):
        at = given[n]["function"]["name"] if n < len(given) else None
        name = names.get(str(result.get("tool_call_id"))) or result.get("name") or at
        k = next((k for k, call in enumerate(left) if call["function"]["name"] == name), None)
        if k is None:
            return None
        call = left.pop(k)
        fitted.append(result | {"tool_call_id": call["id"]} if "id" in call else result)
    return None if left else fitted


# ------------------------------------------------------------------------------------------------------ what is written


class Book:
    """The lines of OUT, and of OUT.left-out, which names the conversations that have no answer."""

    def __init__(self, file, out: Path):
        self.file, self.out, self.beside = file, out, out.with_name(f"{out.name}.left-out")
        self.known, self.left_out = read_lines(out), read_lines(self.beside)  # by source
        self.answered, self.tokens, self.begin = len(self.known), 0, time.monotonic()
        self.left, self.ended, self.is_left = Skipped(), Skipped(), False
        for source, (_, ended) in self.known.items():
            self.count_ended(ended, source)

    def check(self, files: list[Path]) -> int:
        """How many conversations there are. ValueError: some that are answered are not there any more."""
        total, there = 0, 0
        for source, digest, _ in records(files):
            total += 1
            if source in self.known:
                self.check_same(source, self.known[source][0] == digest)
                there += 1
            elif (found := self.left_out.get(source)) and found[0] == digest:
                self.left.add(found[1], [source])
                self.is_left = True
        if there < len(self.known):
            seen = {source for source, _, _ in records(files)}
            self.check_same(next(source for source in self.known if source not in seen), False)
        return total

    def check_same(self, source: str, is_same: bool) -> None:
        if not is_same:
            raise ValueError(
                f"{self.out} answers {source}, which is not there any more, or not as it was (is --data spelled as it "
                "was?); name another OUT, or remove the lines whose data changed"
            )

    def has(self, source: str, digest: str) -> bool:
        return source in self.known or self.left_out.get(source, ("",))[0] == digest

    def add(self, source: str, digest: str, asked: Asked | None, answered: Answered) -> None:
        line, self.tokens = {"source": source, "sha256": digest}, self.tokens + answered.tokens
        if not answered.messages:
            self.left.add(answered.ended, [source])
            if asked is not None:  # what could not be read costs nothing to read again
                self.is_left = True
                with self.beside.open("ab", buffering=0) as file:
                    append(file, line | {"ended": answered.ended})
            return
        line["messages"] = [{key: x for key, x in m.items() if key != "reasoning"} for m in answered.messages]
        append(self.file, line | asked.beside | ({"ended": answered.ended} if answered.ended else {}))
        self.answered += 1
        self.count_ended(answered.ended, source)

    def count_ended(self, reason: str | None, source: str) -> None:
        if reason is not None:
            self.ended.add(reason, [source])

    def report(self, total: int) -> list[str]:
        """For people. ValueError: nothing is answered."""
        again = f"; remove {self.beside} to ask for these again" if self.is_left else ""
        reasons = [*self.left.lines("left out"), *self.ended.lines("ended early")]
        if not self.answered:
            raise ValueError(f"none of {total:,} conversations was answered:{';'.join(reasons[:8])}{again}")
        first = (
            f"{self.answered:,} of {total:,} conversations answered, now {self.tokens:,} tokens, {self.speed():,.0f}/s"
        )
        return [first + again, *reasons[:REASONS]]

    def speed(self) -> float:
        """Tokens a second."""
        return self.tokens / max(time.monotonic() - self.begin, 1e-9)


def read_lines(path: Path) -> dict[str, tuple[str, str | None]]:
    """Hash, and why it ended early, of every source in OUT or OUT.left-out; a torn last line is cut away. ValueError:
    the file is another."""
    found, end = {}, 0
    if not path.exists():
        return found
    with naming(path, "name another OUT"), open_regular(path) as file:
        for line in file:
            if not line.startswith(HEAD[: len(line)]):
                raise ValueError("it holds lines that are no answers by --regenerate")
            if line.endswith(b"\n"):
                row, end = json.loads(line), end + len(line)
                found[row["source"]] = row["sha256"], row.get("ended")
    os.truncate(path, end)
    return found
