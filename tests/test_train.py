"""Claims about the loop: a run trains, evaluates and exports, and what a step does with its batches."""

import pytest
import torch
from safetensors.torch import load_file

import train
from draft_deepseek import TTTLoss
from tests.helpers import command, log, toy_batch, toy_draft, weights
from training.ranks import Ranks


@pytest.mark.parametrize("preset", ["deepseek-v3", "kimi-k3"])
def test_a_run_trains_evaluates_and_exports(runs, preset, capsys):
    train.main(
        command(runs, f"run-{preset}", "--target", preset, "--steps", 4, "--ttt-steps", 7, "--export-dtype", "float32")
    )
    output = capsys.readouterr().out
    own, said = output[output.index("on the held-out documents' own text (") :].split("on what the target says")
    assert [line.split()[:2] for line in own.splitlines()[1:3]] == [["greedy", "simulated"], ["sampled", "simulated"]]
    assert "behind 1 held-out prompts cut mid-text, 9 new tokens each:\n  sampled   decoded" in said
    assert "1 of 1 identical" in said and "warning: the target would have said only" in said  # the built-in one as well
    run = runs / f"run-{preset}"
    assert [line["step"] for line in log(runs, run.name)] == [1, 2, 3, 4]
    state, trained = load_file(run / "draft" / "model.safetensors"), weights(runs, run.name, 4)
    target = load_file(runs / f"tiny-{preset}" / "model.safetensors")
    embedding = next(x for name, x in target.items() if name.endswith("embed_tokens.weight"))
    assert torch.equal(state["embed_tokens.weight"], embedding)  # engines share it: never trained
    assert torch.equal(state["layers.0.mlp.up_proj.weight"], trained["model.layers.0.mlp.up_proj.weight"])
    norms = torch.cat([x for name, x in state.items() if x.ndim == 1 and x.is_floating_point()])
    assert (norms == 1).float().mean() < 0.01  # float32 masters: norms move
    with pytest.raises(ValueError, match="is complete"):
        train.main(command(runs, run.name, "--resume"))


def test_nothing_supervised_moves_nothing():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu"))
    optimizer = train.make_optimizer(args, parameters)
    text = torch.randint(32, (1, 20))
    learned, empty = (
        toy_batch(draft, text, mask.expand_as(text)) for mask in (torch.ones(20).bool(), torch.zeros(20).bool())
    )
    loss = TTTLoss(draft)
    train.optimizer_step(args, Ranks(), loss, [learned], optimizer, parameters)  # momentum that could move them
    before = [p.clone() for p in parameters]
    line = train.optimizer_step(args, Ranks(), loss, [empty], optimizer, parameters)
    assert line["supervised"] == 0 and line["loss"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_the_lambda_loss_does_not_depend_on_how_rows_are_grouped():
    draft = toy_draft("deepseek", 1)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    args = train.resolve(train.Settings(device="cpu", loss="lambda", clip=1e9))
    text = torch.randint(32, (3, 20), generator=torch.Generator().manual_seed(0))
    masks = torch.arange(20) < torch.tensor([[5], [12], [20]])
    whole, found = toy_batch(draft, text, masks), []
    for window in ([whole], [toy_batch(draft, text[i : i + 1], masks[i : i + 1]) for i in range(3)]):
        optimizer = train.make_optimizer(args, parameters)
        optimizer.step = lambda: found.append([p.grad.clone() for p in parameters])  # noqa: B023
        line = train.optimizer_step(args, Ranks(), TTTLoss(draft, loss="lambda"), window, optimizer, parameters)
        found[-1].append(torch.tensor(line["loss"]))
    for one, many in zip(*found, strict=True):
        assert (one - many).abs().max() <= 1e-5 * one.abs().max()
