"""Starts a batch's prologues before its forward pass."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fxpasses.base.containment import contained
from fxpasses.metadata.runtime.batch_cache import State, batch_cache
from fxpasses.metadata.runtime.kept_results import KeptResults, known_on_host
from fxpasses.metadata.runtime.prologue import Prologue, live_prologues
from fxpasses.metadata.runtime.transfers import PendingCopy, start_copy

log = logging.getLogger(__name__)
_side_streams: dict[torch.device, torch.Stream] = {}

Arguments = tuple[tuple[Any, ...], dict[str, Any]]  # a call's


def prefetch(compiled_model: Callable[..., Any], batch: Mapping[str, Any] | Sequence[Any] | torch.Tensor) -> int:
    """Start the prologues of the next `batch` while the device still works on the current one.

    batch: the model's arguments: keyword arguments as a mapping, positional arguments as a sequence, or a single
    tensor. The model must later get the same tensor objects.
    Metadata on an accelerator is copied to the host on a side stream, without waiting; metadata on the CPU is computed
    at once. Returns the number of prologues that were started: 0 before the first forward pass, when nothing is
    compiled yet, and for batches whose metadata is made inside the model. Raises `TypeError` for other kinds of batch.
    """
    return start_prologues(compiled_model, [arguments_of(batch)])


def start_prologues(
    model: Callable[..., Any], ways: Iterable[Arguments], whole: bool = False, kept: KeptResults | None = None
) -> int:
    """Start the prologues of a batch, using the first of `ways` (to call the model with it) that suits any prologue.

    whole: if the host knows everything that a prologue reads, also compute its part on an accelerator, on the current
    stream. kept: results of earlier batches, to take from and to add to. Returns the number of prologues started.
    """
    with contained("prefetching a batch", "Prologues run when the batch is used."):
        return _start_first(model, ways, whole, kept)
    return 0


def _start_first(model: Callable[..., Any], ways: Iterable[Arguments], whole: bool, kept: KeptResults | None) -> int:
    for arguments, keywords in ways:
        for frame in _frames(model, arguments, keywords):
            started = 0
            for prologue in live_prologues():
                inputs = _inputs(prologue, frame)
                if inputs is not None:
                    try:
                        _start(prologue, inputs, whole, kept)
                    except Exception as error:  # a prologue of another model; if not, the model's call raises it again
                        log.debug("a prologue does not take the batch: %s", error)
                        continue
                    started += 1
            if started:
                return started
    return 0


def keep_host_copies(moved: torch.Tensor, host: torch.Tensor) -> None:
    """Remember `host` as the values of `moved`, its copy on a device, so that no prologue copies `moved` back.

    Only integers and bools are remembered: prologues read nothing else. The copy is the package's own, and is valid as
    long as `moved` lives and is not written to.
    """
    with contained("keeping the host's copy of a batch", "Prologues copy the batch back."):
        is_metadata = not (host.dtype.is_floating_point or host.dtype.is_complex)
        if is_metadata and host.device.type == "cpu" and moved.device.type != "cpu":
            # A clone: the caller may fill the same memory with the next batch.
            batch_cache.put("to_host", [moved], State.of([moved]), PendingCopy([host.clone()], None))


def arguments_of(batch: Any) -> Arguments:
    """The call that a batch stands for, as `prefetch` takes it; raises `TypeError` for other kinds of batch."""
    if isinstance(batch, torch.Tensor):
        return (batch,), {}
    if isinstance(batch, Mapping):
        return (), dict(batch)
    if isinstance(batch, (list, tuple)):
        return tuple(batch), {}
    raise TypeError(f"batch is a {type(batch).__name__}; pass a mapping of keyword arguments, a sequence or a tensor")


def _frames(
    model: Callable[..., Any], arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """The local variables at the start of the model's forward, in the function itself or in one that wraps it.

    The same for a model inside a wrapper that passes its arguments on, such as DDP.
    """
    model = getattr(model, "_orig_mod", model)
    inner = getattr(model, "module", None)
    if isinstance(model, torch.nn.Module):
        function: Any = type(model).forward
        arguments = (model, *arguments)
    else:
        function = getattr(model, "_torchdynamo_orig_callable", model)
    while function is not None:
        try:
            bound = inspect.signature(function, follow_wrapped=False).bind(*arguments, **keywords)
            bound.apply_defaults()
            yield dict(bound.arguments)
        except (TypeError, ValueError):
            log.debug("the batch does not fit %s", function)
        function = getattr(function, "__wrapped__", None)
    if isinstance(model, torch.nn.Module) and isinstance(inner, torch.nn.Module):
        yield from _frames(inner, arguments[1:], keywords)


def _inputs(prologue: Prologue, frame: dict[str, Any]) -> dict[int, Any] | None:
    """The prologue's inputs by position, found by their sources in Dynamo's terms; None if one is missing."""
    found: dict[int, Any] = {}
    for position in prologue.positions():
        try:
            value = eval(prologue.sources[position], {"L": frame, "G": {}})  # Dynamo's expression, as in its guards
        except Exception:  # a user's __getitem__ may raise anything: the batch is not for this model
            return None
        if not isinstance(value, (int, torch.Tensor)):
            return None
        found[position] = value
    return found


def _start(prologue: Prologue, inputs: dict[int, Any], whole: bool, kept: KeptResults | None) -> None:
    contents = None if kept is None else kept.contents(prologue, inputs)
    if kept is not None and contents is not None and kept.give(contents, prologue, inputs):
        return
    remote = [inputs[i] for i in prologue.program.host_inputs if _is_remote(inputs[i])]
    if all(known_on_host(tensor, prologue.cache) is not None for tensor in remote):
        if whole or not (remote or prologue.program.on_accelerator):
            results = prologue(inputs)
            if kept is not None and contents is not None:
                kept.put(contents, results)
        return
    for device in {tensor.device for tensor in remote}:
        stream = _side_streams.setdefault(device, torch.Stream(device=device))
        tensors = [t for t in remote if t.device == device and prologue.cache.get("to_host", [t]) is None]
        if not tensors:
            continue
        stream.wait_stream(torch.accelerator.current_stream(device))  # the batch itself may still be copied
        states = [State.of([tensor]) for tensor in tensors]
        with stream:
            pending = start_copy(tensors)
        for index, (tensor, state) in enumerate(zip(tensors, states, strict=True)):
            prologue.cache.put("to_host", [tensor], state, pending.part(index))


def _is_remote(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type != "cpu"


def parameters_of(model: Callable[..., Any]) -> set[str]:
    """The names of the parameters of the model's forward, inside any wrappers."""
    while isinstance(model, torch.nn.Module):
        inner = getattr(model, "_orig_mod", getattr(model, "module", None))
        if not isinstance(inner, torch.nn.Module):
            break
        model = inner
    function: Any = type(model).forward if isinstance(model, torch.nn.Module) else model
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return set()
