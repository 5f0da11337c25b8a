"""Claims about measuring decoding: what is compared drafts the same, and the numbers are those of the rounds."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from transformers.modeling_outputs import BaseModelOutput

import bench
from draft_deepseek import export_config, export_state
from measuring import decoding, step
from serving.decode import Drafter
from tests.helpers import PROMPTS, Table, attention_target, exact_joint, small_draft


def bench_args(*flags):
    return bench.parse(["--suite", "decode", "--size", "tiny", "--threads", "1", "--rounds", "1", *map(str, flags)])


@pytest.mark.parametrize(("name", "config"), [("deepseek-v3", {"fc_norm": True}), ("kimi-k3", {})])
def test_bytes_are_those_of_the_weights_that_a_chain_reads_and_of_the_caches(name, config):
    draft = step.DRAFTS[name](step.make_config(name, "tiny", **config)).to(torch.bfloat16)
    draft.set_vocab_mapping(torch.arange(96))
    sizes = {key: p.numel() for key, p in draft.named_parameters()}
    every_step = sum(n for key, n in sizes.items() if not key.startswith(("model.embed_tokens", "model.fc")))
    once = sum(n for key, n in sizes.items() if key.startswith("model.fc") or "kv_a_proj" in key)
    up = sizes["model.layers.0.self_attn.kv_b_proj.weight"]
    for kind, again in ((Drafter, 0), (decoding.NaiveDrafter, up)):
        moved = decoding.chain_bytes(draft, 4, 50, 3, kind is decoding.NaiveDrafter)
        assert moved["weights"] == pytest.approx(2 * (3 * every_step + once + again) / (4 * 3))
        caches = [x for key, x in kind(draft, 4, 47, 3).named_buffers(recurse=False) if key != "ids" and x is not None]
        assert moved["cache"] == sum(x.numel() * x.element_size() for x in caches) / 4


@pytest.mark.parametrize("name", step.DRAFTS)
def test_the_naive_caches_draft_the_same_and_a_wrong_one_stops_the_bench(name, monkeypatch):
    args = bench_args("--draft", name, "--compile", "off", "--context", 20, "--batch", 2, "--k", 3, "--temperature", 1)
    draft = step.make_draft(step.Cell(draft=name, size="tiny"))
    monkeypatch.setattr(decoding, "take_turns", lambda functions, args: dict.fromkeys(functions, [0.5]))
    monkeypatch.setattr(decoding, "memory_bandwidth", lambda *_: 1e9)
    rows, _, _ = decoding.time_chains(args, {name: draft})
    assert [row["implementation"] for row in rows] == ["K/V eager", "latent eager"]
    for row in rows:
        assert (row["k"], row["temperature"], row["drafted_per_s"], row["faster"]) == (3, 1.0, 2 * 3 / 0.5, 1.0)
        assert row["bytes_per_s"] == pytest.approx(sum(row["bytes"].values()) * 12)
    attend_right = Drafter.attend
    monkeypatch.setattr(Drafter, "attend", lambda self, q, position: attend_right(self, q, position - 1))
    with pytest.raises(SystemExit, match="latent eager differs from K/V eager"):
        decoding.time_chains(args, {name: draft})


@pytest.fixture
def run_directory(tmp_path):
    """An attention target and an exported draft for it."""
    target, draft = attention_target(), small_draft()
    draft.config.eagle_aux_hidden_state_layer_ids = [1, 2, 3]  # as engines count
    target.model.save_pretrained(tmp_path / "target")
    (tmp_path / "run" / "draft").mkdir(parents=True)
    (tmp_path / "run" / "draft" / "config.json").write_text(json.dumps(export_config(draft, torch.float32)))
    save_file(export_state(draft, torch.float32), tmp_path / "run" / "draft" / "model.safetensors")
    (tmp_path / "prompts.json").write_text(json.dumps([prompt.tolist() for prompt in PROMPTS]))
    return tmp_path


def test_a_run_is_decoded_and_its_numbers_are_those_of_its_rounds(run_directory):
    flags = ["--model", run_directory / "target", "--prompts", run_directory / "prompts.json", "--new-tokens", 12]
    args = bench_args("--run", run_directory / "run", "--k", 2, "--temperature", 0.8, "--top-p", 0.9, *flags)
    result = bench.suite_decode(args)
    for row, cell in zip(result["rows"], result["cells"], strict=True):
        assert (row["k"], row["new_tokens"], row["prompts"]) == (2, 12, 3)
        rounds = sum(cell["rounds"], [])
        assert row["rounds"] == len(rounds) and row["accept_length"] == pytest.approx(33 / len(rounds))
        assert row["tokens_per_forward"] == pytest.approx(36 / (len(rounds) + 3))  # a forward a round, one a prompt
        assert row["by_position"] == {"0-2K": row["accept_length"]}
        assert row["faster"] == pytest.approx(sum(cell["plain_seconds"]) / sum(cell["seconds"]))
        first = sum(round.accepted >= 1 for round in rounds) / sum(round.drafted >= 1 for round in rounds)
        assert row["by_depth"][0] == pytest.approx(first) and len(row["by_depth"]) == 2
    assert [row["temperature"] for row in result["rows"]] == [0.0, 0.8] and result["rows"][0]["identical"] == 3
    target = decoding.open_run(args)[1]
    assert target.aux_layers == (0, 1, 2)
    greedy = [target.greedy(prompt, 12).tolist() for prompt in PROMPTS]
    assert [cell["tokens"] == greedy for cell in result["cells"]] == [True, False]


def test_plain_sampling_draws_what_the_target_says():
    prompt, rows = torch.tensor([4]), 1500
    target = SimpleNamespace(**{name: getattr(Table(), name) for name in ("device", "cache_name", "head")})
    target.backbone = lambda input_ids, use_cache: BaseModelOutput(last_hidden_state=Table().states(input_ids)[1])
    texts = [tuple(decoding.plain(target, prompt, 2, 0.7, 0.8, seed).tolist()) for seed in range(rows)]
    want = exact_joint([4], 2, 0.7, 0.8)
    assert sum(abs(texts.count(text) / rows - p) for text, p in want.items()) < 0.15 and set(texts) <= want.keys()


def test_unique_bigrams_are_pooled_over_texts():
    assert decoding.unique_bigrams([[1, 2, 1, 2, 1], [1, 2], [3]]) == 3 / 5


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--run", "nowhere"], "nowhere is no draft"),
        (["--run", "run"], "name the directory with --model"),
        (["--run", "run", "--model", "target", "--prompts", "bad.json"], "no list of lists of token ids in 0..11"),
        (["--k", "0"], "--k is 0"),
        (["--top-p", "0"], "--top-p is 0"),
    ],
)
def test_bad_flags_are_one_line_and_exit_code_2(run_directory, change, said, monkeypatch, capsys):
    (run_directory / "bad.json").write_text("[[1, 12]]")
    monkeypatch.chdir(run_directory)
    assert bench.cli(["--suite", "decode", "--size", "tiny", *change]) == 2
    message = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert len(message) == 1 and said in message[0]
