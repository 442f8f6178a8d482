"""A tensor that could not be moved, and stays on its device."""

from __future__ import annotations

import torch
from torch import Tensor

from fxpasses.errors import OffloadError
from fxpasses.offload.runtime import device_copies, layout


class Kept:
    """A copy in the device's own memory: the graph reuses the memory of the tensor itself.

    A backward pass that runs once gets the copy itself, so a kept tensor takes no more memory than one that was never
    meant to move, and backward allocates nothing.
    """

    def __init__(self, source: Tensor) -> None:
        self._bytes: Tensor | None = source.clone()
        self._device, self._place = source.device, device_copies.place(source.device)
        self._made = None if source.device.type == "cpu" else device_copies.of(source.device).mark()

    def handle(self) -> Tensor:
        """Bytes [n] of the CPU that stand for the tensor."""
        assert self._bytes is not None
        if self._device.type == "cpu":
            return layout.alias(self._bytes)  # hooks on saved tensors may read it
        return torch.empty(self._bytes.numel(), dtype=torch.uint8)  # never touched, so the system gives it no pages

    def settle(self) -> None: ...

    def take(self, handle: Tensor) -> Tensor:
        """The tensor, of the size, strides and dtype of its handle."""
        if self._bytes is None:
            raise OffloadError(
                f"an activation of {layout.span(handle)} bytes was given to a backward pass without retain_graph, "
                "the last one, and is needed again; pass retain_graph=True to all but the last"
            )
        if device_copies.place(self._device) != self._place:
            return layout.shaped(self._copy_elsewhere(self._bytes), handle)
        if not _runs_once():
            return layout.shaped(self._bytes.clone(), handle)
        found, self._bytes = self._bytes, None
        return layout.shaped(found, handle)

    def _copy_elsewhere(self, source: Tensor) -> Tensor:
        """A copy on the current stream; the stream that owns the memory waits for it."""
        copies, target = device_copies.of(self._device), torch.empty_like(source)
        ticket = copies.start(target, source, out=False, after=[copies.mark()], at=self._made)
        ticket.wait()
        ticket.release()
        return target

    def release(self) -> None: ...


def _runs_once() -> bool:
    """Whether autograd runs a backward pass that frees saved tensors: one without `retain_graph`.

    Private name, checked on torch 2.11 and 2.13: `torch._C._autograd._get_current_graph_task_keep_graph`, which is true
    outside of backward.
    """
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is not None and not keeps_graph()
