"""What PyTorch's allocator gives out on the CPU while something runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_of(run: Callable[[], Any]) -> int:
    """The most bytes that live at a time during `run`, of those that it allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    results: Any = found.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    assert events
    return max(itertools.accumulate((event.nbytes() for event in events), initial=0))


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
