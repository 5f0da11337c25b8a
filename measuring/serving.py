"""What a served draft saves, as its users see it: the "serve" suite of bench.py.

    python bench.py --suite serve http://localhost:8000                    what the engine accepts of held-out prompts
    python bench.py --suite serve http://localhost:8000 --against http://localhost:8001   the same target, no draft
    python bench.py --suite serve URL --data chats.jsonl --at-once 1 8 64 --temperature 1 --run runs/deepseek-v3

Prompts are questions of `--data` (chats up to their first user turn; `input_ids` up to what is learned), token ids of
`--prompts`, or held-out text of the built-in corpus, cut in its middle. Each is one streamed request for `--new-tokens`
tokens, past any end of turn (ignore_eos) unless `--may-end`. A cell is one concurrency and one sampling: requests that
warm up and do not count, then `--rounds` times all prompts at URL and, in turn with it, at `--against`. Each request
has its own cache_salt, or later rounds would find their prompts in the prefix cache.

Accept lengths come from the engine's own counters in /metrics, read before and after: 1 + accepted / drafts, pooled
over the cell. (vLLM counts drafted tokens past the end of a text too; the first token of a text needs no draft.)
tokens/s is all tokens over the time of a round, prompts included; ms/token is that of one request from its first event
to its last, over the tokens but one, and the median of requests; ms to first has that of prompt and queue. `faster` is
the median over the rounds of tokens/s over that of `--against`.

Needed of a server: the OpenAI API with streaming and usage, no objection to what vLLM knows besides (ignore_eos,
return_token_ids, cache_salt), and for accept lengths its counters `COUNTERS`; without those only speeds can be
compared. Token ids tell distinct bigrams; where the server gives none, words do.
"""

import json
import math
import re
import secrets
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from data.conversations import find_files, records
from data.corpus import python_documents
from data.documents import Skipped, listed
from data.files import naming, open_regular
from data.grammar import AS_SERVED
from data.records import arguments_of, parse, read_chat
from data.rendering import Skip
from data.server import Status, address, answering, fetch, served_model, stream
from measuring.decoding import read_prompts
from serving.decode import unique_bigrams
from training.settings import as_path

COUNTERS = {  # by what they are called here; what is accepted at a depth is called by its number
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
    "vllm:generation_tokens_total": "generated",
}
BY_DEPTH = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ANYTHING = r'"(?:[^"\\]|\\.)*"'  # the value of a label
SAMPLE = re.compile(rf"([a-zA-Z_:][\w:]*)\s*(?:\{{((?:[^\"}}]|{ANYTHING})*)\}})?\s*(\S+)(?:\s+-?[\d.]+)?(?:\s*#.*)?")
LAG = 10  # seconds that counters may stay behind the answers
WARM_UP = 16  # tokens


def add_flags(parser) -> None:
    group = parser.add_argument_group("the serve suite (with --prompts, --prompt-count, --new-tokens, --run, sampling)")
    group.add_argument("url", nargs="?", metavar="URL", help="the address of a server that drafts")
    group.add_argument("--against", metavar="URL2", help="one of the same target without a draft")
    group.add_argument("--data", nargs="+", type=as_path, help="conversations whose first questions are asked")
    group.add_argument("--at-once", nargs="+", type=int, default=[1, 4, 16], help="requests in flight, default 1 4 16")
    group.add_argument("--may-end", action="store_true", help="answers end where the target ends them")


def bounds(args) -> list[tuple[str, list, float, float]]:
    return [("at-once", args.at_once, 1, 4096)]


def complaint(args) -> str | None:
    """What is wrong with the flags of this suite."""
    if (args.suite == "serve") != (args.url is not None):
        return f"an address and --suite serve belong together: --suite serve {args.url or 'http://localhost:8000'}"
    if args.suite != "serve" and (args.against or args.data):
        return "--against and --data are for --suite serve"
    if args.data and args.prompts:
        return "--data and --prompts are both prompts; leave one out"


def suite(args, print_table: Callable) -> dict:
    """ValueError: flags that cannot be used, a server that cannot be measured."""
    prompts, training = load_prompts(args), read_training(args.run)
    if len(prompts) < max(args.at_once):
        raise ValueError(f"--at-once {max(args.at_once)}, but {len(prompts)} prompts; take less, or give more prompts")
    servers = open_servers(args)
    samplings = [(0.0, 1.0)] + [(args.temperature, args.top_p)] * (args.temperature > 0)
    rows, full = [], []
    for temperature, top_p in samplings:
        for at_once in args.at_once:
            cell = {"at_once": at_once, "temperature": temperature, "top_p": top_p, "new_tokens": args.new_tokens}
            turns = measure(args, servers, prompts, cell)
            rows.append(cell | compared(turns, temperature))
            texts = [[[said.tokens or said.text for said in turn.said] for turn in mine] for mine in turns]
            full.append(cell | {"seconds": [[turn.seconds for turn in mine] for mine in turns], "texts": texts})
    table = {head: form for head, form in TABLE.items() if args.against or head not in ("faster", "identical")}
    print_table(tuple(table), [tuple(form(row) for form in table.values()) for row in rows])
    for line in remarks(args, rows, training):
        print(line)
    names = {"url": args.url, "against": args.against, "model": servers[0].model, "prompts": len(prompts)}
    return {"suite": "serve", **names, "rows": rows, "training": training, "cells": full}


# ------------------------------------------------------------------------------------------------------------- prompts


def load_prompts(args) -> list[dict]:
    """What every request asks: {"messages"} (and tools) of a chat, or the {"prompt"} to be continued."""
    if args.data:
        return read_questions(args.data, args.prompt_count)
    if args.prompts:
        return [{"prompt": ids} for ids in read_prompts(args.prompts)]
    texts = ["".join(pair) for pair in python_documents(held_out=True)[: args.prompt_count]]
    return [{"prompt": re.sub(r"\s+\S*\Z", "", text[: len(text) // 2])} for text in texts]  # no word is cut


def read_questions(paths: list[Path], count: int) -> list[dict]:
    """Of the first so many conversations that can be asked. ValueError: there is none."""
    questions, skipped = [], Skipped()
    for place, _, text in records(find_files(paths)):
        try:
            questions.append(question(parse(text)))
        except Skip as skip:
            skipped.add(str(skip), [place])
        if len(questions) == count:
            break
    for line in skipped.lines():
        print(line)
    if not questions:
        raise ValueError(f"--data {' '.join(map(str, paths))} holds no conversation that can be asked")
    return questions


def question(record) -> dict:
    """A chat up to its first user turn, tokens up to those that are learned. Skip: it has no such thing."""
    if isinstance(record, dict) and {"input_ids", "loss_mask"} <= record.keys():
        try:
            ids, mask = listed(record["input_ids"], record["loss_mask"])
        except ValueError as error:
            raise Skip(str(error)) from None
        if not mask[1:].any():
            raise Skip("nothing supervised")
        return {"prompt": ids[: 1 + int(mask[1:].argmax())].tolist()}
    arguments, (chat, _) = arguments_of(record, {}), read_chat(record, AS_SERVED)
    roles = [message["role"] for message in chat.messages]
    end = roles.index("user") if "user" in roles else len(roles)
    if any(role != "system" for role in roles[:end]) or end == len(roles):
        raise Skip("it does not begin with a question")
    tools = {"tools": chat.tools, "tool_choice": "none"} if chat.tools else {}
    return {"messages": chat.messages[: end + 1]} | tools | ({"chat_template_kwargs": arguments} if arguments else {})


def read_training(run: Path | None) -> dict | None:
    """The accept lengths that a run reported at its end, and how long its chains were."""
    if run is None:
        return None
    with naming(run / "result.json", "name a run that has ended, as in --run runs/NAME"):
        with open_regular(run / "result.json") as file, open_regular(run / "settings.json") as settings:
            result, k = json.load(file), json.load(settings)["ttt_steps"]
        kinds = ("simulated", "walked", "decoded")
        return {"k": k} | {x: float(n) for x, n in result.items() if x.rpartition("_")[2] in kinds}


# ----------------------------------------------------------------------------------------------------------- a server


class Server(NamedTuple):
    url: str
    model: str


class Said(NamedTuple):
    """One answer."""

    tokens: list[int] | None  # None: the server gives no ids
    text: str
    count: int  # tokens
    to_first: float  # seconds from asking to the first event with text
    a_token: float | None  # seconds between tokens after that; None: all came at once


class Turn(NamedTuple):
    """All prompts once."""

    seconds: float
    said: list[Said]
    counts: Counter  # what the server's counters grew by; empty where it has none


def open_servers(args) -> list[Server]:
    """URL and --against. ValueError: they cannot be measured."""
    urls = [address(url) for url in (args.url, args.against) if url is not None]
    servers = [Server(url, served_model(url)) for url in urls]
    drafts = ["drafts" in totals(server) for server in servers]
    if not drafts[0]:
        lacks = f"{urls[0]}/metrics has no {next(iter(COUNTERS))}, vLLM's counter (of a server with a draft)"
        if not args.against:
            raise ValueError(f"{lacks}; what it accepts is not to be known, only its speed, with --against URL2")
        print(f"{lacks}: speeds alone are compared")
    if any(drafts[1:]):
        raise ValueError(f"--against {urls[1]} drafts as well; one of the same target without a draft is wanted")
    return servers


def totals(server: Server) -> Counter:
    """What its COUNTERS say, summed over engines; empty where it has none."""
    with answering(place := f"{server.url}/metrics"):
        try:
            text = fetch(place).decode()
        except Status as error:
            if error.code != 404:
                raise
            return Counter()  # a server without this page
        return read_counters(text)


def read_counters(text: str) -> Counter:
    """COUNTERS in Prometheus' text format, and those of BY_DEPTH by number. ValueError: they say what none can."""
    found = Counter()
    for line in text.split("\n"):
        match = SAMPLE.fullmatch(line.strip())
        name = match and match[1]
        if name not in COUNTERS and name != BY_DEPTH:
            continue
        value = float(match[3])
        if not (math.isfinite(value) and value >= 0 and value == int(value)):
            raise ValueError(f"{line.strip()[:100]} is no count")
        depth = re.search(r'(?:^|,)\s*position\s*=\s*"(\d+)"', match[2] or "")
        if name == BY_DEPTH and not depth:
            raise ValueError(f"{line.strip()[:100]} has no position")
        found[COUNTERS.get(name) or int(depth[1])] += int(value)
    return found


def take_turn(server: Server, prompts: list[dict], at_once: int, asked: dict, bar: tqdm) -> Turn:
    def one(prompt):
        said = complete(server, prompt, asked)
        bar.update()
        return said

    before = totals(server)
    begin = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        said = list(pool.map(one, prompts))
    seconds = time.perf_counter() - begin
    return Turn(seconds, said, settled(server, before, sum(one.count for one in said)))


def settled(server: Server, before: Counter, ours: int) -> Counter:
    """What the counters grew by, once they count all that was generated."""
    for _ in range(math.ceil(LAG * 20)):
        after = totals(server)
        grown = Counter({name: after[name] - before[name] for name in before.keys() | after.keys()})
        if min(grown.values(), default=0) < 0:
            raise ValueError(f"{server.url}/metrics went backwards; was the server restarted? Measure again")
        if "generated" not in after or grown["generated"] >= ours:
            return grown
        time.sleep(0.05)
    raise ValueError(
        f"{server.url}/metrics counts {grown['generated']:,} of the {ours:,} tokens that were generated; name the "
        "server itself, nothing that stands before several"
    )


def complete(server: Server, prompt: dict, asked: dict) -> Said:
    """One request, streamed. ValueError: whatever is wrong with the answer."""
    place = f"{server.url}/v1/{'chat/' if 'messages' in prompt else ''}completions"
    body = {"model": server.model, **prompt, **asked, "cache_salt": secrets.token_hex(8)}
    begin, times, text, tokens, count = time.perf_counter(), [], "", [], 0
    for event in stream(place, body):
        with answering(place):
            if "error" in event:
                raise ValueError(json.dumps(event["error"]))
            new, ids = piece_of(event)
            if new or ids:
                times.append(time.perf_counter() - begin)
            text, tokens = text + new, tokens + ids
            count = (event.get("usage") or {}).get("completion_tokens", count)
    with answering(place):
        if type(count) is not int or count < 1 or not times:
            raise ValueError(f"a stream with usage.completion_tokens {count!r} and {len(times)} events with text")
    a_token = (times[-1] - times[0]) / (count - 1) if len(times) > 1 else None
    return Said(tokens if len(tokens) == count else None, text, count, times[0], a_token)


def piece_of(event: dict) -> tuple[str, list[int]]:
    """What an event of a chat or a completion adds: text, token ids where the server gives them."""
    text, ids = "", []
    for choice in event["choices"]:
        said = choice.get("delta", choice)
        text += said.get("reasoning") or said.get("reasoning_content") or ""
        text += said.get("content") or said.get("text") or ""
        ids += choice.get("token_ids") or []
    return text, ids


# ----------------------------------------------------------------------------------------------------------- measuring


def measure(args, servers: list[Server], prompts: list[dict], cell: dict) -> list[list[Turn]]:
    """The turns of each server, round by round."""
    asked = {"temperature": cell["temperature"], "top_p": cell["top_p"], "ignore_eos": not args.may_end}
    asked |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    few, short = prompts[: cell["at_once"]], asked | {"max_tokens": min(WARM_UP, args.new_tokens)}
    asked |= {"max_tokens": args.new_tokens}
    turns, requests = [[] for _ in servers], len(servers) * (len(few) + args.rounds * len(prompts))
    title = f"{cell['at_once']} at once, temperature {cell['temperature']:g}"
    with tqdm(total=requests, desc=title, unit="request") as bar:
        for server in servers:
            take_turn(server, few, cell["at_once"], short, bar)
        for _ in range(args.rounds):
            for server, mine in zip(servers, turns, strict=True):
                mine.append(take_turn(server, prompts, cell["at_once"], asked, bar))
    return turns


def compared(turns: list[list[Turn]], temperature: float) -> dict:
    row = pooled(turns[0])
    if len(turns) == 1:
        return row
    faster = [rate([ours]) / rate([theirs]) for ours, theirs in zip(*turns, strict=True)]
    row |= {"against": pooled(turns[1]), "faster_by_round": faster, "faster": statistics.median(faster)}
    if temperature == 0:
        pairs = [zip(ours.said, theirs.said, strict=True) for ours, theirs in zip(*turns, strict=True)]
        row["identical"] = sum(same(a, b) for pair in pairs for a, b in pair)
    return row


def same(a: Said, b: Said) -> bool:
    return a.text == b.text if a.tokens is None or b.tokens is None else a.tokens == b.tokens


def rate(turns: list[Turn]) -> float:
    """Tokens per second, pooled."""
    return sum(said.count for turn in turns for said in turn.said) / sum(turn.seconds for turn in turns)


def pooled(turns: list[Turn]) -> dict:
    said, counts = [said for turn in turns for said in turn.said], Counter()
    for turn in turns:
        counts.update(turn.counts)
    gaps = [one.a_token for one in said if one.a_token is not None]
    ids = all(one.tokens is not None for one in said)
    row = {
        "requests": len(said),
        "tokens": (tokens := sum(one.count for one in said)),
        "tokens_per_s": rate(turns),
        "s_per_token": statistics.median(gaps) if gaps else None,
        "s_to_first": statistics.median(one.to_first for one in said),
        "unique_bigrams": unique_bigrams([one.tokens if ids else one.text.split() for one in said]),
        "bigrams_of": "tokens" if ids else "words",
        "others_tokens": counts["generated"] - tokens if "generated" in counts else None,
    }
    if "drafts" not in counts:
        return row
    by_depth = [counts[depth] for depth in sorted(key for key in counts if type(key) is int)]
    row |= {"k": len(by_depth), **{name: counts[name] for name in ("drafts", "drafted", "accepted")}}
    return row | {
        "accept_length": 1 + counts["accepted"] / counts["drafts"] if counts["drafts"] else None,
        "by_depth": [accepted / max(counts["drafts"], 1) for accepted in by_depth],
    }


def both(row: dict, key: str, scale: float = 1.0, form: str = "{:,.0f}") -> str:
    """A number and, in brackets, that of --against."""
    texts = [form.format(x[key] * scale) if x[key] is not None else "-" for x in (row, row.get("against")) if x]
    return texts[0] + "".join(f" ({text})" for text in texts[1:])


TABLE = {
    "at once": lambda r: r["at_once"],
    "temperature": lambda r: f"{r['temperature']:g}" + (f", top-p {r['top_p']:g}" if r["top_p"] < 1 else ""),
    "K": lambda r: r.get("k", "-"),
    "drafts": lambda r: f"{r['drafts']:,}" if "k" in r else "-",
    "accept length": lambda r: f"{r['accept_length']:.2f}" if r.get("accept_length") else "-",
    "accepted by depth": lambda r: " ".join(f"{x:.0%}" for x in r.get("by_depth", [])) or "-",
    "tokens/s": lambda r: both(r, "tokens_per_s"),
    "faster": lambda r: f"{r['faster']:.2f}x",
    "ms/token": lambda r: both(r, "s_per_token", 1e3, "{:,.1f}"),
    "ms to first": lambda r: both(r, "s_to_first", 1e3),
    "unique bigrams": lambda r: both(r, "unique_bigrams", form="{:.0%}") + " of words" * (r["bigrams_of"] == "words"),
    "identical": lambda r: f"{r['identical']} of {r['requests']}" if "identical" in r else "-",
}


def remarks(args, rows: list[dict], training: dict | None) -> Iterator[str]:
    """What belongs to the table."""
    if args.against:
        yield f"In brackets: {args.against}, which took turns with {args.url}."
    if training:
        told = ", ".join(f"{name.replace('_', ' ')} {x:.2f}" for name, x in training.items() if name != "k")
        yield f"{args.run} reported by chains of {training['k']}, on its own held-out documents: {told}."
    for url, each in ((args.url, rows), (args.against, [row.get("against", {}) for row in rows])):
        if others := sum(row.get("others_tokens") or 0 for row in each):
            yield (
                f"warning: {url} generated {others:,} tokens for others meanwhile; its counters and times include "
                "them, so measure again while it is idle"
            )
