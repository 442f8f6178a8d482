"""On a device whose grouped products need their offsets on the host: one copy for each loop over experts and step.

Such a device is played by the CPU, on which offsets lie on the host already: what is looked at is whose offsets are
read, those of the copy or those that the device computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.dynamo import flags
from fxpasses.experts.runtime import grouped_kernels, grouped_ways
from fxpasses.experts.runtime.grouped_ways import Way
from tests.experts.models import HIDDEN
from tests.experts.spellings import SPELLINGS, Moe, cases, name_of
from tests.support import compiled, events, reports_of

LAYERS, TOKENS = 3, 24
CASES = [case for case in cases(SPELLINGS) if name_of(case) in (
    "where_pairs-SwiGluStacked", "repeated_mask-SwiGluLinears", "split_counts-SwiGluLinears", "gpt_oss-GptOss",
)]  # fmt: skip


@pytest.fixture(autouse=True)
def capturing() -> Iterator[None]:
    with flags.scoped():
        yield


@dataclass
class Offsets:
    """What was copied to the host, and what products read; held, so that no two have one address."""

    copied: list[Tensor] = field(default_factory=list)
    read: list[Tensor] = field(default_factory=list)


@pytest.fixture
def offsets(monkeypatch: pytest.MonkeyPatch) -> Offsets:
    """As on a device without kernels."""
    found = Offsets()
    copy, sizes = grouped_kernels.copy_to_host, grouped_kernels._sizes

    def copying(offsets: Tensor) -> Tensor:
        found.copied.append(copy(offsets))
        return found.copied[-1]

    def reading(offsets: Tensor, size: int) -> list[int]:
        found.read.append(offsets)
        return sizes(offsets, size)

    monkeypatch.setattr(grouped_kernels, "copy_to_host", copying)
    monkeypatch.setattr(grouped_kernels, "_sizes", reading)
    monkeypatch.setattr(grouped_ways, "reads_offsets", lambda offsets, device, dtype, *widths: True)
    return found


class Layers(nn.Module):
    def __init__(self, case: Any, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList([Moe(case[0], case[1], 4) for _ in range(LAYERS)])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            out = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
            x = F.rms_norm(x + out, (HIDDEN,))
        return x


def step(program: Any, model: nn.Module) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    out = program(x)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return out, *torch.autograd.grad(out.sin().sum(), [x, *parameters], allow_unused=True, materialize_grads=True)


def check_one_copy(model: Layers, lowering: str, offsets: Offsets) -> None:
    program = compiled(model, lowering)
    with fxpasses.inspect.record() as record:
        actual = step(program, model)
    torch.testing.assert_close(actual, step(model, model), rtol=1e-3, atol=1e-4)
    assert record.figures("group_experts")["loops_grouped"] == LAYERS, record
    assert "a copy of its offsets to the host" in str(reports_of(record, "group_experts")[0].changes)
    offsets.copied.clear()
    offsets.read.clear()
    step(program, model)
    assert len(offsets.copied) == LAYERS
    assert len(offsets.read) > 3 * LAYERS
    copies = {copy.data_ptr() for copy in offsets.copied}
    assert all(one.data_ptr() in copies for one in offsets.read)


@pytest.mark.quick(2)
@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_one_copy_serves_forward_backward_and_recomputation(case: Any, checkpointed: bool, offsets: Offsets) -> None:
    check_one_copy(Layers(case, checkpointed), "aot_eager", offsets)


@pytest.mark.parametrize("case", CASES[:1], ids=name_of)
def test_one_copy_without_autograd_compiled(case: Any, offsets: Offsets) -> None:
    check_one_copy(Layers(case, checkpointed=True), "eager", offsets)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointed", [False, True], ids=["stored", "recomputed"])
def test_one_copy_in_compiled_code(checkpointed: bool, offsets: Offsets) -> None:
    check_one_copy(Layers(CASES[0], checkpointed), "inductor", offsets)


@pytest.mark.parametrize("way", [Way.LIBRARY, Way.TRITON])
def test_no_copy_where_a_kernel_reads_them_on_the_device(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_ways, "way_of", lambda device, dtype, *widths: way)
    assert not grouped_ways.reads_offsets(torch.device("cuda"), torch.device("cuda"), torch.float32, 16, 16)


def test_no_copy_of_offsets_that_lie_on_the_host() -> None:
    model = Layers(CASES[0], checkpointed=False)
    program = compiled(model, "aot_eager")
    step(program, model)
    assert events(lambda: step(program, model))["fxpasses::offsets_on_host"] == 0
