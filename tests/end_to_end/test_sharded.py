"""Under `fully_shard` (FSDP2), which gathers a layer's parameters before it runs: each layer is a graph of its own."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import fxpasses.inspect
from tests.end_to_end.test_training_step import Decoder, batches, warm_step
from tests.support import host_reads, reports_of

pytestmark = pytest.mark.usefixtures("single_process_group")

OPTIONS = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}


def sharded(layers: int, checkpointed: bool, compiled: str = "") -> nn.Module:
    """compiled: "" for nothing, "layers" for each by itself, "model" for all."""
    torch.manual_seed(0)
    model = Decoder(layers, checkpointed)
    for layer in model.layers:
        if compiled == "layers":
            layer.compile(backend="fastpack", options=OPTIONS)
        fully_shard(layer)
    fully_shard(model)
    if compiled == "model":
        model.compile(backend="fastpack", options=OPTIONS)
    return model


# Dynamo captures no checkpoint whose layer has FSDP's hooks: such models are compiled layer by layer.
@pytest.mark.parametrize(("compiled", "checkpointed"), [("layers", False), ("layers", True), ("model", False)])
def test_numbers_equal_eager_mode_bit_for_bit(compiled: str, checkpointed: bool) -> None:
    expected, actual = sharded(3, checkpointed), sharded(3, checkpointed, compiled)
    with fxpasses.inspect.record() as record:
        for x, lengths in batches():
            losses = [model(x, lengths).square().mean() for model in (expected, actual)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            for wanted, found in zip(expected.parameters(), actual.parameters(), strict=True):
                assert torch.equal(wanted.grad.to_local(), found.grad.to_local())
    assert len(record.graphs) == 1  # that of a layer
    assert reports_of(record)[0].changes


def test_layers_that_are_compiled_one_by_one_share_a_prologue() -> None:
    reads = [host_reads(warm_step(sharded(layers, True, "layers"), batches()[0])) for layers in (1, 4)]
    assert reads[0] == reads[1] > 0
