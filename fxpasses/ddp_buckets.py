"""Under DDP, the graph that the passes leave is cut at DDP's buckets, and not the one that Dynamo captured.

AOTAutograd's backward hands all gradients over at its end, so DDP could not reduce the first of them while the rest are
computed. PyTorch's DDPOptimizer therefore cuts the graph into pieces, one for each bucket. Dynamo puts it around the
backend, which then sees pieces: metadata is computed once in each, and cuts go through loops. Here it goes inside:

    before:  Dynamo → DDPOptimizer → for each piece: passes, prologue, lowering
    after:   Dynamo → passes, prologue → DDPOptimizer → for each piece: lowering

PyTorch's optimizer does the cutting, with two corrections. It orders pieces by what they take from each other, so one
may run before another that writes to memory it reads, or that draws random numbers before it: here they keep their
order. And it overlooks parameters that an operator takes in a list, as grouped products take those of experts.

Private names, checked on torch 2.13: the constructor, methods and attributes of DDPOptimizer that are listed below,
`TracingContext.ddp_optimizer_ctx` and `fakify_first_call`. Where the class lacks one, it stays outside.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch._guards import TracingContext
from torch.fx import GraphModule, Node

from fxpasses.report import Report

NAME = "ddp_buckets"  # in the record

Compiled = Callable[..., Any]
Lower = Callable[[GraphModule, Sequence[Any]], Compiled]

_METHODS = ("compile_fn", "add_param_args", "add_param", "_ignore_parameter")
_ATTRIBUTES = ("backend_compile_fn", "bucket_bytes_cap", "first_bucket_cap")

# What Dynamo put around the backend for the frame that it traces now, and `moved_inside` took off.
_optimizer: ContextVar[Any] = ContextVar("fxpasses_ddp_optimizer", default=None)


def optimizer_among(wrappers: Iterable[Any]) -> Any | None:
    """The DDPOptimizer whose `compile_fn` is among a backend's wrappers; None where there is none that is known."""
    for wrapper in wrappers:
        owner: Any = getattr(wrapper, "__self__", None)
        if all(hasattr(owner, name) for name in (*_METHODS, *_ATTRIBUTES)) and wrapper == owner.compile_fn:
            return owner
    return None


@contextlib.contextmanager
def moved_inside(optimizer: Any | None) -> Iterator[None]:
    """For one trace: `compile_in_buckets` cuts by `optimizer`, or not at all where it is None."""
    token = _optimizer.set(optimizer)
    try:
        yield
    finally:
        _optimizer.reset(token)


def wanted() -> bool:
    """Whether `compile_in_buckets` would cut."""
    return _optimizer.get() is not None


def compile_in_buckets(
    lower: Lower, gm: GraphModule, example_inputs: Sequence[Any], told: Callable[[Report], None]
) -> Compiled:
    """Compile `gm` with `lower`: piece by piece where the running trace is for a model under DDP, else as it is."""
    outer = _optimizer.get()
    if outer is None:
        return lower(gm, example_inputs)
    optimizer = _class()(outer.bucket_bytes_cap, lower, outer.first_bucket_cap)
    try:
        with _in_order():
            compiled = optimizer.compile_fn(gm, list(example_inputs))
    except Exception:
        _forget_pieces()
        raise
    pieces = len(optimizer.buckets)
    if pieces > 1:
        summary = f"compiled in {pieces} pieces, at DDP's buckets: gradients are reduced while backward runs"
        told(Report(NAME, summary=summary, figures={"pieces": pieces}))
    return compiled


@functools.cache
def _class() -> Any:
    """DDPOptimizer, which counts the parameters that a node takes in lists and by keyword, too."""
    base: Any = importlib.import_module("torch._dynamo.backends.distributed").DDPOptimizer

    class Optimizer(base):
        def add_param_args(self, bucket: Any, node: Node) -> None:
            for operand in node.all_input_nodes:
                value = operand.meta.get("example_value") if operand.op == "placeholder" else None
                if isinstance(value, torch.nn.Parameter) and value.requires_grad and not self._ignore_parameter(value):
                    self.add_param(bucket, value, str(operand.target))

    return Optimizer


def _in_order() -> contextlib.AbstractContextManager[Any]:
    """Have DDPOptimizer keep the order of pieces; entered under Dynamo's compile lock."""
    module: Any = importlib.import_module("torch.fx.passes.split_module")
    in_order = functools.partial(module.split_module, keep_original_order=True)
    return mock.patch.object(module, "split_module", in_order)


def _forget_pieces() -> None:
    """What DDPOptimizer left for pieces in Dynamo's context: a graph that is compiled whole after it has none."""
    context: Any = TracingContext.try_get()
    if context is not None:
        context.ddp_optimizer_ctx = None
        context.fakify_first_call = False
