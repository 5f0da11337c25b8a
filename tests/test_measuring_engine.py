"""Claims about the check against vLLM: it fails when anything differs, and on which prompts it looks."""

import stat
from types import SimpleNamespace

import pytest
import torch

from measuring import engine
from serving.decode import unique_bigrams
from tests.helpers import PROMPTS, attention_target, small_draft

ARGS = ["python", "--run", "run", "--prompts", "p.json", "--new-tokens", "8", "--k", "2"]


@pytest.fixture
def sides():
    """Arguments, draft, target and texts, and an answer of an engine that does the same."""
    args, draft, target = engine.parse(ARGS), small_draft(), attention_target()
    texts = [(prompt, target.greedy(prompt, 8).tolist()) for prompt in PROMPTS]
    found = [engine.decode(args, 2, draft, target, prompt) for prompt in PROMPTS]
    found[0]["logits"] = torch.cat(
        [found[0]["logits"], torch.zeros(2, found[0]["logits"].shape[1])]
    )  # drafted once more
    return args, draft, target, texts, {"prompts": found, "unfilled": []}


def moved(answer):
    answer["prompts"][0]["rounds"] += 1
    answer["prompts"][1]["rounds"] -= 1


DEFECTS = {
    "none": lambda answer: None,
    "a token": lambda answer: answer["prompts"][2]["tokens"].__setitem__(-1, 11 - answer["prompts"][2]["tokens"][-1]),
    "a round": lambda answer: answer["prompts"][2].update(rounds=answer["prompts"][2]["rounds"] + 1),
    "rounds of two texts, the sum the same": moved,
    "logits": lambda answer: answer["prompts"][1]["logits"].mul_(1.001),
    "fewer logits": lambda answer: answer["prompts"][1].update(logits=answer["prompts"][1]["logits"][:-1]),
    "an empty parameter": lambda answer: answer.update(unfilled=["model.fc.weight"]),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_check_passes_only_where_nothing_differs(sides, defect, monkeypatch, capsys):
    args, draft, target, texts, answer = sides
    DEFECTS[defect](answer)
    monkeypatch.setattr(engine, "ask_engine", lambda *_: answer)
    assert engine.check(args, 2, draft, target, texts) == (defect == "none")
    line = capsys.readouterr().out
    assert line.count("\n") == 1 and f"{unique_bigrams([new for _, new in texts]):.0%} of their bigrams" in line


def test_prompts_that_repeat_themselves_are_left_out(monkeypatch):
    prompts = [torch.tensor(x) for x in ([1, 2] * 8, [*range(10)], [1, 2, 3, 4, 1, 2, 3], [5] * 9, [3, 1, 4, 1, 5])]
    said = {10: [1, 1, 1, 1], 7: [1, 2, 3, 4], 5: [1, 2, 1, 2]}
    monkeypatch.setattr(engine, "load_prompts", lambda *_: prompts)
    target = SimpleNamespace(greedy=lambda prompt, n: torch.tensor(said[len(prompt)]))
    args = engine.parse(["python", "--run", "run", "--most", "2"])
    assert [len(prompt) for prompt, _ in engine.choose(args, target)] == [5, 7]
    prompts[:] = prompts[:1]
    with pytest.raises(ValueError, match="give others by --prompts"):
        engine.choose(args, target)


def test_an_engine_that_fails_is_quoted_in_one_line(sides, tmp_path):
    args, draft, target, _, _ = sides
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho noise >&2\necho 'ValueError: no such thing' >&2\nexit 3\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    args.engine = str(python)
    with pytest.raises(ValueError, match="ended with exit code 3: ValueError: no such thing$"):
        engine.ask_engine(args, 2, draft, target, PROMPTS)
