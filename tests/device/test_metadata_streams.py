"""Branches that a program puts on a second stream, with the waits that it writes around them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxpasses.inspect
from tests.device import simulated
from tests.device.simulated import counts
from tests.support import compiled

TOKENS, WIDTH = 8, 16


class Branches(nn.Module):
    """Two heads, one of them on a stream of its own; both read the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.stream = torch.Stream(device="sim")

    def forward(self, x, lengths):
        main = torch.accelerator.current_stream()
        self.stream.wait_stream(main)
        with self.stream:
            side = torch.tanh(self.other(x)) * lengths.max().item()
        own = torch.relu(self.one(x)) * lengths.max().item()
        main.wait_stream(self.stream)
        return own + side


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_branches_on_two_streams_are_one_graph_without_reads(lowering):
    """Both compile as under stock PyTorch, which runs them on one stream here. AOTAutograd 2.13 fails at gradients."""
    model = Branches().to("sim")
    with fxpasses.inspect.record() as record, torch.set_grad_enabled(lowering == "eager"):
        program = compiled(model, lowering)
        for number, lengths in enumerate(([1, 7], [4, 4], [2, 6])):
            x, lengths = torch.randn(TOKENS, WIDTH).to("sim"), torch.tensor(lengths).to("sim")
            expected = model(x, lengths)
            simulated.reset_counts()
            assert torch.equal(program(x, lengths), expected)
            if number > 0:
                assert counts().reads == 0 and counts().copies_out == 1
    assert len(record.graphs) == 1
