"""Results that live as long as the batch that they were computed from."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable, Sequence
from typing import Any

import torch


class BatchCache:
    """Maps (what, the identity and version of some tensors) to a result; forgets it when one of the tensors dies.

    The tensors are held weakly. An in-place edit of one counts up its version, and the entry is computed anew. Results
    must not hold the tensors, nor views of them. Safe with several threads; two that miss at once both compute, and
    one result stays.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may run in the middle of any of the methods
        self._entries: dict[Hashable, tuple[tuple[int, ...], tuple[weakref.ref[torch.Tensor], ...], Any]] = {}

    def get(self, what: Hashable, tensors: Sequence[torch.Tensor]) -> Any:
        """The result for `what` and `tensors` in their present state, or None."""
        if not cacheable(tensors):
            return None
        key = (what, *map(id, tensors))
        with self._lock:
            entry = self._entries.get(key)
        if entry is None or entry[0] != _versions(tensors):
            return None
        alive = all(reference() is tensor for reference, tensor in zip(entry[1], tensors, strict=True))
        return entry[2] if alive else None

    def put(self, what: Hashable, tensors: Sequence[torch.Tensor], versions: tuple[int, ...], result: Any) -> None:
        """Keep `result`, computed when `tensors` had `versions`."""
        if not cacheable(tensors):
            return
        key = (what, *map(id, tensors))
        entries, lock = self._entries, self._lock

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            with lock:
                entry = entries.get(key)
                if entry is not None and any(reference is held for held in entry[1]):
                    del entries[key]

        references = tuple(weakref.ref(tensor, forget) for tensor in tensors)
        with self._lock:
            self._entries[key] = (versions, references, result)

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)


def cacheable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether changes of the tensors can be noticed: there are some, and they count their versions."""
    return bool(tensors) and not any(tensor.is_inference() for tensor in tensors)


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return _versions(tensors) if cacheable(tensors) else ()


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(tensor._version for tensor in tensors)


batch_cache = BatchCache()  # one for the process: the graphs of a step share it
