"""Results that live as long as the batch that they were computed from, within a bound.

A batch's tensors are freed after the step. But results that a prologue computes only from a model's buffer and from
sizes, such as a bias by relative positions, would stay for every size that ever came; so would results for batches that
a program keeps in a list. So only the most recently used results are kept: up to a number of bytes, not counting those
that a step may need again (the two last results of each program: one is for the batch that a loader computes ahead).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_BYTES = 64 << 20  # of results, and of the copies by which their tensors are recognised
MOST_ENTRIES = 1024
_OF_A_STEP = 2  # entries of each program that do not count against these bounds,
_USES = 1024  # unless the cache has been used so often since


@dataclass(frozen=True, eq=False)
class State:
    """The contents of some tensors at one moment: their version counters, and copies of the tensors on the CPU.

    Some writes do not change the version, such as NumPy's on shared memory and a collective's into a reused buffer. On
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


@dataclass(eq=False)
class _Entry:
    """used: the cache's count of uses at the last use of this entry."""

    what: Hashable
    state: State
    references: tuple[weakref.ref[torch.Tensor], ...]
    result: Any
    nbytes: int
    used: int = 0


class BatchCache:
    """Maps (what, sizes, the identity and state of some tensors) to a result, which is dropped when a tensor dies.

    The cache refers to tensors weakly, and results must not hold them or views of them. After a write in place an entry
    is not found, and the next one replaces it. Threads may share a cache; two that miss at once both compute, and one
    result stays.

    most_bytes, most_entries: beyond these, the least recently used entries are dropped, except the last ones of each
    `what`.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, most_entries: int = MOST_ENTRIES) -> None:
        self.most_bytes = most_bytes
        self.most_entries = most_entries
        self._lock = threading.RLock()  # a finalizer may run in the middle of any of the methods
        self._entries: dict[Hashable, _Entry] = {}  # the most recently used are last
        self._uses = 0

    def get(self, what: Hashable, tensors: Sequence[torch.Tensor], sizes: tuple[int, ...] = ()) -> Any:
        """The result for `what`, `sizes` and `tensors` in their present state, or None."""
        key = (what, sizes, *map(id, tensors))
        with self._lock:
            entry = self._entries.get(key)
        if entry is None or not _is_cacheable(tensors):
            return None
        alive = all(reference() is tensor for reference, tensor in zip(entry.references, tensors, strict=True))
        if not alive or not entry.state.is_of(tensors):
            return None
        with self._lock:
            if self._entries.get(key) is entry:
                self._use(key, entry)
        return entry.result

    def put(
        self, what: Hashable, tensors: Sequence[torch.Tensor], state: State, result: Any, sizes: tuple[int, ...] = ()
    ) -> None:
        """Keep `result`, computed from `sizes` and from `tensors` when they held `state`."""
        if not _is_cacheable(tensors):
            return
        key = (what, sizes, *map(id, tensors))
        entries, lock = self._entries, self._lock

        def forget(reference: weakref.ref[torch.Tensor]) -> None:
            with lock:
                entry = entries.get(key)
                if entry is not None and any(reference is held for held in entry.references):
                    del entries[key]

        references = tuple(weakref.ref(tensor, forget) for tensor in tensors)
        entry = _Entry(what, state, references, result, nbytes_of((result, state.values)))
        with self._lock:
            self._use(key, entry)
            self._evict()

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """The bytes of all entries."""
        with self._lock:
            return sum(entry.nbytes for entry in self._entries.copy().values())

    def _use(self, key: Hashable, entry: _Entry) -> None:
        self._uses += 1
        entry.used = self._uses
        self._entries.pop(key, None)
        self._entries[key] = entry

    def _evict(self) -> None:
        of_a_step: Counter[Hashable] = Counter()
        nbytes = count = 0
        for key in reversed(list(self._entries)):
            entry = self._entries.get(key)
            if entry is None:  # gone meanwhile, with a tensor
                continue
            of_a_step[entry.what] += 1
            if of_a_step[entry.what] > _OF_A_STEP or self._uses - entry.used >= _USES:
                nbytes, count = nbytes + entry.nbytes, count + 1
                if nbytes > self.most_bytes or count > self.most_entries:
                    self._entries.pop(key, None)


def nbytes_of(value: Any) -> int:
    """The bytes of a result, or of a tuple of results: of tensors and of objects with `nbytes`; others count as 0."""
    parts = value if isinstance(value, tuple) else (value,)
    storages = {part.untyped_storage() for part in parts if isinstance(part, torch.Tensor)}
    others = [part for part in parts if not isinstance(part, torch.Tensor)]
    own = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(own.values()) + sum(nbytes_of(o) if isinstance(o, tuple) else getattr(o, "nbytes", 0) for o in others)


def _is_cacheable(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether there are tensors that bound the entry's lifetime, and PyTorch counts their versions."""
    return bool(tensors) and not any(tensor.is_inference() for tensor in tensors)


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(-1 if tensor.is_inference() else tensor._version for tensor in tensors)


batch_cache = BatchCache()  # of the process: the graphs of a step share it
