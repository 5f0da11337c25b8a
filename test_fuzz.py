"""Claims about input that nobody meant: whatever is given, train.py ends in success or in one line with exit code 2.

Every case follows from its kind and number alone. It plans a run (`--dry-run`), which reads all that a run reads before
its first step.
"""

import gzip
import json
import os
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

import sources
import train
from settings import FIELDS, flag, kind_of

os.environ["HF_HUB_OFFLINE"] = "1"
FAST, SLOW = 15, 180  # cases of a kind

TEXTS = ["", " ", "\0", "a\0b", "é", "🙂", "\udcff", "x" * 300, "x" * 5000, "../x", "/dev/zero", "nowhere", "a\nb", "-"]
TEXTS += [".", "auto", "cpu", "cpu:7", "cuda:99", "cuda:-1", "xpu", "mps", "meta", "banana"]
TEXTS += ["1,2,3", "0,0,0", "3,1", "1,2,x", "96", "0"]
NUMBERS = [-1, 0, 1, 2, 3, 7, 64, 65, 256, 4097, 2**31, 2**63, 2**64, 10**12, 10**30, 10**400, -(10**30)]
FLOATS = [0.0, -0.0, 0.05, 0.999999, 1.0, 1.5, -0.1, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")]
JUNK = [None, True, False, [], {}, [[]], [None], {"a": {"b": [1]}}, "7", "0.5", "null", *TEXTS, *NUMBERS, *FLOATS]
CHAT = {"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]}
TOKENS = {"input_ids": list(range(40)), "loss_mask": [0] * 20 + [1] * 20}


def planted(rng, value, depth=0):
    """The value with junk somewhere in it: in place of a part, as another key, or a part that is gone."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15 * (depth > 0):
        return rng.choice(JUNK)
    made, keys = value.copy(), list(value) if isinstance(value, dict) else range(len(value))
    key = rng.choice(keys)
    if rng.random() < 0.15:
        del made[key]
    elif isinstance(value, dict) and rng.random() < 0.1:
        made[rng.choice(["", "a", "é", "torch", "resume"])] = rng.choice(JUNK)
    else:
        made[key] = planted(rng, value[key], depth + 1)
    return made


def damaged(rng, blob: bytes) -> bytes:
    """Bytes cut off, changed or put in."""
    at = rng.randrange(len(blob) + 1)
    put = rng.choice([rng.randbytes(3), b"\n" * 1000, b"[" * 3000, b"\xef\xbb\xbf", b"\xff\xfe", b"\0", b"1" * 5000])
    return rng.choice([blob[:at], blob[:at] + put + blob[at:], blob[:at] + put + blob[at + len(put) :]])


# --------------------------------------------------------------------------- cases: (random numbers, folder) -> flags


def any_value(rng, name: str):
    """One of the setting's type, mostly, often one that can be used."""
    f = FIELDS[name]
    likely = {int: NUMBERS, float: FLOATS, bool: [True, False], str: f.metadata["choices"] or TEXTS, list: [TEXTS[:3]]}
    return rng.choice(
        [f.default, *rng.choices([*likely[kind_of(f)[0]]], k=2), *rng.choices(JUNK, k=rng.random() < 0.3)]
    )


def flags(rng, folder) -> list[str]:
    """One to three flags with values of any kind; --runs but where it is refused, as it would train a target."""
    given = []
    for name in rng.sample(sorted(FIELDS), rng.randint(1, 3)):
        value = any_value(rng, name) if name != "runs" else rng.choice(["", " ", "\0", "x" * 5000])
        is_flag = kind_of(FIELDS[name])[0] is bool
        given += [flag(name)] if is_flag else [flag(name), str(value)[:6000]] if value is not None else []
    return given


def settings(rng, folder) -> list[str]:
    """A stored run with one to three settings of any value, other keys, or damaged as text."""
    stored = {name: f.default for name, f in FIELDS.items()} | {"torch": "2.13", "row_tokens": 256}
    stored |= {name: any_value(rng, name) for name in rng.sample(sorted(FIELDS), rng.randint(1, 3))}
    stored = planted(rng, stored) if rng.random() < 0.3 else stored
    text = json.dumps(stored, indent=1).encode()
    (folder / "fuzzed").mkdir()
    (folder / "fuzzed" / "settings.json").write_bytes(damaged(rng, text) if rng.random() < 0.2 else text)
    return ["--name", "fuzzed", "--resume"]


def conversations(rng, folder) -> list[str]:
    """A file of good and bad lines, in any form that is read."""
    records = [json.loads(json.dumps(rng.choice([CHAT, TOKENS]))) for _ in range(rng.randint(1, 8))]
    records = [record if rng.random() < 0.5 else planted(rng, record) for record in records]
    is_list = rng.random() < 0.3
    text = json.dumps(records) if is_list else "\n".join(map(json.dumps, records))
    blob, suffix = text.encode(), rng.choice([".json", ".jsonl", ".jsonl.gz"])
    blob = damaged(rng, blob) if rng.random() < 0.4 else blob
    if suffix.endswith("gz"):
        blob = gzip.compress(blob)
        blob = damaged(rng, blob) if rng.random() < 0.4 else blob
    (folder / f"chats{suffix}").write_bytes(blob)
    return ["--data", str(folder / rng.choice(["", f"chats{suffix}"])), "--held-out", "0.5"]


def with_junk_in(rng, path: Path) -> None:
    """A JSON file, or one line of a file of lines, with junk in it, or damaged as text."""
    blob = path.read_bytes()
    if rng.random() < 0.15:
        path.write_bytes(damaged(rng, blob))
        return
    lines = [blob] if path.suffix == ".json" else blob.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = json.dumps(planted(rng, json.loads(lines[at]))).encode()
    path.write_bytes(b"\n".join(lines) + b"\n")


def config(rng, folder) -> list[str]:
    """A target whose config.json, or another JSON file beside it, has junk in it."""
    shutil.copytree(folder / "tiny-deepseek-v3", folder / "target")
    files = [x for x in (folder / "target").glob("*.json") if x.name in ("config.json", "generation_config.json")]
    with_junk_in(rng, rng.choice(sorted(files)))
    return ["--model", str(folder / "target")]


def captured(rng, folder) -> list[str]:
    """Captured states whose index or description has junk in it; with and without the target's own directory."""
    shutil.copytree(folder / "captured", folder / "states")
    files = [x for x in (folder / "states").rglob("*") if x.suffix in (".json", ".jsonl")]
    with_junk_in(rng, rng.choice(sorted(files)))
    return ["--data", str(folder / "states"), "--model", str(folder / "tiny-deepseek-v3"), "--held-out", "0.5"]


KINDS = {f.__name__: f for f in (flags, settings, conversations, config, captured)}
SWITCHED_OFF = ()


# ---------------------------------------------------------------------------------------------------------- the claim


@pytest.fixture(scope="module")
def sample(runs, tmp_path_factory):
    """A folder of runs as every case finds it: the built-in targets and states captured from one."""
    folder = tmp_path_factory.mktemp("fuzz")
    for preset in ("deepseek-v3", "kimi-k3"):
        (folder / f"tiny-{preset}").symlink_to(runs / f"tiny-{preset}")
    common = ["--runs", str(folder), "--device", "cpu", "--documents", "6"]
    with few_documents():
        assert train.cli([*common, "--row-tokens", "256", "--capture", str(folder / "captured")]) == 0
    return folder


def few_documents():
    """The built-in corpus, cut short."""
    patch, whole = pytest.MonkeyPatch(), sources.python_documents
    patch.setattr(sources, "python_documents", lambda held_out, seed=0: whole(held_out, seed)[:8])
    patch.setattr(train, "matrix_rate", lambda *_: 1e12)
    return undoing(patch)


class undoing:
    def __init__(self, patch):
        self.patch = patch

    def __enter__(self):
        return self.patch

    def __exit__(self, *error):
        self.patch.undo()


def outcome(kind: str, number: int, sample: Path, folder: Path, capsys) -> tuple[str, str]:
    """How a case ended, and what it was where that is not allowed."""
    folder.mkdir()
    for each in sample.iterdir():
        (folder / each.name).symlink_to(each)
    given = KINDS[kind](random.Random(f"{kind}/{number}"), folder)
    if "--runs" not in given:
        given = ["--runs", str(folder), *given]
    try:
        code = train.cli(["--device", "cpu", "--row-tokens", "256", "--dry-run", *given])
    except BaseException as error:
        return "traceback", f"{kind} {number}: {given} raised {type(error).__name__}: {str(error)[:200]}"
    *_, last = ["", *capsys.readouterr().err.rstrip("\n").split("\n")]
    if code == 0 or code == 2 and ": error: " in last:
        return "success" if code == 0 else "one line", ""
    return "other", f"{kind} {number}: {given} ended with exit code {code} and {last[:200]!r}"


@pytest.mark.parametrize(
    ("kind", "cases"),
    [
        *((kind, FAST) for kind in KINDS if kind not in SWITCHED_OFF),
        *(pytest.param(kind, SLOW, marks=pytest.mark.slow) for kind in KINDS if kind not in SWITCHED_OFF),
    ],
)
def test_whatever_is_given_ends_in_success_or_in_one_line(kind, cases, sample, tmp_path, monkeypatch, capsys):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    counts, wrong = Counter(), []
    with few_documents():
        for number in range(cases):
            how, what = outcome(kind, number, sample, tmp_path / str(number), capsys)
            counts[how] += 1
            wrong += [what] if what else []
    with capsys.disabled():
        print(f"\n{kind}: {cases} cases, {dict(counts)}")
    assert not wrong, "\n".join(wrong[:10])
    assert set(counts) == {"success", "one line"}  # the cases reach both
