"""A process group of two ranks in one process: it notes each collective, and answers for the other rank.

What the other rank holds follows from what this one gives, so a collective that is issued again gives the same again,
as it does where both ranks recompute. The sequence of collectives is compared by itself.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

WORLD = 2
Call = tuple[str, list[tuple[tuple[int, ...], torch.dtype, float]]]  # the collective; of each tensor, size and sum


class RecordedGroup(dist.ProcessGroup):
    """calls: what was issued. Both the names of torch 2.11 and of later ones lead to a method."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.own = rank
        self.calls: list[Call] = []

    def getBackendName(self) -> str:
        return "recorded"

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def note(self, name: str, *tensors: Tensor) -> int:
        """Note a call; returns a number that stands for what the other rank holds."""
        sums = [float(tensor.double().sum()) for tensor in tensors]
        self.calls.append((name, [(tuple(t.shape), t.dtype, s) for t, s in zip(tensors, sums, strict=True)]))
        return 1 + int(16 * sum(map(abs, sums))) % 7

    def others(self, rows: Any, number: int) -> None:
        """Fill the rows that come from the other rank."""
        rows[1 - self.own].fill_(number)

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        number = self.note("all_reduce", *tensors)
        for tensor in tensors:
            tensor.add_(number)
        return _done(tensors)

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        number = self.note(f"broadcast from {options.rootRank}", *tensors)
        for tensor in tensors:
            if options.rootRank != self.own:
                tensor.fill_(number)
        return _done(tensors)

    def scatter(self, outputs: list[Tensor], given: list[list[Tensor]], options: Any = None) -> Any:
        self.note(f"scatter from {options.rootRank}")
        outputs[0].copy_(given[0][self.own])
        return _done(outputs)

    def all_gather_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        rows = output.view(WORLD, -1)
        self.others(rows, self.note("all_gather", given))
        rows[self.own].copy_(given.reshape(-1))
        return _done(output)

    def reduce_scatter_single(self, output: Tensor, given: Tensor, options: Any = None) -> Any:
        output.copy_(given.reshape(WORLD, *output.shape)[self.own] + self.note("reduce_scatter", given))
        return _done(output)

    def all_to_all_single(self, output: Tensor, given: Tensor, to: Any, from_: Any, options: Any = None) -> Any:
        rows = output.split(list(to) or output.shape[0] // WORLD)
        self.others(rows, self.note(f"all_to_all {list(to)} {list(from_)}", given))
        rows[self.own].copy_(given.split(list(from_) or given.shape[0] // WORLD)[self.own])
        return _done(output)

    def all_gather_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Any:
        return [self.all_gather_single(*pair) for pair in zip(outputs, given, strict=True)][-1]

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], given: list[Tensor], options: Any = None) -> Any:
        return [self.reduce_scatter_single(*pair) for pair in zip(outputs, given, strict=True)][-1]


# Dynamo would compile them for the frame that calls one in eager mode.
for _name in [name for name, method in vars(RecordedGroup).items() if callable(method) and name != "__init__"]:
    setattr(RecordedGroup, _name, torch._dynamo.disable(getattr(RecordedGroup, _name)))
for _older, _name in {
    "_allgather_base": "all_gather_single",
    "_reduce_scatter_base": "reduce_scatter_single",
    "alltoall_base": "all_to_all_single",
    "allgather_into_tensor_coalesced": "all_gather_single_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single_coalesced",
}.items():
    setattr(RecordedGroup, _older, getattr(RecordedGroup, _name))


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


@contextlib.contextmanager
def recorded_group(rank: int) -> Iterator[RecordedGroup]:
    """This process is `rank` of two inside."""
    if "recorded" not in dist.Backend.backend_list:
        make: Callable[..., Any] = lambda store, rank, size, timeout: RecordedGroup(rank, size)  # noqa: E731
        dist.Backend.register_backend("recorded", make, devices=["cpu"])
    dist.init_process_group("recorded", store=FakeStore(), rank=rank, world_size=WORLD)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def assert_same_calls(calls: list[Call], expected: list[Call]) -> None:
    """The same collectives in the same order, of the same sizes, and of the same numbers but for rounding."""
    assert [name for name, _ in calls] == [name for name, _ in expected]
    for (_, tensors), (_, wanted) in zip(calls, expected, strict=True):
        assert [tensor[:2] for tensor in tensors] == [tensor[:2] for tensor in wanted]
        for tensor, other in zip(tensors, wanted, strict=True):
            assert math.isclose(tensor[2], other[2], rel_tol=1e-4, abs_tol=1e-4)
