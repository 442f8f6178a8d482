"""Results that live as long as the batch that they were computed from."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class State:
    """The contents of some tensors at one moment: their version counters, and copies of those on the CPU.

    Some writes do not count as a version, such as NumPy's on shared memory and a collective's into a reused buffer. On
    the CPU the values are compared; on a device, comparing would cost the wait that the cache exists to save.
    """

    versions: tuple[int, ...]
    values: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> State:
        with torch.no_grad():
            values = tuple(tensor.clone() if tensor.device.type == "cpu" else None for tensor in tensors)
        return cls(_versions(tensors), values)

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors still have these contents."""
        return self.versions == _versions(tensors) and all(
            value is None or torch.equal(value, tensor) for value, tensor in zip(self.values, tensors, strict=True)
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    state: State
    references: tuple[weakref.ref[torch.Tensor], ...]
    result: Any


class BatchCache:
    """Maps (what, the identity and state of some tensors) to a result, which goes when one of the tensors dies.

    The cache refers to tensors weakly, and results must not hold them or views of them. After a write in place an entry
    is not found, and the next one replaces it. Threads may share a cache; two that miss at once both compute, and one
    result stays.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the middle of any of the methods
        self._entries: dict[Hashable, _Entry] = {}

    def get(self, what: Hashable, tensors: Sequence[torch.Tensor]) -> Any:
        """The result for `what` and `tensors` in their present state, or None."""
        with self._lock:
            entry = self._entries.get((what, *map(id, tensors)))
        if entry is None or not _is_cacheable(tensors):
            return None
        alive = all(reference() is tensor for reference, tensor in zip(entry.references, tensors, strict=True))
        return entry.result if alive and entry.state.is_of(tensors) else None

    def put(self, what: Hashable, tensors: Sequence[torch.Tensor], state: State, result: Any) -> None:
        """Keep `result`, computed from `tensors` when they held `state`."""
        if not _is_cacheable(tensors):
            return
        key = (what, *map(id, tensors))
        entries, lock = self._entries, self._lock

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            with lock:
                entry = entries.get(key)
                if entry is not None and any(reference is held for held in entry.references):
                    del entries[key]

        references = tuple(weakref.ref(tensor, forget) for tensor in tensors)
        with self._lock:
            self._entries[key] = _Entry(state, references, result)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def _is_cacheable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there are tensors whose lifetime bounds the entry's, and PyTorch counts their versions."""
    return bool(tensors) and not any(tensor.is_inference() for tensor in tensors)


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


batch_cache = BatchCache()  # of the process: the graphs of a step share it
