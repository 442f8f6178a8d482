"""A data loader that is one batch ahead: the next batch's prologue starts before the step of the current one.

    loader:   batch 0   batch 1              batch 2
    prologue: 0         1                    2
    step:                        0 ........           1 ........

The copies for batch n + 1 start before step n, so they do not wait behind its kernels on the device.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import torch

from fxpasses.metadata.runtime.kept_results import KeptResults
from fxpasses.metadata.runtime.prefetching import (
    Arguments,
    arguments_of,
    keep_host_copies,
    parameters_of,
    start_prologues,
)

Batch = TypeVar("Batch")


class PrefetchLoader(Generic[Batch]):
    """Iterates over a data loader, and starts the prologue of the next batch while the device works on the current one.

        for batch in PrefetchLoader(loader, model, device="cuda"):
            model(**batch).loss.backward()

    loader: any iterable of batches, such as a `DataLoader`, with its workers and pinned memory; all attributes that
    this class lacks are the loader's own. model: the compiled model. device: where to move each batch, without
    waiting; the host then knows its integer tensors, and no prologue copies anything back. By default batches stay
    where they are; if the loop itself moved them, they would become other tensors, of which nothing is known.
    arguments: the part of a batch that the model gets, as `fxpasses.prefetch` takes it. By default the batch is tried
    as keyword arguments (those that the model has), as positional arguments (all, then fewer from the end), and as one
    argument. keep_bytes: keep the results of prologues, up to this size, for batches of equal contents: an evaluation's
    batches come again in each epoch.

    Each batch is taken from the loader one step before it is used. If the loader raises, the previous batch is still
    yielded first. `state_dict`, if the loader has it, is the state at the batch yielded last. Without a prologue for
    the batch, as before the first step, this behaves like the loader. Raises `TypeError` for a loader that cannot be
    iterated, and `ValueError` for negative `keep_bytes`.
    """

    def __init__(
        self,
        loader: Iterable[Batch],
        model: Callable[..., Any],
        *,
        device: torch.device | str | None = None,
        arguments: Callable[[Batch], Mapping[str, Any] | Sequence[Any] | torch.Tensor] | None = None,
        keep_bytes: int = 0,
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise TypeError(f"loader is a {type(loader).__name__}; pass an iterable of batches, such as a DataLoader")
        if keep_bytes < 0:
            raise ValueError(f"keep_bytes is {keep_bytes}; it takes a number of bytes from 0")
        self.loader = loader
        self.model = model
        self.device = None if device is None else torch.device(device)
        self.arguments = arguments
        self.kept = KeptResults(keep_bytes) if keep_bytes else None
        self._state: Any = None

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        upcoming = self._next(batches)
        while upcoming:
            current = upcoming
            if hasattr(self.loader, "state_dict"):
                self._state = self.loader.state_dict()
            failed = None
            try:
                upcoming = self._next(batches)
            except Exception as error:  # the next batch failed, not the current one
                failed = error
            yield current.pop()
            if failed is not None:
                raise failed
        self._state = None

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]  # raises what the loader raises

    def __getattr__(self, name: str) -> Any:
        if name == "loader":  # not there yet, as in a copy
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.loader, name)

    @property
    def state_dict(self) -> Callable[[], Any]:
        """The loader's `state_dict`, if it has one, as of before the batch that is not yet yielded."""
        own = self.loader.state_dict  # type: ignore[attr-defined]
        return lambda: own() if self._state is None else self._state

    @property
    def load_state_dict(self) -> Callable[[Any], None]:
        own = self.loader.load_state_dict  # type: ignore[attr-defined]

        def load(state: Any) -> None:
            self._state = None
            own(state)

        return load

    def _next(self, batches: Iterator[Batch]) -> list[Batch]:
        """The next batch with its prologues started, or [] at the end."""
        try:
            batch = next(batches)
        except StopIteration:
            return []
        if self.device is not None:
            batch = moved(batch, self.device)
        ways = calls_with(batch, self.model) if self.arguments is None else [arguments_of(self.arguments(batch))]
        start_prologues(self.model, ways, whole=True, kept=self.kept)
        return [batch]


def moved(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on a device, copied without waiting; the host keeps the integers.

    Looks into mappings, sequences, dataclasses and named tuples; any other object with a method `to` is moved by it.
    """
    if isinstance(batch, torch.Tensor):
        there = batch.to(device, non_blocking=True)
        keep_host_copies(there, batch)
        return there
    if isinstance(batch, Mapping):
        parts = {key: moved(value, device) for key, value in batch.items()}
        if type(batch) is dict:
            return parts
        whole: Any = copy.copy(batch)  # a class of its own, such as a tokenizer's, may take other arguments
        for key, value in parts.items():
            whole[key] = value
        return whole
    if isinstance(batch, (list, tuple)):
        items = [moved(value, device) for value in batch]
        return type(batch)(*items) if hasattr(batch, "_fields") else type(batch)(items)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        whole = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(whole, field.name, moved(getattr(batch, field.name), device))  # also where it is frozen
        return whole
    return batch.to(device) if hasattr(batch, "to") else batch


def calls_with(batch: Any, model: Callable[..., Any]) -> Iterator[Arguments]:
    """The ways in which a loop may call the model with a batch, the likeliest first."""
    if isinstance(batch, Mapping):
        keywords = {key: value for key, value in batch.items() if isinstance(key, str)}
        yield (), keywords
        known = parameters_of(model)
        if not keywords.keys() <= known:  # the loop keeps some for itself, such as labels
            yield (), {key: value for key, value in keywords.items() if key in known}
    elif isinstance(batch, (list, tuple)):
        for count in range(len(batch), 0, -1):
            yield tuple(batch[:count]), {}
    yield (batch,), {}
