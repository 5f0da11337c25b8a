"""Fixtures that several test files share."""

import json

import pytest
import torch

import target


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Toys are faster on one, and sums come out the same."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder of runs whose built-in targets were hardly trained."""
    folder = tmp_path_factory.mktemp("runs")
    for preset in ("deepseek-v3", "kimi-k3"):
        path = target.tiny_target(preset, folder / f"tiny-{preset}", progress=False, steps=2)
        recipe = json.loads((path / "tiny_target.json").read_text())
        recipe["steps"] = target.TINY_STEPS[preset]
        (path / "tiny_target.json").write_text(json.dumps(recipe))
    return folder
