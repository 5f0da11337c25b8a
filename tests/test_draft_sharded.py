"""Claims about FSDP2: one form of sharding trains exactly, and every other is refused."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard

from draft_deepseek import TTTLoss
from test_drafts import close_gradients, make_batch, make_chunks, make_draft, make_rows

FORMS = {  # what is sharded of a loss
    "the draft": lambda loss: [loss.draft],
    "the layer": lambda loss: [loss.draft.model.layers[0]],
    "one linear": lambda loss: [loss.draft.model.layers[0].self_attn.o_proj],
    "the draft, then the loss": lambda loss: [loss.draft, loss],
    "the head, then the loss": lambda loss: [loss.draft.lm_head, loss],
}


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_sharded_are_refused(alone, form):
    loss, rows, _ = sharded(FORMS[form])
    with pytest.raises(ValueError, match=r"shard fully_shard\(TTTLoss\(draft\)\), no part of it, and call that"):
        loss(rows)


def test_a_sharded_loss_refuses_to_learn_by_chunks(alone):
    loss, _, chunks = sharded(lambda loss: [loss])
    with pytest.raises(ValueError, match="sharded parameters"):
        loss.learn(chunks)


def sharded(what):
    """A loss with the modules that `what` names of it sharded, and the same rows for `forward` and for `learn`."""
    draft, _ = make_draft("deepseek-yarn")
    loss, batch = TTTLoss(draft), make_batch([[9, 7]], share=0.8)
    rows, chunks = make_rows(draft, batch), make_chunks(draft, batch, steps=7, chunk=8)
    for module in what(loss):
        fully_shard(module)
    return loss, rows, chunks


def halves():
    """What each of two ranks trains on."""
    return [make_batch([[9, 7]], share=0.8), make_batch([[16]], seed=1, share=0.5)]


def train_half(rank: int, store: str, variant: str, out: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    draft, _ = make_draft(variant)
    loss = fully_shard(TTTLoss(draft))
    rows = make_rows(draft, halves()[rank])
    value, _ = loss(rows)
    value.backward()
    gradients = {name: p.grad.full_tensor() for name, p in draft.named_parameters() if p.grad is not None}
    if rank == 0:
        torch.save(gradients, out)
    dist.barrier()
    os._exit(0)  # gloo's threads may abort a process that ends in its own time


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["deepseek-yarn", "kimi"])
def test_a_sharded_loss_trains_as_one_process_does(tmp_path, variant):
    mp.spawn(train_half, (str(tmp_path / "store"), variant, str(tmp_path / "out")), nprocs=2)
    torch.manual_seed(0)
    draft, _ = make_draft(variant)
    loss, batches = TTTLoss(draft), halves()
    for batch in batches:  # each rank's loss is over its own counts, and FSDP takes the mean over ranks
        (loss(make_rows(draft, batch))[0] / 2).backward()
    want = {name: p.grad for name, p in draft.named_parameters() if p.grad is not None}
    close_gradients(torch.load(tmp_path / "out"), want)
