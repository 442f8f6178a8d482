"""Sharded, split and pipelined training: the numbers of eager mode bit for bit, on every rank, in few graphs.

Under stock PyTorch each rank reads its batch's numbers in every block, and once more where a checkpoint computes it
again, and builds as many masks. The table of arrangements in docs/distributed.md says what these tests assert.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed.arrangements import (
    Arrangement,
    Outcome,
    accumulated,
    compare,
    fully_sharded,
    in_context_parallel,
    part_of_the_tokens,
    pipelined,
    resume,
    scheduled,
    split,
    with_replicated_lengths,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.sharded_models import BLOCKS, TOKENS, WIDTH

OFFLOAD = {"fastpack.offload": "disk", "fastpack.offload.min_bytes": 0}
# Torch 2.11's schedule of a pipeline does not put to the vote, and read, whether all stages know their shapes.
VOTES = 0 if torch.__version__ < "2.12" else 1
BLOCK_INPUTS = BLOCKS * 4 * TOKENS * WIDTH  # bytes: all that checkpointed blocks save

# For each arrangement: what it is, what each rank is to see, and on how many ranks.
FAST = {
    "FSDP2, wrapped blocks, offload": (Arrangement(fully_sharded, options=OFFLOAD), Outcome(moved=BLOCK_INPUTS), 2),
    "FSDP2, wrapped blocks, whole model": (Arrangement(fully_sharded, {"whole": True}), Outcome(breaks=1), 2),
    "FSDP2, selective checkpoints": (
        Arrangement(fully_sharded, {"wrapped": False, "call": "selective"}), Outcome(eager_reads=20, eager_masks=8), 2,
    ),
    "sequence parallel, dropout": (
        Arrangement(split, {"sequence": True, "call": "checkpointed", "dropout": 0.2}, same_batch=2), Outcome(), 2,
    ),
    "pipeline stages": (
        Arrangement(pipelined, step=scheduled, same_batch=2),
        Outcome(reads=14 + VOTES, masks=2, eager_reads=16 + VOTES), 2,
    ),
    "HSDP": (Arrangement(fully_sharded, {"mesh": (2, 2)}), Outcome(), 4),
}  # fmt: skip
SLOW = {
    "FSDP2, accumulation": (
        Arrangement(fully_sharded, step=accumulated), Outcome(reads=14, masks=2, eager_reads=32, eager_masks=8), 2,
    ),
    "tensor parallel": (
        Arrangement(split, {"call": "checkpointed"}, same_batch=2), Outcome(), 2,
    ),
    "context parallel": (Arrangement(in_context_parallel, step=part_of_the_tokens, same_batch=2), Outcome(), 2),
    "FSDP2 and tensor parallel": (
        Arrangement(fully_sharded, {"mesh": (2, 2), "tensors": True}, same_batch=2), Outcome(), 4,
    ),
    "FSDP2, wrapped blocks": (Arrangement(fully_sharded), Outcome(), 2),
    "FSDP2, torch.utils.checkpoint": (
        Arrangement(fully_sharded, {"wrapped": False, "call": "checkpointed"}), Outcome(), 2,
    ),
    "FSDP2, no checkpoints": (
        Arrangement(fully_sharded, {"wrapped": False}), Outcome(eager_reads=8, eager_masks=2), 2,
    ),
    "FSDP2, bfloat16": (Arrangement(fully_sharded, {"precise": False}), Outcome(), 2),
    "tensor parallel, no checkpoints": (
        Arrangement(split, same_batch=2), Outcome(eager_reads=8, eager_masks=2), 2,
    ),
    "tensor parallel, wrapped blocks, offload": (
        Arrangement(split, {"by_block": True}, 2, options=OFFLOAD), Outcome(moved=BLOCK_INPUTS), 2,
    ),
    "tensor parallel, DTensor lengths": (
        Arrangement(split, {"call": "replicated"}, 2, with_replicated_lengths),
        Outcome(reads=12, eager_reads=13, eager_masks=2), 2,
    ),
    "sequence parallel, no checkpoints": (
        Arrangement(split, {"sequence": True}, same_batch=2), Outcome(eager_reads=8, eager_masks=2), 2,
    ),
    "sequence parallel, selective checkpoints": (
        # Its collectives cannot be brought into eager mode's order: it runs as it was captured, with a warning.
        Arrangement(split, {"sequence": True, "call": "selective"}, same_batch=2, options={"fastpack.strict": False}),
        Outcome(graphs=10, eager_reads=20, eager_masks=8), 2,
    ),
    "FSDP2 and sequence parallel": (
        Arrangement(fully_sharded, {"mesh": (2, 2), "tensors": True, "sequence": True, "whole": True}, same_batch=2),
        Outcome(graphs=10, breaks=1), 4,
    ),
}  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_numbers_of_eager_mode_in_few_graphs_and_reads(name: str) -> None:
    arrangement, expected, world = (FAST | SLOW)[name]
    for outcome in run_on_ranks(compare, world=world, args=(arrangement,)):
        assert outcome == expected.on_this_torch(outcome)


@pytest.mark.slow
def test_sequence_parallel_with_checkpoints_and_dropout_under_inductor() -> None:
    """Inductor draws other random numbers than eager mode, unless `fallback_random` is on. What it fuses is rounded
    otherwise, which AdamW makes large where gradients are nearly 0."""
    plan = {"sequence": True, "call": "checkpointed", "dropout": 0.2}
    options = {"fastpack.lowering": "inductor", "fallback_random": True}
    arrangement = Arrangement(split, plan, same_batch=2, options=options, optimizer=torch.optim.SGD)
    for outcome in run_on_ranks(compare, args=(arrangement,), seconds=280):
        assert outcome.difference < 1e-5 and outcome.graphs == 1 and outcome.reads == 7


def test_a_distributed_checkpoint_continues_elsewhere(tmp_path: Path) -> None:
    assert run_on_ranks(resume, args=(str(tmp_path),)) == [Outcome(), Outcome()]
