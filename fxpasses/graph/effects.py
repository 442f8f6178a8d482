"""What one node of a torch-level graph does to memory, found out by running it on fake tensors.

A torch-level graph calls thousands of Python functions and methods, most without a schema. Below each of them lie ATen
operators, and those have one. So a node is run once on fake tensors under a dispatch mode that sees these operators:
their schemas tell what is written, their tags what is random, and the storages of the results tell what is a view.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fxpasses.graph.calls import operator_of
from fxpasses.graph.collectives import is_collective
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason

# These act on the state of the process: autograd modes, autocast, vmap levels, random state, streams.
_STATEFUL_MODULES = (
    "torch._C._functorch",
    "torch._functorch",
    "torch.amp",
    "torch.autograd",
    "torch.cuda",
    "torch.random",
    "torch.distributed",
    "torch.utils",
)
# Methods that change sizes, strides or storage of their tensor in place; a memory version cannot express that.
_RESHAPING_METHODS = frozenset(
    {
        "resize_", "resize_as_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_",
        "as_strided_", "requires_grad_", "detach_", "rename_", "share_memory_", "pin_memory", "register_hook",
        "retain_grad", "backward", "data_ptr", "storage", "untyped_storage", "numpy", "record_stream",
    }
)  # fmt: skip


# Operators of this package that look at their arguments and do nothing else.
_OWN = frozenset({"fxpasses::attention_plan"})


@dataclass(frozen=True)
class Effects:
    """What a node does. `aliases[i]` belongs to the i-th tensor among the leaves of `output`.

    aliases: for each output tensor, the position of the input tensor whose memory it shares, or None for new memory.
    same: for each output tensor, whether it *is* that input (in-place methods return their tensor).
    writes: positions of the input tensors whose memory is written.
    output: the result on fake tensors.
    """

    output: Any
    aliases: tuple[int | None, ...]
    same: tuple[bool, ...]
    writes: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Notes the storages that operators write; with `refuse`, raises for what is random or not PyTorch's."""

    def __init__(self, refuse: bool = True) -> None:
        super().__init__()
        self.refuse = refuse
        self.written: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.refuse:
            check_operator(func)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self.written.update(storage_key(t) for t in pytree.tree_leaves(value) if isinstance(t, torch.Tensor))
        return func(*args, **kwargs)


def check_operator(func: torch._ops.OpOverload) -> None:
    """Raise `Refused` for collectives, what is random, and what is not PyTorch's own and so not known to be pure."""
    if is_collective(func):
        raise Refused(Reason.COLLECTIVE, f"`{func}` is issued where it stands, once")
    if torch.Tag.nondeterministic_seeded in func.tags:
        raise Refused(Reason.RANDOM, f"`{func}` draws random numbers")
    if func.namespace not in ("aten", "prims", "prim") and func._schema.name not in _OWN:
        raise Refused(Reason.UNKNOWN_OPERATOR, f"`{func}` is not an operator of PyTorch, so not known to be pure")


def storage_key(tensor: torch.Tensor) -> int:
    """Identity of a tensor's memory; works on fake tensors, whose storages are on the meta device."""
    return tensor.untyped_storage()._cdata


def is_reshaping(node: Node) -> bool:
    return node.op == "call_method" and node.target in _RESHAPING_METHODS


def check_target(node: Node) -> None:
    """Raise `Refused` where a node's function may do something that no ATen operator shows."""
    if node.op == "call_method":
        if is_reshaping(node):
            raise Refused(Reason.UNKNOWN_OPERATOR, f"`.{node.target}` changes more than values")
        return
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        check_operator(target)
        return
    if isinstance(target, torch._ops.HigherOrderOperator):
        raise Refused(Reason.HIGHER_ORDER, f"`{target}` has a body")
    name, module = operator_of(node), getattr(target, "__module__", None) or ""
    stateful = any(module == m or module.startswith(m + ".") for m in _STATEFUL_MODULES)
    side_effect = module != "_operator" and target in torch.fx.node._side_effectful_functions
    if "." in name or stateful or side_effect:
        name = name if "." in name else f"{module}.{name}"
        raise Refused(Reason.UNKNOWN_OPERATOR, f"`{name}` is not known to be pure")


def call(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Apply the operation of a `call_function` or `call_method` node."""
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a node's arguments, those inside slices among them, in the order in which FX visits them."""
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found


def observe(
    node: Node, args: Sequence[Any], kwargs: dict[str, Any], fake_mode: Any, autocast: Sequence[tuple[Any, ...]] = ()
) -> Effects:
    """Run `node` on fake arguments and say what it does; raises `Refused` where that is not certain.

    `args` and `kwargs` hold fake tensors of `fake_mode`, symbolic numbers and constants; `autocast` the arguments of
    the autocast regions around the node. The arguments' values do not exist, so writing to them here harms nothing;
    methods that change a tensor's shape in place are refused beforehand.
    """
    check_target(node)
    inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    recorder = _Recorder()
    try:
        with quiet(fake_mode), regions(autocast), recorder:
            output = call(node, args, kwargs)
    except Refused:
        raise
    except Exception as error:
        raise Refused(Reason.UNKNOWN_OPERATOR, f"cannot be evaluated on fake tensors: {error}") from error
    _check_example(node, output)
    storages = [storage_key(t) for t in inputs]
    aliases, same = [], []
    for tensor in (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)):
        key = storage_key(tensor)
        position = storages.index(key) if key in storages else None
        aliases.append(position)
        same.append(any(tensor is t for t in inputs))
    writes = tuple(i for i, key in enumerate(storages) if key in recorder.written)
    return Effects(output, tuple(aliases), tuple(same), writes)


def _check_example(node: Node, output: Any) -> None:
    """What was observed must be what Dynamo saw; a state of the process that is not known here would show."""
    example = node.meta.get("example_value")
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(example), strict=False) if example is not None else ()
    for seen, expected in pairs:
        if isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor):
            if (seen.dtype, seen.device, seen.ndim) != (expected.dtype, expected.device, expected.ndim):
                raise Refused(Reason.UNKNOWN_OPERATOR, f"gives {seen.dtype} here and {expected.dtype} in the program")


@contextlib.contextmanager
def regions(autocast: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Be inside of autocast regions, by the arguments of `_enter_autocast`."""
    with contextlib.ExitStack() as stack:
        for device_type, dtype, enabled, cache_enabled in autocast:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        yield


@contextlib.contextmanager
def quiet(fake_mode: Any) -> Iterator[None]:
    """Fake mode as Dynamo runs it, without gradients, and without leaving new symbols for Dynamo to bind."""
    ignore: Callable[[], Any] = getattr(fake_mode.shape_env, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    with torch.no_grad(), fake_mode, enable_python_dispatcher(), ignore():
        yield


@dataclass(frozen=True)
class Touch:
    """What a node that stays where it is does to the memory of its tensor arguments, by position among them."""

    writes: frozenset[int]
    returns: frozenset[int]


def touch(node: Node, args: Sequence[Any], kwargs: dict[str, Any], fake_mode: Any) -> Touch | None:
    """Which tensor arguments `node` writes to and which it returns memory of; None where that cannot be found out."""
    inputs = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if is_reshaping(node):
        return Touch(frozenset({0}), frozenset({0}))
    recorder = _Recorder(refuse=False)
    try:
        with quiet(fake_mode), recorder:
            output = call(node, args, kwargs)
        storages = [storage_key(t) for t in inputs]
        returned = {storage_key(t) for t in pytree.tree_leaves(output) if isinstance(t, torch.Tensor)}
    except Exception:  # an operator without a fake implementation, a tensor without storage: nothing is known then
        return None
    return Touch(
        frozenset(i for i, key in enumerate(storages) if key in recorder.written),
        frozenset(i for i, key in enumerate(storages) if key in returned),
    )
