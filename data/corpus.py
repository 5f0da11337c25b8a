"""The built-in corpus: functions and classes of the running Python's own standard library."""

import ast
import functools
import hashlib
import random
import sysconfig
import textwrap
from pathlib import Path

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
MIN_DOCUMENT, MAX_DOCUMENT, MIN_ANSWER = 160, 768, 64  # bytes, which are the tokens of the built-in vocabulary
HELD_OUT_SHARE = 12  # one file in so many is held out


def python_documents(held_out: bool, seed: int = 0) -> list[tuple[str, str]]:
    """Functions and classes of the standard library as (prompt, answer) pairs, 160 to 768 bytes together.

    The split is by file and the same for every seed, so that what is held out was never shown to a target or a draft;
    the seed only shuffles. ValueError where this Python comes without its sources.
    """
    pairs = list(cut_standard_library(held_out))
    random.Random(seed).shuffle(pairs)
    return pairs


@functools.cache  # seconds; a run that first makes its target asks twice
def cut_standard_library(held_out: bool) -> tuple[tuple[str, str], ...]:
    root, pairs = Path(sysconfig.get_paths()["stdlib"]), {}  # a dict for its order: some functions stand in two files
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if not is_test_file(relative) and is_held_out(relative) == held_out:
            pairs.update(dict.fromkeys(cut_into_documents(path)))
    if not pairs:
        raise ValueError(
            f"no Python sources in {root}, and the built-in corpus is cut from them; use a Python that comes with its "
            "standard library as .py files"
        )
    shown = set() if held_out else set(cut_standard_library(True))  # copies of a held-out function are not learned
    return tuple(pair for pair in pairs if pair not in shown)


def is_test_file(relative: Path) -> bool:
    return bool(SKIPPED_FOLDERS & set(relative.parts[:-1])) or relative.name.startswith("test_")


def is_held_out(relative: Path) -> bool:
    digest = hashlib.sha256(relative.as_posix().encode()).digest()  # hash() differs between processes
    return digest[0] % HELD_OUT_SHARE == 0


def cut_into_documents(path: Path) -> list[tuple[str, str]]:
    """The (prompt, answer) pairs of one file; none for a file that is no UTF-8 or does not parse."""
    try:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    lines = text.split("\n")  # not splitlines(): that also splits at form feeds, which ast does not count
    pairs = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pairs.append(cut(node, lines))
        elif isinstance(node, ast.ClassDef):
            whole = cut(node, lines)
            methods = [] if whole else [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
            pairs += [whole] + [cut(method, lines) for method in methods]
    return [pair for pair in pairs if pair is not None]


def cut(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, lines: list[str]) -> tuple[str, str] | None:
    """Signature and docstring, or the first third if that is more, as prompt, the rest as answer. None: a bad size."""
    start = min([node.lineno] + [decorator.lineno for decorator in node.decorator_list]) - 1
    block = textwrap.dedent("\n".join(lines[start : node.end_lineno]) + "\n")
    size = len(block.encode())
    if not MIN_DOCUMENT <= size <= MAX_DOCUMENT:
        return None
    first = node.body[0]
    head = first.end_lineno if ast.get_docstring(node, clean=False) is not None else first.lineno - 1
    rows, n = block.split("\n"), max(1, head - start)
    while n < len(rows) and len("\n".join(rows[:n]).encode()) < size / 3:
        n += 1
    prompt, answer = "\n".join(rows[:n]) + "\n", "\n".join(rows[n:])
    return (prompt, answer) if len(answer.encode()) >= MIN_ANSWER else None
