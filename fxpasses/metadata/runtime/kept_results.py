"""Results of prologues for batches that come again: an evaluation has the same contents in new tensors each time."""

from __future__ import annotations

import ctypes
import hashlib
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any

import torch

from fxpasses.metadata.runtime.batch_cache import BatchCache, State, nbytes_of
from fxpasses.metadata.runtime.prologue import Inputs, Prologue

_ENTRY = 256  # bytes, roughly, of an entry besides its tensors


class KeptResults:
    """Results by prologue and by the contents of the tensors that they depend on.

    most_bytes: of the results; beyond it, the least recently used are dropped.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._results: OrderedDict[Hashable, tuple[tuple[Any, ...], int]] = OrderedDict()

    def contents(self, prologue: Prologue, inputs: Inputs) -> Hashable | None:
        """The key of results; None if the host would have to wait for the contents of a tensor."""
        digest = hashlib.blake2b(digest_size=32)
        for tensor in prologue.roots(inputs):
            host = known_on_host(tensor, prologue.cache)
            if host is None:
                return None
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.device};".encode())
            digest.update(_bytes(host))
        return (prologue.key, prologue.sizes(inputs), digest.digest())

    def give(self, contents: Hashable, prologue: Prologue, inputs: Inputs) -> bool:
        """Give the prologue its results for `inputs`, if they are kept; returns whether."""
        found = self._results.get(contents)
        if found is None:
            return False
        self._results.move_to_end(contents)
        prologue.keep(inputs, State.of(prologue.roots(inputs)), found[0])
        return True

    def put(self, contents: Hashable, results: tuple[Any, ...]) -> None:
        size = nbytes_of(results) + _ENTRY
        if size > self.most_bytes or contents in self._results:
            return
        self._results[contents] = results, size
        self.bytes += size
        while self.bytes > self.most_bytes:
            self.bytes -= self._results.popitem(last=False)[1][1]

    def __len__(self) -> int:
        return len(self._results)


def known_on_host(tensor: torch.Tensor, cache: BatchCache) -> torch.Tensor | None:
    """The tensor, or its copy on the host, if it is on the host and no longer in flight; else None."""
    if tensor.device.type == "cpu":
        return tensor
    pending = cache.get("to_host", [tensor])
    return pending.tensors()[0] if pending is not None and pending.is_done() else None


def _bytes(tensor: torch.Tensor) -> bytes:
    """The elements of a tensor on the CPU, in row-major order."""
    flat = tensor.detach().contiguous()
    return ctypes.string_at(flat.data_ptr(), flat.numel() * flat.element_size())
