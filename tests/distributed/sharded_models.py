"""A decoder that asks its packed batch in every block, and how its blocks are spread over ranks and called."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

# Torch 2.13 has a new name for it.
_gather = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

WIDTH, HEADS, TOKENS, BLOCKS = 16, 2, 16, 2


class Attention(nn.Module):
    """Heads are counted in what the projections give: with tensor parallel, a rank has some of them.

    gathered: each rank has a part of the tokens, and asks the others for their keys and values (context parallel).
    """

    def __init__(self, gathered: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.gathered = gathered

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        rows = torch.arange(x.shape[0])
        if self.gathered:
            rows = rows + x.shape[0] * torch.distributed.get_rank()
            k, v = (_gather(part, 0, torch.distributed.group.WORLD) for part in (k, v))
        q, k, v = (part.view(part.shape[0], -1, WIDTH // HEADS).transpose(0, 1) for part in (q, k, v))
        columns, start = torch.arange(k.shape[1]), 0
        mask = torch.full((len(rows), len(columns)), float("-inf"), dtype=q.dtype)
        for length in lengths.tolist():
            of_row, of_column = ((at >= start) & (at < start + length) for at in (rows, columns))
            mask[of_row[:, None] & of_column[None]] = 0
            start += length
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(0, 1).reshape(x.shape[0], -1)) * (1 + lengths.max().item() / TOKENS)


class Block(nn.Module):
    def __init__(self, gathered: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), Attention(gathered)
        self.up, self.down, self.dropout = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH), dropout

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), lengths)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.dropout)


class Decoder(nn.Module):
    """call: how a block is called: `called`, or under a checkpoint."""

    def __init__(self, call: str = "called", **of_block: object) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(**of_block) for _ in range(BLOCKS))  # type: ignore[arg-type]
        self.call = CALLS[call]

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.call(block, x, lengths)
        return self.head(self.norm(x))


def called(block: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return block(x, lengths)


def checkpointed(block: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    return checkpoint(block, x, lengths, use_reentrant=False)


def selective(block: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """Matrix products are kept, the rest is computed again."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(block, x, lengths, use_reentrant=False, context_fn=contexts)


def replicated(block: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
    """`lengths` is a DTensor, of which a number is asked, and which the block is given as a plain tensor."""
    return block(x, lengths.to_local()) * (1 + lengths.max().item() / TOKENS)  # type: ignore[attr-defined]


CALLS = {function.__name__: function for function in (called, checkpointed, selective, replicated)}


def tensor_parallel(model: Decoder, mesh: DeviceMesh, sequence: bool = False) -> Decoder:
    """Split projections by heads and by hidden units; with `sequence`, what lies between by tokens."""
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan: dict[str, object] = {f"attention.{name}": columns for name in "qkv"}
    plan |= {"attention.out": rows, "up": columns, "down": rows}
    if sequence:
        whole = PrepareModuleInput(input_layouts=(Shard(0), None), desired_input_layouts=(Replicate(), None))
        plan |= {"norm1": SequenceParallel(sequence_dim=0), "norm2": SequenceParallel(sequence_dim=0)}
        plan |= {"attention": whole, "attention.out": RowwiseParallel(output_layouts=Shard(0))}
        plan |= {"up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel(output_layouts=Shard(0))}
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0)),
            "norm": SequenceParallel(sequence_dim=0),
            "head": ColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)  # type: ignore[arg-type]
    return model
