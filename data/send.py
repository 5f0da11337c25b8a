"""Conversations sent through a running vLLM, which writes the target's states at them."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from data.documents import Document
from data.files import append, being_written, naming, open_regular, opened_alone, replace_with
from data.server import AT_ONCE, address, answering, ask, served_model


def send(url: str, out, documents: list[Document]) -> None:
    """Has a vLLM that serves the target with `extract_hidden_states` into the directory `out` run over all documents.

    Each is one completion request of its tokens for one more token. `out`/index.jsonl tells readers their loss masks,
    a file PAUSE there makes it wait (`Follower`), a file STOP says that all were sent, and `sent` how many, so that a
    second call goes on. ValueError: no server there, one that refuses, or `out` was made for other documents.
    """
    url, out, lines = address(url), Path(out), []
    for d in documents:
        lines.append(json.dumps({"input_ids": d.tokens.tolist(), "loss_mask": d.loss_mask.int().tolist()}) + "\n")
    model = served_model(url)
    out.mkdir(parents=True, exist_ok=True)
    with opened_alone(out / "sent") as count:
        check_listed(out / "index.jsonl", "".join(lines).encode())
        begin = sent_before(out / "sent", len(documents))
        with ThreadPoolExecutor(AT_ONCE) as pool, tqdm(total=len(documents), initial=begin, desc="sent") as bar:
            for first in range(begin, len(documents), 16 * AT_ONCE):
                some = documents[first : first + 16 * AT_ONCE]
                for _ in pool.map(lambda document: complete(url, model, out, document), some):
                    bar.update()
                append(count, first + len(some))
    (out / "STOP").touch()


def check_listed(index: Path, text: bytes) -> None:
    """Writes the index, unless it is there already. ValueError: with other documents."""
    if not index.exists():
        return replace_with(index, lambda half: half.write_bytes(text))
    with naming(index, "name another directory, or remove it"), open_regular(index) as file:
        if os.fstat(file.fileno()).st_size != len(text) or file.read() != text:
            raise ValueError("it lists other documents")


def sent_before(path: Path, documents: int) -> int:
    """How many were sent, by the last whole line."""
    with naming(path, "remove it, and all are sent again"), open_regular(path) as file:
        lines = [line for line in file.read(1 << 20).splitlines(keepends=True) if line.endswith(b"\n")]
        begin = int(lines[-1]) if lines else 0
        if not 0 <= begin <= documents:
            raise ValueError(f"it says that {begin} of {documents} documents were sent")
        return begin


def complete(url: str, model: str, out: Path, document: Document) -> None:
    """One request; returns when vLLM has written its file. That comes after its answer, and what is counted as sent
    lies whole on the disk."""
    while (out / "PAUSE").exists():
        time.sleep(1.0)
    place = f"{url}/v1/completions"
    answer = ask(place, {"model": model, "prompt": document.tokens.tolist(), "max_tokens": 1})
    with answering(place):
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str | None):
            raise TypeError(f"hidden_states_path is {path!r}")
    for _ in range(1200):
        if path is None or not being_written(Path(path)):
            return
        time.sleep(0.05)
    raise ValueError(f"vLLM does not finish {path}; is its disk full?")
