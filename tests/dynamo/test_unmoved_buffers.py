"""`self.table = self.table.to(...)`: one graph, and the buffer that was there, where `to` returns it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support import assert_same, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")


class Model(nn.Module):
    def __init__(self, persistent: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.table = nn.Buffer(torch.randn(8, 4, dtype=dtype), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        self.table = self.table.to(device=x.device, dtype=x.dtype)
        return self.linear(x) + self.table[: x.shape[0]]


def batches() -> list[Any]:
    return [(torch.linspace(-1, 2, 12).view(3, 4),) for _ in range(3)]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_buffer_that_is_there_stays(persistent: bool) -> None:
    model = Model(persistent)
    before = model.table
    record = assert_same(model, batches(), "aot_eager", fullgraph=True)
    assert len(record.graphs) == 1
    assert model.table is before and isinstance(model.table, nn.Buffer)
    assert ("table" in model.state_dict()) is persistent


def test_a_buffer_that_is_converted_is_stocks() -> None:
    model = Model(True, torch.float64)
    assert_same(model, batches(), "aot_eager")
    assert model.table.dtype is torch.float32


def test_a_write_reaches_the_buffer() -> None:
    class Counts(Model):
        def forward(self, x: Tensor) -> Tensor:
            self.table.to(torch.float32).add_(1)
            return super().forward(x)

    model, other = Counts(True), Counts(True)
    program = compiled(other, "aot_eager")
    for batch in batches():
        torch.testing.assert_close(program(*batch), model(*batch), rtol=0, atol=0)
    torch.testing.assert_close(other.table, model.table, rtol=0, atol=0)
