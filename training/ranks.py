"""The processes of one training run."""

import contextlib
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from training.settings import Settings


class Ranks(NamedTuple):
    """This process among those of `torchrun`; alone without it."""

    rank: int = 0
    world: int = 1

    def sum(self, x: Tensor) -> Tensor:
        if self.world > 1:
            dist.all_reduce(x)
        return x

    def share(self, module: nn.Module) -> None:
        """The first rank's parameters and buffers, on all."""
        if self.world > 1:
            for x in [*module.parameters(), *module.buffers()]:
                dist.broadcast(x.data, 0)

    def print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def gather(self, items: list) -> list:
        """The items of all ranks, in their order."""
        if self.world == 1:
            return items
        found = [None] * self.world
        dist.all_gather_object(found, items)
        return [item for part in found for item in part]

    def first_alone(self):
        """Rank 0 goes through the block first, the others after it."""
        return first_alone(self) if self.world > 1 else contextlib.nullcontext()


@contextlib.contextmanager
def first_alone(ranks: Ranks):
    if ranks.rank > 0:
        dist.barrier()
    yield
    if ranks.rank == 0:
        dist.barrier()


@contextlib.contextmanager
def join_ranks(args: Settings):
    if "WORLD_SIZE" not in os.environ:
        yield Ranks()
        return
    local = int(os.environ.get("LOCAL_RANK", 0))
    if torch.device(args.device).type == "cuda":
        args.device = f"cuda:{local}"
        torch.cuda.set_device(local)
    dist.init_process_group("nccl" if args.device.startswith("cuda") else "gloo")
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()
