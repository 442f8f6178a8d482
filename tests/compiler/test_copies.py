"""A copy of a compiled module is compiled in the same way: its reads are captured, in one graph."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses
import fxpasses.inspect
from fxpasses.dynamo import flags


class Reader(nn.Module):
    """Reads its batch in each of three layers; without the capture flags, each read breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[: lengths.sum().item()]
        return x


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": saved_and_loaded,
    "copy of a copy": lambda model: copy.deepcopy(copy.deepcopy(model)),
}


@pytest.mark.parametrize("made", COPIES.values(), ids=COPIES.keys())
@pytest.mark.parametrize("after_a_call", [False, True], ids=["before a call", "after a call"])
def test_a_copy_is_one_graph(made: Callable[[Any], Any], after_a_call: bool) -> None:
    model, batch = Reader(), (torch.randn(8, 4), torch.tensor([3, 4]))
    compiled = fxpasses.compile(model, options={"fastpack.lowering": "eager"})
    with torch._dynamo.config.patch(dict.fromkeys(flags.FLAGS, False)):
        if after_a_call:
            compiled(*batch)
        twin = made(compiled)
        torch._dynamo.reset()
        with fxpasses.inspect.record() as record:
            result = twin(*batch)
        assert not any(getattr(torch._dynamo.config, name) for name in flags.FLAGS)
    assert len(record.graphs) == 1
    assert record.graphs[0].options["lowering"] == "eager"
    assert torch.equal(result, model(*batch))
