"""A step on the device: what its batch determines comes to the host in one copy, and the host waits for no more."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxpasses
from fxpasses.data import PrefetchLoader
from fxpasses.experts.runtime import grouped_kernels, grouped_ways
from fxpasses.metadata.runtime.batch_cache import batch_cache
from fxpasses.metadata.runtime.prefetching import keep_host_copies
from fxpasses.metadata.runtime.transfers import to_device
from tests.device import simulated
from tests.device.simulated import counts
from tests.end_to_end.test_training_step import Decoder
from tests.offload.programs import Packed
from tests.support import compiled

TOKENS, WIDTH = 16, 16

# The tests of races look for waits that are missing; of the steps here, `make test` runs some in one order alone.
late_or_slow = pytest.mark.parametrize(
    "order", ["late", pytest.param("early", marks=pytest.mark.slow)], indirect=["order"]
)


@pytest.fixture(autouse=True)
def no_batch_is_known(sim):
    batch_cache.clear()


class Branching(nn.Module):
    """A guard, checkpoints and reads in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def layer(self, linear, x, lengths):
        mask = torch.zeros(TOKENS, 1, device=x.device)
        mask[: lengths.max().item()] = 1
        return x + torch.tanh(linear(x * mask)) * lengths.sum().cpu().item()

    def forward(self, x, lengths):
        if lengths.max() > 10:
            x = x * 2
        for linear in self.layers:
            x = checkpoint(self.layer, linear, x, lengths, use_reentrant=False)
        return x


class Halves(nn.Module):
    """Two graphs for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Branching(), Branching()

    def forward(self, x, lengths):
        return self.second(self.first(x, lengths), lengths)


def batch(lengths: list[int], device: str = "sim") -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(TOKENS, WIDTH).to("sim"), torch.tensor(lengths).to(device)


def step(program, x, lengths) -> list[torch.Tensor]:
    program.zero_grad()
    out = program(x, lengths)
    out.square().sum().backward()
    return [out.detach(), *(parameter.grad.clone() for parameter in program.parameters())]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_one_copy_for_each_batch_and_eager_modes_numbers(order):
    model = Decoder(3).to("sim")
    program = compiled(model, "aot_eager")
    for number, lengths in enumerate(([5, 8, 3], [1, 14, 1], [4, 4, 8])):
        x, lengths = batch(lengths)
        expected = step(model, x, lengths)
        simulated.reset_counts()
        found = step(program, x, lengths)
        if number > 0:
            assert counts().copies_out == counts().stalls == counts().synchronizations == 1
        assert same(found, expected)


def test_one_copy_for_guard_prologue_and_all_graphs():
    model = Halves().to("sim")
    program = Halves().to("sim")
    program.load_state_dict(model.state_dict())
    program.first, program.second = compiled(program.first, "aot_eager"), compiled(program.second, "aot_eager")
    for number, lengths in enumerate(([5, 8, 3], [2, 7, 7], [4, 4, 8])):
        x, lengths = batch(lengths)
        expected = step(model, x, lengths)
        simulated.reset_counts()
        found = step(program, x, lengths)
        if number > 0:
            assert counts().copies_out == counts().stalls == 1
        assert same(found, expected)


def test_metadata_on_the_host_is_not_copied_from_the_device():
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    for number, lengths in enumerate(([5, 8, 3], [1, 14, 1])):
        x, lengths = batch(lengths, "cpu")
        expected = step(model, x, lengths)
        simulated.reset_counts()
        found = step(program, x, lengths)
        if number > 0:
            assert counts().stalls == counts().copies_out == 0
        assert same(found, expected)


def test_a_batch_is_copied_once_and_again_after_an_edit():
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    x, lengths = batch([5, 8, 3])
    step(program, x, lengths)
    simulated.reset_counts()
    step(program, x, lengths)
    assert counts().stalls == 0
    lengths.copy_(torch.tensor([1, 14, 1], device="sim"))
    expected = step(model, x, lengths)
    simulated.reset_counts()
    found = step(program, x, lengths)
    assert counts().copies_out == 1
    assert same(found, expected)


def test_without_pinned_memory_the_copy_blocks_and_numbers_stay():
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    step(program, *batch([5, 8, 3]))
    simulated.refuse_pinning()
    x, lengths = batch([1, 14, 1])
    expected = step(model, x, lengths)
    simulated.reset_counts()
    found = step(program, x, lengths)
    assert counts().copies_out == counts().blocking_copies == 1
    assert same(found, expected)


def test_a_tensor_goes_to_the_device_from_pinned_memory_where_there_is_some():
    for refused in (False, True):
        simulated.refuse_pinning(refused)
        simulated.reset_counts()
        found = to_device(torch.arange(5), torch.device("sim", 1))
        assert found.device.index == 1 and counts().blocking_copies == refused
        assert found.tolist() == list(range(5))
    host = torch.arange(5)
    assert to_device(host, torch.device("cpu")) is host


def test_prefetch_copies_on_a_stream_of_its_own_while_the_device_works():
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    step(program, *batch([5, 8, 3]))
    simulated.set_order("timed")
    simulated.costs(out=1e6, kernel=1e-4)
    for lengths in ([1, 14, 1], [4, 4, 8]):
        x, lengths = batch(lengths)
        torch.accelerator.synchronize()
        simulated.reset_counts()
        assert fxpasses.prefetch(program, (x, lengths)) >= 1  # prologues of other tests may live on
        assert counts().copies_out == 1 and counts().stalls == 0 and counts().streams >= 1
        simulated.reset_counts()
        found = step(program, x, lengths)
        assert counts().copies_out == 0 and counts().synchronizations <= 1  # 0 on a busy host
        assert same(found, step(model, x, lengths))


@late_or_slow
def test_a_loader_one_batch_ahead_copies_nothing_back_and_no_step_waits(order):
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    step(program, *batch([5, 8, 3]))
    loader = [batch(lengths, device="cpu") for lengths in ([1, 14, 1], [4, 4, 8], [15, 1])]
    for x, lengths in PrefetchLoader(loader, program, device="sim"):
        simulated.reset_counts()
        found = step(program, x, lengths)
        assert counts().copies_out == counts().stalls == counts().synchronizations == 0
        assert same(found, step(model, x, lengths))


def test_a_loader_of_batches_on_the_device_starts_their_copies_before_the_step_that_they_would_wait_for():
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    step(program, *batch([5, 8, 3]))
    loader = iter(PrefetchLoader((batch(lengths) for lengths in ([1, 14, 1], [4, 4, 8], [15, 1])), program))
    x, lengths = next(loader)
    for _ in range(2):
        torch.accelerator.synchronize()
        simulated.reset_counts()
        step(program, x, lengths)
        assert counts().copies_out == 0
        simulated.reset_counts()
        x, lengths = next(loader)
        assert same(step(program, x, lengths), step(model, x, lengths))


@late_or_slow
def test_a_batch_whose_values_the_host_knows_is_not_copied_back(order):
    """What `FastpackCallback` keeps of a batch: nothing comes from the device, and the host does not wait for it."""
    model = Decoder(2).to("sim")
    program = compiled(model, "aot_eager")
    step(program, *batch([5, 8, 3]))
    for lengths in ([1, 14, 1], [4, 4, 8]):
        x, given = batch(lengths, device="cpu")
        moved = given.to("sim")
        keep_host_copies(moved, given)
        given.zero_()  # the collator fills its memory anew
        simulated.reset_counts()
        found = step(program, x, moved)
        assert counts().copies_out == counts().stalls == counts().synchronizations == 0
        assert same(found, step(model, x, moved))


@pytest.mark.slow
@late_or_slow
def test_devices_have_prologues_of_their_own(order):
    for device in ("sim:0", "sim:1"):
        torch._dynamo.reset()
        model = Decoder(2).to(device)
        program = compiled(model, "aot_eager")
        for lengths in ([5, 8, 3], [1, 14, 1]):
            x, lengths = (tensor.to(device) for tensor in batch(lengths))
            assert same(step(program, x, lengths), step(model, x, lengths))


def grouped_mm(left, right, offs):
    """`F.grouped_mm` as a device's own kernel: PyTorch's for devices without one reads the offsets on the host."""
    rows = left.shape[0] if right.dim() == 3 else right.shape[0]
    group = torch.searchsorted(offs, torch.arange(rows, device=left.device, dtype=offs.dtype), right=True)
    own = [(group == number).to(left.dtype) for number in range(len(offs))]
    if right.dim() == 3:
        return sum((left * mask[:, None]) @ right[number] for number, mask in enumerate(own))
    return torch.stack([(left * mask) @ right for mask in own])


@late_or_slow
def test_experts_in_one_program_do_not_stall_where_the_device_has_a_grouped_kernel(monkeypatch, order):
    monkeypatch.setattr(grouped_kernels.F, "grouped_mm", grouped_mm)
    monkeypatch.setattr(grouped_ways, "way_of", lambda *_: grouped_ways.Way.LIBRARY)
    model = Packed(2).to("sim", torch.bfloat16)
    program = compiled(model, "aot_eager")
    for number, lengths in enumerate(([5, 8, 3], [1, 14, 1])):
        _, lengths = batch(lengths)
        x = torch.randn(128, WIDTH).to("sim", torch.bfloat16)
        simulated.reset_counts()
        loss = program(x, lengths)
        loss.backward()
        if number > 0:
            assert counts().reads == counts().shapes == counts().blocking_copies == 0
            assert counts().copies_out == counts().synchronizations == 1
        torch.testing.assert_close(loss, model(x, lengths), rtol=2e-2, atol=2e-2)


@pytest.mark.slow
@late_or_slow
def test_experts_without_a_grouped_kernel_bring_their_offsets_to_the_host_once_a_layer(order):
    """Before, each product of forward, recomputation and backward read them again: 8 times a layer."""
    model = Packed(2).to("sim")
    program = compiled(model, "aot_eager")
    for lengths in ([5, 8, 3], [1, 14, 1]):
        _, lengths = batch(lengths)
        x = torch.randn(128, WIDTH).to("sim")
        simulated.reset_counts()
        loss = program(x, lengths)
        loss.backward()
        found = counts()
        torch.testing.assert_close(loss, model(x, lengths))
    assert found.reads == found.shapes == 0
    assert found.copies_out == 1 + 2  # the batch's lengths, and a copy for each layer


@pytest.mark.slow
@late_or_slow
def test_autocast_is_that_of_the_device(order):
    model = Packed(2).to("sim")
    program = compiled(model, "aot_eager")
    for lengths in ([5, 8, 3], [1, 14, 1]):
        x, lengths = batch(lengths)
        with torch.autocast("sim", torch.bfloat16):
            expected, found = model(x, lengths), program(x, lengths)
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_the_products_of_experts_follow_the_devices_autocast():
    rows, weights = torch.randn(6, WIDTH, device="sim"), torch.randn(2, WIDTH, WIDTH, device="sim")
    offsets = torch.tensor([2, 6])
    with torch.autocast("sim", torch.bfloat16):
        assert torch.ops.fxpasses.grouped_mm(rows, weights, offsets).dtype == torch.bfloat16
    assert torch.ops.fxpasses.grouped_mm(rows, weights, offsets).dtype == torch.float32


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def layer(self, linear, x, lengths):
        return x + nn.functional.dropout(torch.tanh(linear(x)), 0.5) * lengths.max().item()

    def forward(self, x, lengths):
        for linear in self.layers:
            x = checkpoint(self.layer, linear, x, lengths, use_reentrant=False)
        return x


def test_recomputation_draws_the_random_numbers_of_forward(order):
    """In a graph that runs as it was captured: AOTAutograd keeps random numbers for devices that it knows by name."""
    model = Dropping().to("sim")
    program = compiled(model, "eager")
    for lengths in ([5, 8, 3], [1, 14, 1]):
        x, lengths = batch(lengths)
        torch.manual_seed(7)
        expected = step(model, x, lengths)
        torch.manual_seed(7)
        assert same(step(program, x, lengths), expected)
