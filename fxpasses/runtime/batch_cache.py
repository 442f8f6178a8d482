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
    """What some tensors held at one moment: their version counters, and copies of those that lie on the CPU.

    Not every write counts a version: NumPy on shared memory and collectives into a reused buffer do not. On the CPU a
    look at the values tells; on a device it would cost the wait that the cache is there to save.
    """

    versions: tuple[int, ...]
    values: tuple[torch.Tensor | None, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> State:
        with torch.no_grad():
            values = tuple(tensor.clone() if tensor.device.type == "cpu" else None for tensor in tensors)
        return cls(_versions(tensors), values)

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether the tensors still hold this."""
        return self.versions == _versions(tensors) and all(
            value is None or torch.equal(value, tensor) for value, tensor in zip(self.values, tensors, strict=True)
        )


@dataclass(frozen=True, eq=False)
class _Entry:
    state: State
    references: tuple[weakref.ref[torch.Tensor], ...]
    result: Any


class BatchCache:
    """Maps (what, the identity and state of some tensors) to a result; forgets it when one of the tensors dies.

    The tensors are held weakly. After an edit in place the entry is not found, and the next one replaces it. Results
    must not hold the tensors, nor views of them. Safe with several threads; two that miss at once both compute, and
    one result stays.
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

    def results(self) -> list[Any]:
        """All results that are kept now."""
        with self._lock:
            return [entry.result for entry in self._entries.values()]

    def __len__(self) -> int:
        return len(self._entries)


def _is_cacheable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there is a batch to live as long as, and its versions are counted."""
    return bool(tensors) and not any(tensor.is_inference() for tensor in tensors)


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


batch_cache = BatchCache()  # one for the process: the graphs of a step share it
