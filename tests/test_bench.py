"""Claims about bench.py's command line: results end in JSON, and bad input is named before anything is measured."""

import json
import os
import sys

import pytest

import bench
from measuring import decoding


def test_the_last_line_of_the_train_suite_is_json(tmp_path, capsys):
    out = tmp_path / "full.json"
    flags = ["--size", "tiny", "--row-tokens", "64", "--share", "0.5", "--rounds", "1", "--threads", "1", "--out"]
    bench.main([*flags, str(out)])
    result, full = json.loads(capsys.readouterr().out.splitlines()[-1]), json.loads(out.read_text())
    baseline, ours = result["rows"]
    assert (baseline["implementation"], ours["implementation"]) == ("baseline", "ours eager")
    assert baseline["faster"] == 1.0 and ours["faster"] > 0 and 0 < ours["mfu"] < 1
    if sys.platform == "linux":
        assert 0 < ours["memory_share"] < 2 and len(result["peak_of_2t_over_t"]) == 1
    assert full["rows"] == result["rows"]
    assert {"step 0", "later steps", "attention", "loss", "backward", "keys", "optimizer"} < full["cells"][0][
        "breakdown"
    ].keys()


def test_the_shapes_suite_ends_in_json(capsys, tmp_path):
    bench.main(["--suite", "shapes", "--out", str(tmp_path / "out")])
    drafts = json.loads(capsys.readouterr().out.splitlines()[-1])["drafts"]
    v3 = drafts[0]
    assert v3["cache_bytes"] == [2 * 576, 2 * 40960]  # DESIGN.md's 576 and 40,960 numbers
    assert {row["draft"] for row in drafts} == {"deepseek-v3", "kimi-k2.5", "kimi-k3"}
    v3 = json.loads((tmp_path / "out").read_text())["cells"][0]["memory"]
    assert {"weights", "keys", "saved"} < v3["T 4096 100%"]["ours"].keys()
    assert sum(v3["T 131072 100%"]["ours"].values()) < sum(v3["T 131072 100%"]["dense"].values()) / 500


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rounds", "0"],
        ["--share", "1.5"],
        ["--row-tokens", "0"],
        ["--suite", "h200"],
        ["--row-tokens", "1000000"],
        ["--row-tokens", "1000000000000"],
        ["--threads", "1000000"],
        ["--k", "1000"],
        ["--temperature", "nan"],
        ["--new-tokens", "1000000000"],
        ["--prompts", ""],
        ["--model", ""],
        ["--run", ""],
        ["--out", ""],
    ],
)
def test_bad_input_is_named_with_exit_code_2(arguments, capsys):
    assert bench.cli(arguments) == 2
    said = capsys.readouterr().err
    assert arguments[0] in said and said.count("\n") == 1


def test_out_is_tried_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    (tmp_path / "there").write_text("mine")
    monkeypatch.setattr(bench, "SUITES", dict.fromkeys(bench.SUITES))  # whatever would measure fails
    for out, said in (
        (tmp_path, "is a folder"),
        (tmp_path / "there", "exists already"),
        (tmp_path / "a" / "b", "no such"),
    ):
        assert bench.cli(["--out", str(out)]) == 2
        assert said in capsys.readouterr().err and (tmp_path / "there").read_text() == "mine"

    def full(**_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bench.tempfile, "TemporaryFile", full)
    assert bench.cli(["--out", str(tmp_path / "new")]) == 2
    said = capsys.readouterr().err
    assert "--out" in said and "No space left" in said and said.count("\n") == 1


def test_caches_that_cannot_fit_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(decoding, "memory_bandwidth", lambda *_: 1e9)
    flags = ["--suite", "decode", "--size", "tiny", "--batch", "4096", "--context", str(1 << 20)]
    assert bench.cli(flags) == 2
    assert "error: --batch 4096 rows of --context 1048576 need about" in capsys.readouterr().err


def test_a_prompt_file_that_never_ends_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    args = bench.parse(["--suite", "decode", "--prompts", str(tmp_path / "fifo")])
    with pytest.raises(ValueError, match="--prompts .* is a FIFO"):
        decoding.load_prompts(args, None)
