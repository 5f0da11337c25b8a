"""How the loss is computed: compiled or not, in which precision."""

import functools

import torch

from draft_deepseek import BLOCK, TTTLoss, attend, block_mask
from training.settings import Settings


@functools.cache
def flex_compiles(device: str) -> bool:
    """Whether FlexAttention compiles for this device; if not, says so, and plain attention takes its place."""
    q = torch.randn(1, 1, BLOCK, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    slots = torch.arange(BLOCK, device=device)[None]
    mask = block_mask(slots, torch.zeros_like(slots))
    try:
        o, lse = torch.compile(attend, fullgraph=True)(q, q, q, mask, 0.125)
        (o.sum() + lse.sum()).backward()
    except Exception as error:  # whatever the compilers of some device raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"FlexAttention does not compile for {device} ({reason}); plain attention takes more time and memory")
        return False
    return True


def compile_loss(loss: TTTLoss, mode: str | None, **options) -> None:
    """Make the keys of a row and the S-step loss of a chunk one static graph each, whatever the row's number of chunks,
    and the steps alone, for evaluation, another; the only place that compiles. mode: off, or torch.compile's; its other
    options as they are.

    Chunks are captured as CUDA graphs by max-autotune. The keys are a few large kernels, which gain nothing by it.
    """
    if mode == "off":
        return
    plain = "max-autotune-no-cudagraphs" if mode == "max-autotune" else mode
    loss.keys = torch.compile(loss.keys, fullgraph=True, dynamic=False, mode=plain, **options)
    loss.chunk = torch.compile(loss.chunk, fullgraph=True, dynamic=False, mode=mode, **options)
    loss.unroll = torch.compile(loss.unroll, fullgraph=True, dynamic=False, mode=plain, **options)


def autocast(args: Settings):
    return torch.autocast(torch.device(args.device).type, torch.bfloat16, enabled=args.precision == "bfloat16")
