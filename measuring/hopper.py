"""Cases for tools that compile the graphs of a training step, and that of evaluation, for Hopper, or run what was
compiled, without a GPU.

`compiled_keys` and `compiled_chunk`: a real draft in bf16, every slot supervised, tensors on "cuda" (fake ones in such
a tool): the function to be compiled with fullgraph and differentiated, and its inputs. `hopper_chain`: the same for a
chain of drafted tokens, which is not differentiated.

`keys`, `chunk` and `unroll`: a small draft in numbers, on the CPU: the module to be compiled, its inputs, what it
should return (plain attention, not compiled) and how far off it may be.

Shapes: B rows, T slots, A anchors, S steps, Vd draft vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import nn

from draft_deepseek import PIECE, Keys, Leaves, RowBatch, RowChunks, TTTLoss, block_mask
from measuring.step import DRAFTS, STEPS, make_config
from serving.decode import Drafter

# ------------------------------------------------------------------------------------------- real drafts, compiled


def real_loss(size: str) -> TTTLoss:
    kind = "kimi-k3" if size == "kimi-k3" else "deepseek-v3"
    with torch.device("cuda"):
        draft = DRAFTS[kind](make_config(kind, size))
    draft.freeze_embeddings()
    return TTTLoss(draft)


def real_inputs(loss: TTTLoss, slots: int) -> tuple:
    """(tokens [1,T+1], position [1,T], features) of one document."""
    slot = torch.arange(slots + 1, device="cuda")[None]
    cfg = loss.draft.config
    width = cfg.num_aux_hidden_states * cfg.target_hidden_size
    return slot, slot[:, :-1].clone(), torch.zeros(1, slots, width, dtype=torch.bfloat16, device="cuda")


def in_bf16(function):
    def run(*inputs):
        with torch.autocast("cuda", torch.bfloat16):
            return function(*inputs)

    return run


def compiled_keys(size="deepseek-v3", slots=PIECE):
    loss = real_loss(size)
    return in_bf16(loss.keys), real_inputs(loss, slots)


def compiled_chunk(size="deepseek-v3", slots=4096, chunk=1024, steps=STEPS, loss="ce"):
    """The first `chunk` anchors of the row; its keys lie at static addresses, as `TTTLoss.learn` passes them."""
    ttt_loss = real_loss(size)
    ttt_loss.loss = loss
    tokens, position, features = real_inputs(ttt_loss, slots)
    with torch.no_grad():
        leaves = Leaves(in_bf16(ttt_loss.keys)(tokens, position, features), slots)
    tokens = position
    anchors, document = tokens[:, :chunk].contiguous(), torch.zeros_like(tokens)
    index = torch.zeros(steps, 1, chunk, dtype=torch.long, device="cuda")
    teacher = torch.zeros(1, chunk + steps - 1, ttt_loss.draft.config.draft_vocab_size, device="cuda")
    counts, mask = torch.ones(steps, device="cuda"), block_mask(anchors, document)
    rows = (tokens, document, position, features, anchors, teacher, index, index.bool(), counts, mask)
    alpha = torch.ones(steps, device="cuda") if loss == "lambda" else None
    # a tool may want the inputs as plain tensors and leaves, so no Leaves object is handed over
    return in_bf16(lambda keys, rows: ttt_loss.chunk(keys, rows)[0]), (leaves.keys, RowBatch(*rows, alpha))


def hopper_chain(size="deepseek-v3", slots=4096, k=7, temperature=0.0, top_p=1.0):
    """The chain of a real draft in bf16, one row, for a compile check under fake CUDA tensors: no GPU is touched.

    Returns (function, its inputs). At full vocabulary, since a fake vocabulary map cannot be read.
    """
    kind = "kimi-k3" if size == "kimi-k3" else "deepseek-v3"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            draft = DRAFTS[kind](make_config(kind, size, draft_vocab_size=None)).requires_grad_(False)
            features = torch.zeros(1, k + 1, 3 * draft.config.hidden_size)
    finally:
        torch.set_default_dtype(torch.float32)
    with torch.device("cuda"):
        tokens, start = torch.zeros(1, k + 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long)
        drafter, u = Drafter(draft, 1, slots, k, temperature, top_p), torch.zeros(1, k)
    return drafter.forward, (tokens, features, start, start + 1, u)


# ------------------------------------------------------------------------------------------ small drafts, in numbers

WIDE = dict(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)  # 192 wide: the tiles pinned for Hopper
LAYOUTS = {  # the documents' lengths in each row; a negative one is padding
    "packed": ((150, 100, 260, -2),),
    "one document": ((512,),),
    "two rows": ((150, 100, 260, -2), (1, 400, 60, -51)),
    "T 640": ((129, 127, 300, 84),),
}


def small_draft(kind: str, wide: bool, heads: int) -> nn.Module:
    """Weights large enough that masks, angles and the order of steps show in every number."""
    changes = WIDE if wide else dict(qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)  # FlexAttention's least
    draft = DRAFTS[kind](make_config(kind, "tiny", num_attention_heads=heads, **changes))
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in draft.parameters():
            noise = torch.randn(p.shape, generator=g)
            p.copy_(noise * p.shape[-1] ** -0.5 if p.dim() > 1 else 1 + 0.3 * noise)
    ids = torch.randperm(draft.config.vocab_size, generator=g)[: draft.config.draft_vocab_size]
    draft.set_vocab_mapping(ids)
    draft.freeze_embeddings()
    return draft


def small_chunks(draft: nn.Module, layout, share: float, steps: int, chunk: int, dtype: torch.dtype) -> RowChunks:
    g, cfg = torch.Generator().manual_seed(0), draft.config
    document = torch.tensor([[i if n > 0 else -1 for i, n in enumerate(row) for _ in range(abs(n))] for row in layout])
    position = torch.tensor([[j for n in row for j in range(abs(n))] for row in layout])
    (b, t), width, real = document.shape, cfg.target_hidden_size, document >= 0
    head = torch.randn(cfg.vocab_size, width, generator=g) * width**-0.5
    head[draft.draft_ids] *= 2
    return RowChunks(
        draft.draft_ids,
        tokens=torch.randint(cfg.vocab_size, (b, t), generator=g) * real,
        document=document,
        position=position * real,
        features=torch.randn(b, t, 3 * width, generator=g).to(dtype),
        loss_mask=(torch.rand(b, t, generator=g) < share) & real,
        last_hidden=torch.randn(b, t, width, generator=g),
        head=lambda x: x @ head.T,
        steps=steps,
        chunk=chunk,
    )


class Part(nn.Module):
    """One of the graphs of a loss, under autocast with bf16; with or without gradients."""

    def __init__(self, loss: TTTLoss, part: str, bf16: bool, learns: bool = True):
        super().__init__()
        self.loss, self.part, self.bf16, self.learns = loss.requires_grad_(learns), part, bf16, learns

    def forward(self, *inputs):
        device = self.loss.draft.lm_head.weight.device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.bf16), torch.set_grad_enabled(self.learns):
            made = getattr(self.loss, self.part)(*inputs)
        if self.part == "unroll":
            made = (made,)
        if self.part == "chunk":
            loss, metrics = made
            made = loss, *(x for x in metrics if x is not None)
        # v is a view of something larger: it would be made outside of the graph, and so would its gradient
        return tuple(x.clone(memory_format=torch.contiguous_format) for x in made if x is not None)


def small(kind, layout, share, steps, chunk, bf16, wide, heads, loss):
    draft = small_draft(kind, wide, heads)
    chunks = small_chunks(draft, LAYOUTS[layout], share, steps, chunk, torch.bfloat16 if bf16 else torch.float32)
    return TTTLoss(draft, loss=loss), chunks, dict(tolerance=6e-2 if bf16 else 1e-4)


def keys(kind="deepseek-v3", layout="packed", bf16=False, wide=False, heads=2):
    loss, chunks, bound = small(kind, layout, 1.0, 2, 128, bf16, wide, heads, "ce")
    return dict(
        module=Part(loss, "keys", bf16),
        inputs=(F.pad(chunks.tokens, (0, 1)), chunks.position, chunks.features),
        **bound,
    )


def chunk(
    kind="deepseek-v3", layout="packed", share=1.0, steps=2, chunk=384, number=0, bf16=False, wide=False, heads=2,
    loss="ce", mean_alpha=True, learns=True, part="chunk",
):  # fmt: skip
    """Chunk `number` of the rows. mean_alpha: is it known to the "lambda" loss, or found in the same graph?"""
    ttt_loss, chunks, bound = small(kind, layout, share, steps, chunk, bf16, wide, heads, loss)
    if loss == "lambda" and mean_alpha:
        chunks.mean_alpha = torch.full((steps,), 0.4)
    made = Part(ttt_loss, "keys", bf16)(F.pad(chunks.tokens, (0, 1)), chunks.position, chunks.features)
    made = [x.detach().requires_grad_(learns) for x in made]
    rows, module = list(chunks)[number], Part(ttt_loss, part, bf16, learns)
    gate = [None] if len(made) < 6 else []
    leaves = Keys(*made[:3], *gate, *made[3:])
    inputs = leaves, rows._replace(block_mask=block_mask(rows.anchors, rows.document))
    return dict(module=module, inputs=inputs, expected=lambda: module(leaves, rows), **bound)


def unroll(**how):
    """The steps of a chunk without the loss, as evaluation takes them."""
    return chunk(learns=False, part="unroll", **how)
