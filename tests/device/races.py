"""Small programs in which each wait of the device code is the only one that keeps a number right.

A scenario raises `AssertionError` where a number is wrong. Each runs in the late and in the early order.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxpasses
from fxpasses import fastpack_backend
from fxpasses.metadata.runtime.batch_cache import BatchCache, batch_cache
from fxpasses.metadata.runtime.transfers import to_host
from fxpasses.offload.runtime import chain, disk
from fxpasses.offload.runtime.disk import DiskTier
from fxpasses.offload.runtime.host import HostTier

SIM = torch.device("sim", 0)
SIZE = 4096  # floats
SCENARIOS: dict[str, Callable[[Any], None]] = {}


def scenario(function: Callable[[Any], None]) -> Callable[[Any], None]:
    SCENARIOS[function.__name__] = function
    return function


def moved(count: int, tier: Any, first: int = 1, size: int = SIZE) -> list[torch.Tensor]:
    """Handles of tensors that hold `first`, `first` + 1, ..., whose own memory is free by now."""
    handles = []
    for number in range(first, first + count):
        source = torch.full((size,), float(number), device=SIM)
        handle = chain.store(source, tier)
        chain.settle(handle, source)
        handles.append(handle)
    return handles


def holds(tensor: torch.Tensor, number: float) -> bool:
    return torch.equal(tensor.cpu(), torch.full((SIZE,), float(number)))


def side() -> tuple[torch.Stream, torch.Stream]:
    """A stream that has waited for the current one, and the current one."""
    stream, main = torch.Stream(device=SIM), torch.accelerator.current_stream(SIM)
    stream.wait_stream(main)
    return stream, main


def use_memory_again() -> None:
    """All of the current stream's, and behind everything that it has queued."""
    [torch.full((SIZE,), -1.0, device=SIM) for _ in range(8)]
    torch.accelerator.current_stream(SIM).synchronize()


@scenario
def there_and_back(path: Path) -> None:
    for first, tier in ((1, HostTier(None)), (11, DiskTier(str(path)))):
        handles = moved(4, tier, first)
        use_memory_again()
        found = [chain.reload(handles[n], SIM, handles[max(n - 1, 0) : n], 1) for n in (3, 2, 1, 0)]
        for number, tensor in enumerate(reversed(found)):
            assert holds(tensor, first + number)


@scenario
def there_and_back_before_a_slow_disk_has_it(path: Path) -> None:
    write = disk.UnlinkedFile.write
    disk.UnlinkedFile.write = lambda self, data: (time.sleep(0.1), write(self, data))[0]  # type: ignore[method-assign]
    try:
        handles = moved(2, DiskTier(str(path)))
        use_memory_again()
        for number in (2, 1):
            assert holds(chain.reload(handles[number - 1], SIM, [], 1), number)
    finally:
        disk.UnlinkedFile.write = write  # type: ignore[method-assign]


@scenario
def read_ahead_for_nothing(path: Path) -> None:
    handles = moved(2, HostTier(None))
    chain.reload(handles[1], SIM, handles[:1], 1)
    del handles
    gc.collect()
    use_memory_again()


@scenario
def read_ahead_and_given_up_for_another(path: Path) -> None:
    handles = [*moved(2, HostTier(None)), *moved(1, HostTier(None), size=2 * SIZE)]
    chain.reload(handles[0], SIM, handles[1:], 1)  # two for one slot; the second does not fit where the first was
    use_memory_again()


@scenario
def read_ahead_on_another_stream(path: Path) -> None:
    handles = moved(2, HostTier(None))
    chain.reload(handles[1], SIM, handles[:1], 1)
    stream, _ = side()
    with stream:
        found = chain.reload(handles[0], SIM, [], 1)
        raised = found + 1
        del found
    use_memory_again()
    with stream:
        assert holds(raised, 2)


@scenario
def a_block_of_the_pool_in_two_streams(path: Path) -> None:
    """One reads from it what another writes next."""
    handles = moved(1, HostTier(None))
    stream, _ = side()
    with stream:
        found = chain.reload(handles[0], SIM, [], 1)
    del handles
    gc.collect()
    moved(2, HostTier(None), first=5)
    use_memory_again()
    with stream:
        assert holds(found, 1)


def kept(count: int) -> list[torch.Tensor]:
    """As `moved`, on a device that has no memory to bring tensors back."""
    chain._full.add(SIM)
    try:
        return moved(count, HostTier(None))
    finally:
        chain._full.discard(SIM)


@scenario
def kept_and_taken_at_once(path: Path) -> None:
    stream, _ = side()
    handles = kept(2)
    with stream:
        for number, handle in enumerate(handles):
            assert holds(chain.reload(handle, SIM, [], 1), number + 1)


@scenario
def kept_and_given_up(path: Path) -> None:
    handles = kept(2)
    stream, _ = side()
    with stream:
        found = [chain.reload(handle, SIM, [], 1) for handle in handles]
    del handles
    gc.collect()
    use_memory_again()
    with stream:
        for number, tensor in enumerate(found):
            assert holds(tensor, number + 1)


@scenario
def numbers_on_the_host(path: Path) -> None:
    lengths = [torch.tensor([1, 2, 3], device=SIM) * factor for factor in (1, 2)]
    found = to_host(lengths, BatchCache())
    assert [tensor.tolist() for tensor in found] == [[1, 2, 3], [2, 4, 6]]


def _program(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    return x * lengths.max().item()


@scenario
def prefetched(path: Path) -> None:
    torch._dynamo.reset()
    batch_cache.clear()
    options = {"fastpack.lowering": "eager", "fastpack.strict": True}
    program = torch.compile(_program, backend=fastpack_backend, options=options)
    x = torch.ones(2, device=SIM)
    program(x, torch.tensor([1, 2], device=SIM))
    for factor in (1, 2):
        lengths = torch.tensor([3, 4], device=SIM) * factor
        assert fxpasses.prefetch(program, (x, lengths)) >= 1  # prologues of other tests may live on
        assert program(x, lengths).tolist() == [4 * factor] * 2
