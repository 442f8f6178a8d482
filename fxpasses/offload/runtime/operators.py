"""The operators that rewritten graphs call: `offload` and `settle` in forward, `reload` in backward.

They run below autograd, in graphs that a compiler may reorder and whose memory it reuses as soon as a tensor's last
user has run. So arguments express every order that matters:

    h1 = offload(x1)                         starts the copy of x1
    h2 = offload(x2, previous=x1, h1)        waits for x1's copy; as an argument, x1 keeps its memory until then
    settle(h2, x2, after=y)                  waits for x2's copy, after y; the schema says that it writes to h2
    x2 = reload(h2, [h1])                    waits for x2, then starts to read x1
    x1 = reload(h1, [], after=g)             waits for g, which the backward of x2's layer computes
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from fxpasses.offload.runtime import chain, layout, tiers

# A compiler keeps the traced strides if it knows them; otherwise a handle, and so the reloaded tensor, has its source's
# strides. A replayed CUDA graph would not wait for a copy.
_TAGS = (torch.Tag.needs_exact_strides, torch.Tag.cudagraph_unsafe)


@custom_op("fxpasses::offload", mutates_args=(), tags=_TAGS)
def offload(
    source: Tensor,
    previous: Tensor | None,
    previous_handle: Tensor | None,
    tier: str,
    directory: str,
    host_budget: int | None,
    at_once: bool,
) -> Tensor:
    """Start to move `source` away; returns its handle, a CPU tensor of the same size, strides and dtype.

    previous, previous_handle: an earlier source and its handle, whose copy this waits for. tier: "disk" or "host".
    directory: the disk tier's; "" is the system's temporary directory. host_budget: bytes, or None. at_once: whether to
    wait for this copy as well.
    """
    if previous is not None and previous_handle is not None:
        chain.settle(previous_handle, previous)
    handle = chain.store(source, tiers.of(tier, directory, host_budget))
    if at_once:
        chain.settle(handle, source)
    return handle


@offload.register_fake
def _(source, previous, previous_handle, tier, directory, host_budget, at_once):  # type: ignore[no-untyped-def]
    return layout.empty_like(source, torch.device("cpu"))


@custom_op("fxpasses::settle", mutates_args=("handle",), tags=_TAGS)
def settle(handle: Tensor, source: Tensor, after: Tensor | None) -> None:
    """Wait for the copy of `source` behind its handle; in a graph, after `after` has been computed."""
    chain.settle(handle, source)


@settle.register_fake
def _(handle, source, after):  # type: ignore[no-untyped-def]
    return None


@custom_op("fxpasses::reload", mutates_args=(), tags=_TAGS)
def reload(
    handle: Tensor, upcoming: Sequence[Tensor], after: Tensor | None, device: torch.device, slots: int, onward: bool
) -> Tensor:
    """The tensor behind a handle, unchanged, on `device`; then start to read the tensors of the `upcoming` handles.

    slots: the number of tensors that may be read ahead at once. onward: whether to read on with the tensors of the
    graphs whose forward ran before this one's. In a graph, after `after` has been computed.
    """
    return chain.reload(handle, device, upcoming, slots, onward)


@reload.register_fake
def _(handle, upcoming, after, device, slots, onward):  # type: ignore[no-untyped-def]
    return layout.empty_like(handle, device)
