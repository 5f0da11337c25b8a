"""Claims about settings: whatever is wrong with them is one line, said before anything is made."""

import pytest

import train
from tests.helpers import complaint, error_line
from training import settings
from training.ranks import Ranks

# ---------------------------------------------------------------------------------- one line instead of a traceback


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"steps": "7"}', "steps is '7'; a whole number is wanted"),
        ('{"steps": 7.0}', "steps is 7.0; a whole number"),
        ('{"steps": true}', "steps is True; a whole number"),
        ('{"lr": "fast"}', "lr is 'fast'; a number"),
        ('{"lr": NaN}', "lr is nan"),
        ('{"clip": Infinity}', "clip is inf; it must be a positive number"),
        ('{"seed": null}', "seed is null; a whole number"),
        ('{"seed": 1%s}' % ("0" * 400), "seed is 10000"),
        ('{"seed": 1%s}' % ("0" * 5000), "settings.json cannot be used"),
        ('{"loss": "mse"}', "loss is 'mse'; one of ce, alpha, lambda"),
        ('{"loss": ["ce"]}', "loss is ['ce']; text is wanted"),
        ('{"target": {"a": {}}}', "target is {'a': {}}"),
        ('{"template_args": ["thinking"]}', "template_args holds 'thinking'; NAME=VALUE"),
        ('{"data": "chats.jsonl"}', "data is 'chats.jsonl'; a list of texts"),
        ('{"data": ["chats.jsonl", 3]}', "data holds 3"),
        ('{"data": []}', "data is ''; it must not be empty"),
        ('{"model": ""}', "model is ''; it must not be empty"),
        ('{"model": "a\\u0000b"}', "zero byte"),
        ('{"resume": "yes"}', "resume is 'yes'; true or false"),
        ('{"learning_rate": 1}', "says 'learning_rate', which is no setting"),
        ("[" * 3000, "settings.json cannot be used (RecursionError"),
        ('{"row_tokens": 1000000000}', "row_tokens is 1000000000; it must be at most 1,048,576"),
        ('{"steps": 3', "settings.json cannot be used"),
        ("", "settings.json cannot be used"),
    ],
)
def test_stored_settings_go_through_the_checks_of_the_flags(tmp_path, text, said, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "settings.json").write_text(text)
    line = error_line(["--runs", tmp_path, "--name", "run", "--resume"], capsys)
    assert said in line and "settings.json" in line


def test_what_a_run_stores_is_read_again_as_it_was(tmp_path, monkeypatch):
    given = settings.Settings(data=["a", "b"], lr=1.0, steps=3, name="run", runs=str(tmp_path), seed=2**64 - 1, clip=3)
    (tmp_path / "run").mkdir()
    train.write_settings(Ranks(), tmp_path / "run", given)
    again, _ = train.parse(["--runs", str(tmp_path), "--name", "run", "--resume", "--steps", "4"])
    assert vars(again) == vars(given) | {"steps": 4, "resume": True}


@pytest.mark.parametrize("name", [f for f, x in settings.FIELDS.items() if settings.kind_of(x)[0] in (str, list)])
def test_no_path_or_name_is_empty(name, capsys):
    for text in ("", " "):
        assert settings.flag(name) in error_line([settings.flag(name), text], capsys)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--capture", ""], "--capture"),
        (["--export", "", "x"], "--export"),
        (["--send", "http://localhost", ""], "--send"),
        (["--ttt-steps", 10**9], "--ttt-steps is 1000000000; it must be at most 64"),
        (["--row-tokens", 10**12], "--row-tokens"),
        (["--batch-rows", 10**12], "--batch-rows"),
        (["--accumulate", 10**12], "--accumulate"),
        (["--decode-tokens", 10**12], "--decode-tokens"),
        (["--epochs", 10**6], "--epochs"),
        (["--documents", 10**30], "--documents"),
        (["--steps", 10**30], "--steps"),
        (["--keep", 10**30], "--keep"),
        (["--seed", -1], "--seed is -1; it must be at least 0"),
        (["--seed", 2**64], "--seed"),
        (["--lr", 1e300], "--lr is 1e+300"),
        (["--draft-vocab", "9" * 5000], "--draft-vocab"),
        (["--follow", "x", "--follow-gb", 1e300], "--follow-gb"),
        (["--name", "x" * 300], "--name is 300 bytes long"),
        (["--chat-template", "nowhere.jinja"], "--chat-template nowhere.jinja does not exist"),
        (["--template-args", "thinking=true", "tools=1"], "--template-args holds 'tools=1'; NAME=VALUE"),
        (["--device", "cuda:99"], "--device is cuda:99"),
        *(
            (["--device", name], f"--device is {name}, which this")
            for name in ("xpu", "vulkan", "privateuseone", "ipu")
        ),
    ],
)
def test_what_cannot_be_used_is_said_before_anything_is_made(tmp_path, flags, said, capsys):
    assert said in error_line(["--runs", tmp_path / "runs", *flags], capsys)
    assert not (tmp_path / "runs").exists()


def test_memory_is_asked_for_before_it_is_taken(runs, capsys, monkeypatch):
    flags = ["--runs", runs, "--name", "giant", "--documents", 20, "--row-tokens", 256, "--batch-rows", 4000]
    assert train.cli([*map(str, flags), "--device", "cpu", "--dry-run"]) == 0  # plans for another machine
    monkeypatch.setattr(train, "memory_of", lambda device: 1e8)
    assert train.cli([*map(str, flags), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "a step needs about" in said and "--batch-rows 4000" in said and not (runs / "giant").exists()


# -------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--target", "gpt-5"], "gpt-5"),
        (["--row-tokens", "0"], "--row-tokens is 0"),
        (["--steps", "x"], "--steps"),
        (["--draft-vocab", "100000"], "--draft-vocab is 100000; it must be an integer in 1..262"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--aux-layers", "1,2"], "three"),
        (["--aux-layers", "a,b,c"], "a,b,c"),
        (["--device", "banana"], "banana"),
        (["--lr", "nan"], "--lr is nan"),
        (["--chunk", "0"], "--chunk is 0"),
        (["--resume"], "--name"),
        (["--device", "meta"], "--device meta"),
        (["--warmup", "3"], "--warmup is 3.0"),
        (["--name", "../x"], "--name is '../x'"),
        (["--follow-gb", "3"], "--follow-gb"),
        (["--dry-run", "--export", "a", "b"], "not allowed with"),
        (["--export", "nothing", "out"], "nothing"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(runs, flags, said, capsys):
    before = sorted(runs.rglob("*"))
    assert said in complaint(["--runs", str(runs), *flags], capsys)
    assert sorted(runs.rglob("*")) == before


def test_an_existing_run_is_not_overwritten(runs):
    (runs / "taken").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        train.main(["--runs", str(runs), "--name", "taken"])
    assert not list((runs / "taken").iterdir())
