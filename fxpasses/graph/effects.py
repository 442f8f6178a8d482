"""The effects of one node of a torch-level graph on memory, observed by running it on fake tensors.

A torch-level graph calls thousands of Python functions and methods, most without a schema. All of them call ATen
operators, which have schemas. So a node runs once on fake tensors under a dispatch mode that intercepts these
operators: their schemas show which tensors are written, their tags which operators are random, and the storages of the
results which results are views.
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
from fxpasses.graph.symbols import expression
from fxpasses.graph.traits import VIEWS
from fxpasses.report import Reason

# Functions of these modules change the state of the process: autograd modes, autocast, vmap levels, random state.
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
# Pure operators of this package.
_OWN = frozenset(
    {
        "fxpasses::attended_rows",
        "fxpasses::attention_plan",
        "fxpasses::earlier_pairs",
        "fxpasses::host_function",
        "fxpasses::live_rows",
        "fxpasses::loop_over_parts",
        "fxpasses::loss_in_chunks",
        "fxpasses::part_function",
        "fxpasses::plan_of_rows",
        "fxpasses::rows_attended_from",
        "fxpasses::values_of_rows",
        "fxpasses::visible_pairs",
    }
)
# Pure, with a result in new memory. On CUDA they run a higher-order operator, which no dispatch mode can record.
_NOT_RECORDED = frozenset({"fxpasses::sparse_attention"})


@dataclass(frozen=True)
class Effects:
    """The effects of a node. output: its result on fake tensors.

    aliases: for each tensor among the leaves of `output`, the position of the input tensor whose memory it shares, or
    None for new memory. same: whether it *is* that input (in-place methods return their tensor).
    writes: positions of the input tensors whose memory is written.
    """

    output: Any
    aliases: tuple[int | None, ...]
    same: tuple[bool, ...]
    writes: tuple[int, ...]


class _Recorder(TorchDispatchMode):
    """Records the storages that operators write; with `refuse`, raises for operators that `check_operator` rejects."""

    def __init__(self, refuse: bool = True) -> None:
        super().__init__()
        self.refuse = refuse
        self.written: set[int] = set()
        self.draws = False

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        draws = torch.Tag.nondeterministic_seeded in func.tags and not _drops_nothing(func, args, kwargs)
        self.draws |= draws
        if self.refuse:
            check_operator(func, draws)
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[position] if position < len(args) else kwargs.get(argument.name)
                self.written.update(map(storage_key, _tensors(pytree.tree_leaves(value))))
        return func(*args, **kwargs)

    def positions(self, storages: list[int]) -> list[int]:
        """The positions of the storages that were written."""
        return [i for i, key in enumerate(storages) if key in self.written]


def _drops_nothing(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator, such as attention, draws random numbers only for a dropout with a rate of 0."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool((args[position] if position < len(args) else kwargs.get("dropout_p", 0.0)) == 0)
    return False


def check_operator(func: torch._ops.OpOverload, draws: bool | None = None) -> None:
    """Raise `Refused` for collectives, random operators, and custom operators, which are not known to be pure.

    draws: whether it draws random numbers, if its arguments have shown that; otherwise it does if it can.
    """
    if is_collective(func):
        raise Refused(Reason.COLLECTIVE, f"`{func}` must be issued once, at its place")
    if torch.Tag.nondeterministic_seeded in func.tags and draws is not False:
        raise Refused(Reason.RANDOM, f"`{func}` draws random numbers")
    if func.namespace not in ("aten", "prims", "prim") and func._schema.name not in _OWN:
        raise Refused(Reason.UNKNOWN_OPERATOR, f"`{func}` is not an operator of PyTorch, so not known to be pure")


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory; this includes fake tensors, whose storages are on the meta device."""
    return tensor.untyped_storage()._cdata


def is_reshaping(node: Node) -> bool:
    return node.op == "call_method" and node.target in _RESHAPING_METHODS


def check_target(node: Node) -> None:
    """Raise `Refused` if a node's function may have effects that no ATen operator shows."""
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
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a node's arguments, including those inside slices, in the order in which FX visits them."""
    found: list[Any] = []
    map_aggregate(tree, found.append)
    return found


def observe(
    node: Node, args: Sequence[Any], kwargs: dict[str, Any], fake_mode: Any, autocast: Sequence[tuple[Any, ...]] = ()
) -> Effects:
    """Run `node` on fake arguments and return its effects; raises `Refused` if they are not certain.

    `args` and `kwargs` hold fake tensors of `fake_mode`, symbolic numbers and constants; `autocast` holds the arguments
    of the autocast regions around the node. Fake tensors have no values that a write could change; methods that change
    a tensor's shape in place are refused before the run.
    """
    check_target(node)
    recorder = _Recorder()
    try:
        with quiet(fake_mode), regions(autocast), recorder:
            output = call(node, args, kwargs)
    except Refused:
        raise
    except Exception as error:
        raise Refused(Reason.UNKNOWN_OPERATOR, f"cannot be evaluated on fake tensors: {error}") from error
    _check_example(node, output)
    inputs = _tensors(leaves((args, kwargs)))
    storages, results = [storage_key(t) for t in inputs], _tensors(pytree.tree_leaves(output))
    aliases = tuple(storages.index(key) if key in storages else None for key in map(storage_key, results))
    same = tuple(any(result is t for t in inputs) for result in results)
    return Effects(output, aliases, same, tuple(recorder.positions(storages)))


def as_in_program(node: Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Effects | None:
    """The effects of a view that Dynamo has run on these very tensors; None for other nodes.

    This saves running it: a view whose sizes are long expressions takes milliseconds.
    """
    if operator_of(node) not in VIEWS:
        return None
    given, inputs = leaves((node.args, node.kwargs)), leaves((args, kwargs))
    if not all(map(_is_example, given, inputs)):
        return None
    output: Any = node.meta.get("example_value")
    if not is_plain(output):
        return None
    key = storage_key(output)
    shared = [position for position, tensor in enumerate(_tensors(inputs)) if storage_key(tensor) == key]
    return Effects(output, (shared[0] if shared else None,), (any(output is value for value in inputs),), ())


def _is_example(leaf: Any, value: Any) -> bool:
    """Whether an operand has the value that it had when Dynamo ran its user."""
    if not isinstance(leaf, Node):
        return True
    example = leaf.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        return value is example and is_plain(value)
    return type(value) is type(example) and bool(expression(value) == expression(example))


def is_plain(value: Any) -> bool:
    """Whether a value is a fake tensor without a gradient."""
    return type(value) is torch._subclasses.FakeTensor and not value.requires_grad


def _check_example(node: Node, output: Any) -> None:
    """Refuse a result that differs from Dynamo's: some unknown state of the process has changed it."""
    example = node.meta.get("example_value")
    pairs = zip(pytree.tree_leaves(output), pytree.tree_leaves(example), strict=False) if example is not None else ()
    for seen, expected in pairs:
        if isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor):
            here, there = (
                f"{tensor.dtype} on {tensor.device} in {tensor.ndim} dimensions" for tensor in (seen, expected)
            )
            if here != there:
                raise Refused(Reason.UNKNOWN_OPERATOR, f"returns {here} here and {there} in the program")


@contextlib.contextmanager
def regions(autocast: Sequence[tuple[Any, ...]]) -> Iterator[None]:
    """Enter autocast regions, given by the arguments of `_enter_autocast`."""
    with contextlib.ExitStack() as stack:
        for device_type, dtype, enabled, cache_enabled in autocast:
            stack.enter_context(torch.autocast(device_type, dtype, enabled, cache_enabled))
        yield


@contextlib.contextmanager
def quiet(fake_mode: Any) -> Iterator[None]:
    """Fake mode as in Dynamo, but without gradients, and without new symbols that Dynamo would have to bind."""
    ignore: Callable[[], Any] = getattr(fake_mode.shape_env, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    with torch.no_grad(), fake_mode, enable_python_dispatcher(), ignore():
        yield


@dataclass(frozen=True)
class Touch:
    """The positions of the tensor arguments that a node writes to, and of those whose memory it returns."""

    writes: frozenset[int]
    returns: frozenset[int]


def touch(
    node: Node, args: Sequence[Any], kwargs: dict[str, Any], fake_mode: Any, autocast: Sequence[tuple[Any, ...]] = ()
) -> Touch | None:
    """The effects of a node that stays in place on its tensor arguments; None if they are unknown.

    autocast: as for `observe`. Without its regions, attention would have operands of different dtypes, for example.
    """
    if is_reshaping(node):
        return Touch(frozenset({0}), frozenset({0}))
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.name in _NOT_RECORDED:
        return Touch(frozenset(), frozenset())
    recorder = _Recorder(refuse=False)
    try:
        with quiet(fake_mode), regions(autocast), recorder:
            output = call(node, args, kwargs)
        storages = [storage_key(t) for t in _tensors(leaves((args, kwargs)))]
        returned = {storage_key(t) for t in _tensors(pytree.tree_leaves(output))}
    except Exception:  # an operator without a fake implementation, or a tensor without storage
        return None
    returns = frozenset(i for i, key in enumerate(storages) if key in returned)
    return Touch(frozenset(recorder.positions(storages)), returns)


def draws(node: Node, fake_mode: Any) -> bool:
    """Whether a node draws random numbers, or may draw them; it runs on its operands' examples.

    Functions that switch modes and transforms do not run: they draw none.
    """
    module = getattr(node.target, "__module__", None) or ""
    if any(module == m or module.startswith(m + ".") for m in _STATEFUL_MODULES):
        return module.startswith(("torch.random", "torch.cuda"))
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
    recorder = _Recorder(refuse=False)
    try:
        with quiet(fake_mode), recorder:
            call(node, args, kwargs)
    except Exception:
        return True
    return recorder.draws


def _tensors(values: list[Any]) -> list[torch.Tensor]:
    return [value for value in values if isinstance(value, torch.Tensor)]


def impurity(node: Node, fake_mode: Any) -> str | None:
    """Why a node is not known to be pure on its operands' examples; None if it is pure."""
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda operand: operand.meta.get("example_value"))
    try:
        return f"`{node.name}` writes" if observe(node, args, kwargs, fake_mode).writes else None
    except Refused as refused:
        return refused.text
