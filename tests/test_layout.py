"""The layout, held to by reading the sources: what stands at the root, how long it is, and which way imports run."""

import ast
import os
import re
import shutil
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FACE = {"draft_deepseek.py", "draft_kimi_k3.py", "train.py", "bench.py", "test_drafts.py", "conftest.py"}
FLOORS = (  # a file imports from its own folder and from the floors below it
    ("train", "bench"),
    ("measuring",),
    ("training",),
    ("states",),
    ("target",),
    ("serving",),
    ("draft_kimi_k3",),
    ("draft_deepseek",),
    ("data",),
)
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
NEVER = {("states", "data.packing"), ("target", "data.packing"), ("draft_kimi_k3", "data"), ("draft_deepseek", "data")}
LINES, FUNCTION_LINES = 600, 60
LONG = {"draft_deepseek.py"}  # one file, since people copy it


def modules(root: Path) -> dict[str, Path]:
    """Every module of the repo but its tests, by its dotted name."""
    files = [*(path for path in root.glob("*.py") if path.stem in FLOOR)]
    files += [path for room in FLOOR for path in (root / room).glob("**/*.py") if path.name != "__init__.py"]
    return {".".join(path.relative_to(root).with_suffix("").parts): path for path in files}


def imports(root: Path) -> dict[str, set[str]]:
    """Which modules of the repo each of them imports, wherever in the file it does."""
    known, found = modules(root), {}
    for name, path in known.items():
        asked = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                asked |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{path} imports by dots"
                asked |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
        found[name] = asked & known.keys()
    return found


def room(module: str) -> str:
    return module.partition(".")[0]


def upward(root: Path) -> list[str]:
    arrows = [(a, b) for a, some in imports(root).items() for b in some if room(a) != room(b)]
    return [
        f"{a} imports {b}"
        for a, b in sorted(arrows)
        if FLOOR[room(a)] >= FLOOR[room(b)] or {(room(a), b), (room(a), room(b))} & NEVER
    ]


def circles(root: Path) -> list[str]:
    try:
        TopologicalSorter(imports(root)).prepare()
    except CycleError as error:
        return [" -> ".join(error.args[1])]
    return []


def strangers(root: Path) -> list[str]:
    """Python files that stand in no room, and rooms that are no packages."""
    out = [path.name for path in root.glob("*.py") if path.name not in FACE]
    rooms = [*(root / name for name in FLOOR), root / "tests"]
    return out + [
        f"{path.name}/__init__.py" for path in rooms if path.is_dir() and not (path / "__init__.py").is_file()
    ]


def too_long(root: Path) -> list[str]:
    out = []
    for path in (*root.glob("*.py"), *(root / "tests").glob("*.py"), *modules(root).values()):
        text = path.read_text()
        if path.name not in LONG and len(text.splitlines()) > LINES:
            out.append(f"{path.relative_to(root)}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno - node.lineno >= FUNCTION_LINES:
                out.append(f"{path.relative_to(root)}: {node.name}, {node.end_lineno - node.lineno + 1} lines")
    return sorted(set(out))


@pytest.mark.parametrize("fault", [upward, circles, strangers, too_long])
def test_the_repo_stands_as_it_is_laid_out(fault):
    assert fault(ROOT) == []


@pytest.mark.parametrize(
    ("fault", "files"),
    [
        (upward, {"data/x.py": "import torch\n\ndef f():\n    from target.model import Target\n"}),
        (upward, {"train.py": "import bench\n"}),
        (upward, {"states/x.py": "from data import packing\n"}),
        (upward, {"draft_deepseek.py": "from data.files import naming\n"}),
        (circles, {"data/x.py": "from data.y import a\n", "data/y.py": "from data import x\n"}),
        (strangers, {"captured.py": ""}),
        (strangers, {"states/__init__.py": None}),
        (too_long, {"train.py": "x = 1\n" * 601}),
        (too_long, {"tests/test_x.py": "def f():\n" + "    x = 1\n" * 60}),
    ],
)
def test_a_fault_of_the_layout_is_seen(tmp_path, fault, files):
    sound = {f"{name}.py" if f"{name}.py" in FACE else f"{name}/__init__.py": "" for name in FLOOR}
    sound |= {"tests/__init__.py": "", "data/packing.py": "", "data/files.py": ""}
    sound |= {"target/model.py": "", "states/read.py": "import target.model\n"}
    for changed in (sound, files):
        assert all(check(tmp_path) == [] for check in (upward, circles, strangers, too_long))
        for name, text in changed.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True) if text is None else path.write_text(text)
    assert fault(tmp_path) != []


def test_the_draft_files_work_alone_in_another_folder(tmp_path):
    """README's snippet, in a folder that holds nothing else, with the repo on no path."""
    for name in ("draft_deepseek.py", "draft_kimi_k3.py"):
        shutil.copy(ROOT / name, tmp_path)
    section = (ROOT / "README.md").read_text().partition("## Copy it")[2]
    (tmp_path / "snippet.py").write_text(re.search(r"```python\n(.*?)```", section, re.DOTALL)[1])
    command = "import snippet; from draft_kimi_k3 import KimiK3Eagle3DraftModel"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    run = subprocess.run(
        [sys.executable, "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
    assert all(float(x) > 0 for x in run.stdout.split()) and len(run.stdout.split()) == 2
