"""The harness: numbers come back by rank, an error carries its traceback, and a hang ends."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.ranks import RankFailed, run_on_ranks


def sums(rank: int, start: int) -> torch.Tensor:
    value = torch.tensor(start + rank)
    dist.all_reduce(value)
    return value


def fails_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("the second rank's own error")
    dist.all_reduce(torch.zeros(1))  # never answered


def waits(rank: int) -> None:
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(100)


def test_results_come_by_rank() -> None:
    assert run_on_ranks(sums, args=(3,)) == [torch.tensor(7), torch.tensor(7)]


def test_an_error_of_one_rank_ends_all() -> None:
    with pytest.raises(RankFailed, match="the second rank's own error"):
        run_on_ranks(fails_on_one)


def test_a_hang_ends_and_says_where() -> None:
    with pytest.raises(TimeoutError, match="in waits"):
        run_on_ranks(waits, seconds=5)
