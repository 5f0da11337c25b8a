"""Fixtures that several test files share."""

import json
import os
import shutil

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads, as in train.py: spinning threads cost seconds

import pytest
import torch

import target
from data import python_documents

torch.set_num_threads(1)  # for what is made once


@pytest.fixture(autouse=True)
def one_thread():
    """Toys are faster on one, sums come out the same, and a process that is forked may not use the threads of others.

    Set for each test: what runs in-process (`bench.py --threads`) sets its own.
    """
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def short_training():
    """Built-in targets are made from little text; what the tests claim of them does not depend on it."""
    shortest = sorted(python_documents(True), key=lambda pair: len("".join(pair)))[:40]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, "BATCH_TOKENS", 512)
        patch.setattr(target, "python_documents", lambda held_out, seed=0: list(shortest))
        yield


@pytest.fixture(scope="session")
def tiny_targets(tmp_path_factory, short_training):
    """Directories of both built-in targets, hardly trained."""
    folder = tmp_path_factory.mktemp("targets")
    return {x: target.tiny_target(x, folder / f"tiny-{x}", progress=False, steps=3) for x in target.TINY_STEPS}


@pytest.fixture(scope="session")
def runs(tmp_path_factory, tiny_targets):
    """A folder of runs that holds those targets as if they were trained in full."""
    folder = tmp_path_factory.mktemp("runs")
    for preset, made in tiny_targets.items():
        path = shutil.copytree(made, folder / made.name)
        recipe = json.loads((path / "tiny_target.json").read_text())
        recipe["steps"] = target.TINY_STEPS[preset]
        (path / "tiny_target.json").write_text(json.dumps(recipe))
    return folder
