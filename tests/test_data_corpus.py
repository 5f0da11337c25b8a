"""Claims about the built-in corpus: deterministic, bounded, split by file."""

import ast
import hashlib
from pathlib import Path

from data import corpus
from data.corpus import python_documents


def test_corpus_is_deterministic_bounded_and_split_by_file():
    held_out = python_documents(held_out=True)
    assert held_out == python_documents(held_out=True) != python_documents(held_out=True, seed=1)
    assert sorted(held_out) == sorted(python_documents(held_out=True, seed=1)) and len(set(held_out)) == len(held_out)
    assert len(held_out) > 200
    for prompt, answer in held_out:
        assert 160 <= len((prompt + answer).encode()) <= 768 and len(answer.encode()) >= 64
        assert 3 * len(prompt.encode()) >= len((prompt + answer).encode())
    assert not set(held_out) & set(python_documents(held_out=False))
    for name in ("json/decoder.py", "test/test_ast.py", "heapq.py", "unittest/test_x.py", "test/support/x.py"):
        assert corpus.is_held_out(Path(name)) == (hashlib.sha256(name.encode()).digest()[0] % 12 == 0)
        assert corpus.is_test_file(Path(name)) == ("test/" in name or "test_" in name)


def test_cutting_a_file(tmp_path):
    body = "".join(f"    value_{i} = {i} * argument  # ümlaut\n" for i in range(8))
    source = f"@decorated\n@twice\ndef f(argument):\n    '''Documented.'''\n\x0c\n{body}\n\nclass A:\n    x = 1\n"
    source += "".join(f"\n    def method_{i}(self, argument):\n" + body.replace("    v", "        v") for i in range(3))
    path = tmp_path / "module.py"
    path.write_text(source)
    (prompt, answer), *methods = corpus.cut_into_documents(path)  # the class is too long for one document
    assert prompt.startswith("@decorated\n@twice\ndef f(argument):\n    '''Documented.'''\n")
    assert answer.endswith(" = 7 * argument  # ümlaut\n") and ast.parse(prompt + answer)
    assert [p.split("(")[0] for p, _ in methods] == ["def method_0", "def method_1", "def method_2"]
    for bad in (b"def f(:\n", b"\xff\xfe", b"x = '\x00'\n"):
        path.write_bytes(bad)
        assert corpus.cut_into_documents(path) == []
