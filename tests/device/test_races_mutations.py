"""Each wait of the device code is needed: without it, a scenario gives a wrong number or a write to released memory."""

from __future__ import annotations

import contextlib
import gc
import inspect
import itertools
import textwrap
from typing import Any

import pytest
import torch

import fxpasses
from fxpasses.base import once
from fxpasses.metadata.runtime import prefetching, transfers
from fxpasses.offload.runtime import chain, device_copies, disk, host, kept, pinned
from tests.device import races, simulated

# name: (where the function is, its name, the line to take out, what stands there instead)
MUTATIONS: dict[str, tuple[Any, str, str, str]] = {
    "a stream does not wait for a copy": (
        device_copies.DeviceTicket, "wait", "stream.wait_event(self.event)", "pass"),
    "memory goes back before its copy has ended": (
        device_copies.DeviceTicket, "release", "self.requester.wait_event(self.event)", "pass"),
    "a thread does not wait for a copy": (
        device_copies.DeviceTicket, "synchronize", "self.event.synchronize()", "pass"),
    "a copy does not wait for the work before it": (
        device_copies.DeviceCopies, "start", "for ticket in (at, *after):", "for ticket in after:"),
    "a copy does not wait for other copies": (
        device_copies.DeviceCopies, "start", "for ticket in (at, *after):", "for ticket in (at,):"),
    "a copy ends when it is queued": (
        device_copies.DeviceCopies, "start", "event.record(stream)", "event.record(at.requester)"),
    "a source is used again before it has left": (chain, "settle", "stored.settle()", "pass"),
    "a tensor is handed out before it has come": (chain, "reload", "fetched.incoming.wait()", "pass"),
    "a tensor is handed out on another stream": (
        chain, "_taken", "fetched.place != device_copies.place(device)", "False"),
    "what was read ahead is dropped at once": (chain, "_forget", "fetched.incoming.abandon()", "pass"),
    "a slot is freed at once": (
        chain, "_free_slots", "_ahead.pop(oldest).incoming.abandon(now)", "_ahead.pop(oldest)"),
    "a host source is not waited for": (host.OnHost, "settle", "self._out.wait()", "pass"),
    "a block forgets what reads it": (
        host.OnHost, "fetch", "self._block.tickets = [*self._block.tickets, copied][-4:]", "pass"),
    "what comes from the host is not waited for": (host.CopyIn, "wait", "self._copied.wait()", "pass"),
    "what was given up is not waited for": (host.CopyIn, "abandon", "self._copied.release()", "pass"),
    "a source that is staged is not waited for": (disk.OnDisk, "settle", "self._staged.wait()", "pass"),
    "a file is written before the copy has ended": (disk.OnDisk, "_write_staged", "self._staged.synchronize()", "pass"),
    "a file is read before it is written": (disk.OnDisk, "_read_staged", "self._writing.result()", "pass"),
    "a block is read into while it is copied from": (disk.OnDisk, "_read_staged", "ticket.synchronize()", "pass"),
    "a block forgets what reads it; disk": (disk.OnDisk, "_read_staged", "block.tickets = [ticket]", "pass"),
    "what comes from a file is not waited for": (disk.Reading, "wait", "ticket.wait()", "pass"),
    "what was kept is handed out before it is copied": (kept.Kept, "_copy_elsewhere", "ticket.wait()", "pass"),
    "what was kept is freed before it is copied": (kept.Kept, "_copy_elsewhere", "ticket.release()", "pass"),
    "what was kept is copied before it is there": (
        kept.Kept, "_copy_elsewhere", "at=self._made", "at=type('Never', (type(self._made),), {})"
        "(self._device, torch.Event(self._device), self._made.requester)"),
    "numbers are read before they have come": (
        transfers.PendingCopy, "tensors", "self._event.synchronize()", "pass"),
    "numbers are not waited for": (
        transfers, "start_copy", "event.record(torch.accelerator.current_stream(device))", "pass"),
    "a batch is read before it is there": (
        prefetching, "_start", "stream.wait_stream(torch.accelerator.current_stream(device))", "pass"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh(sim, monkeypatch):
    monkeypatch.setattr(once, "_given", {("offload", name) for name in ("on_device", "pinned")})
    monkeypatch.setattr(pinned, "POOL", pinned.Pool())
    fxpasses.offload_stats(reset=True)
    yield
    gc.collect()
    torch._dynamo.reset()


def goes_wrong(name: str, order: str, path: Any) -> bool:
    """Whether a scenario gives a wrong number, or writes to memory that was released."""
    simulated.reset_counts()
    simulated.set_order(order)
    wrong = False
    try:
        races.SCENARIOS[name](path)
    except (AssertionError, fxpasses.OffloadError, RuntimeError):
        wrong = True
    gc.collect()
    with contextlib.suppress(RuntimeError):
        torch.accelerator.synchronize(races.SIM)
    with contextlib.suppress(RuntimeError):
        simulated.set_order("late")
    # Late writes show where the memory is used again.
    kept = [torch.full((races.SIZE,), 0.0, device=races.SIM) for _ in range(16)]
    torch.accelerator.synchronize(races.SIM)
    del kept
    wrong = wrong or simulated.counts().late_writes > 0
    simulated.reset_counts()
    return wrong


@pytest.mark.parametrize("name", races.SCENARIOS)
def test_scenarios_are_right(name, order, tmp_path):
    races.SCENARIOS[name](tmp_path)
    assert not goes_wrong(name, order, tmp_path)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at % 3 else ()) for at, name in enumerate(MUTATIONS)]
)
def test_without_a_wait_a_scenario_goes_wrong(name, monkeypatch, tmp_path):
    owner, function, line, instead = MUTATIONS[name]
    mutate(monkeypatch, owner, function, line, instead)
    # A thread that a busy machine starts late may find that what it does not wait for has happened: then once more.
    tries = itertools.product(range(5), races.SCENARIOS, ("late", "early"))
    assert any(goes_wrong(scenario, order, tmp_path) for _, scenario, order in tries)


def mutate(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, line: str, instead: str) -> None:
    """Put `instead` in the place of the only `line` in the source of a function."""
    function = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(line) == 1, f"{name} has no such line, or several: {line}"
    found: dict[str, Any] = {}
    changed = compile(source.replace(line, instead), inspect.getfile(function), "exec", flags=annotations.compiler_flag)
    exec(changed, function.__globals__, found)
    monkeypatch.setattr(owner, name, found[name])
