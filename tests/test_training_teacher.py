"""Claims about the teacher check: states that say nothing of their text are warned of."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import train
from data.corpus import python_documents
from data.documents import Document
from tests.helpers import command
from training.sources import teacher_check


def teacher_of(documents: int, length: int, right: float, seed: int = 0) -> str:
    """What is said of documents whose states name the next token in a share of the places, and noise in the others."""
    rng, vocab = torch.Generator().manual_seed(seed), 50
    sample = []
    for _ in range(documents):
        tokens = torch.randint(vocab, (length,), generator=rng)
        noise = torch.randint(vocab, (length,), generator=rng)
        named = torch.where(torch.rand(length, generator=rng) < right, tokens.roll(-1), noise)
        document = Document(tokens, torch.arange(length) >= length // 2, "x")
        sample.append((document, (None, torch.eye(vocab)[named])))
    return teacher_check(SimpleNamespace(head=lambda x: x, embed_tokens=nn.Embedding(vocab, 1)), sample)


@pytest.mark.parametrize(("documents", "length"), [(1, 60), (2, 20), (3, 200), (16, 60)])
def test_a_teacher_that_knows_its_text_is_told_from_noise(documents, length):
    good = teacher_of(documents, length, 0.8)
    assert "WARNING" not in good and f"learned tokens of {documents} documents" in good
    bad = [teacher_of(documents, length, 0.0, seed) for seed in range(20)]
    assert sum("WARNING: the teacher is no better" in text for text in bad) == 20


def test_a_teacher_is_compared_place_by_place():
    """Two documents whose answers are a b c and a d: of two pairs of places the own states are right in both, those of
    the other document in the first."""
    answers = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 4])
    sample = [(Document(x, torch.arange(len(x)) < 3, "x"), (None, torch.eye(5)[x.roll(-1)])) for x in answers]
    said = teacher_check(SimpleNamespace(head=lambda x: x, embed_tokens=nn.Embedding(5, 1)), sample)
    assert "its own choice is 100.0% of 4 learned tokens of 2 documents, 50.0% by another document's states" in said
    assert "0.0% of 0 learned tokens of 0 documents" in teacher_check(
        SimpleNamespace(embed_tokens=nn.Embedding(5, 1)), []
    )


@pytest.fixture(scope="module")
def states(runs, tmp_path_factory):
    """Captured states of some conversations, and a copy in which they are random ones of the same scale."""
    folder = tmp_path_factory.mktemp("states")
    pairs = python_documents(True)[:20]
    rows = [
        {"messages": [{"role": "user", "content": p[:60]}, {"role": "assistant", "content": a[:90]}]} for p, a in pairs
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--model", runs / "tiny-deepseek-v3", "--data", folder / "chats.jsonl", "--capture", folder / "good"]
    train.main(command(runs, "captures", *flags))
    head = load_file(runs / "tiny-deepseek-v3" / "model.safetensors")["lm_head.weight"]
    head = head / head.square().sum(-1, keepdim=True)
    shutil.copytree(folder / "good", folder / "random")
    for name in ("good", "random"):
        for path in (folder / name / "hidden_states").iterdir():
            held = load_file(path)
            last = held["hidden_states"][:, 3]
            last.copy_(head[held["token_ids"].roll(-1)] if name == "good" else torch.randn(last.shape))
            save_file(held, path, metadata={"last_hidden": "after_norm"})
    return folder


@pytest.mark.parametrize("flags", [["--dry-run"], ["--steps", 1]])
def test_captured_states_that_say_nothing_of_the_text_are_warned_of(runs, states, flags, capsys):
    model = ["--model", runs / "tiny-deepseek-v3"]
    for name in ("good", "random"):
        train.main(command(runs, f"taught-{name}-{len(flags)}", "--data", states / name, *model, *flags))
        said = capsys.readouterr().out
        assert said.count("teacher: its own choice is") == 1
        assert ("WARNING: the teacher is no better" in said) == (name == "random")


def test_states_that_arrive_are_compared_before_the_first_step(runs, states, tmp_path, capsys):
    for name in ("good", "random"):
        shutil.copytree(states / name / "hidden_states", tmp_path / name)
        (tmp_path / name / "STOP").touch()
        flags = ["--model", runs / "tiny-deepseek-v3", "--data", states / "chats.jsonl", "--follow", tmp_path / name]
        train.main(command(runs, f"followed-{name}", *flags))
        said = capsys.readouterr().out
        assert said.count("teacher: its own choice is") == 1
        assert ("WARNING: the teacher is no better" in said) == (name == "random")
