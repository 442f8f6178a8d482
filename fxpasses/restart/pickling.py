"""Pickles compiled graphs: FX graphs with their fake tensors, the shape environment, guards and code objects.

Fake tensors and symbols belong to a shape environment. All that one pickle holds belong to one environment, and are
loaded into a new one: `loads(data, fake_mode)`. What nodes remember of the modules that they come from is left out.

Private names, checked on torch 2.13 and 2.15: `MetaTensorDescriber` and `MetaConverter` of
`torch._subclasses.meta_utils`, by which inputs are described; `SymNode` and its fields; the attributes of a `ShapeEnv`;
`torch._C._functorch.is_functorch_wrapped_tensor`.
"""

from __future__ import annotations

import importlib
import io
import marshal
import pickle
import sys
import types
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.meta_utils import MetaConverter, MetaTensorDescriber, _FakeTensorViewFunc
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves

from fxpasses.graph.copying import is_lazy, new_graph_module


class CannotPickle(Exception):
    """What is to be pickled has something that another process could not have."""


def dumps(value: Any) -> bytes:
    """Raises `CannotPickle`, or what `pickle` raises, for what cannot be loaded by another process."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return stream.getvalue()


def loads(data: bytes, fake_mode: FakeTensorMode) -> Any:
    """fake_mode: a new one with a new shape environment, which gets the state of the pickled one."""
    token = _loading.set(_Loading(fake_mode))
    try:
        return pickle.loads(data)
    finally:
        _loading.reset(token)


class _Loading:
    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.fake_mode = fake_mode
        self.converter: MetaConverter[Any] = MetaConverter()
        self.of_storage: dict[int, torch.Tensor] = {}  # on the meta device, the first one of each
        self.root = torch.empty(0, requires_grad=True)

    @property
    def shape_env(self) -> ShapeEnv:
        assert self.fake_mode.shape_env is not None
        return self.fake_mode.shape_env


_loading: ContextVar[_Loading] = ContextVar("loading")


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, protocol: int) -> None:
        super().__init__(stream, protocol)
        self._describer = MetaTensorDescriber(copy_data=False)
        self._mode: FakeTensorMode | None = None  # of all fake tensors
        self._reduced: dict[type, Callable[[_Pickler, Any], Any] | None] = {}  # by type; None: as `pickle` does it

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind not in self._reduced:
            self._reduced[kind] = next((reduce for of, reduce in _REDUCED if issubclass(kind, of)), None)
        reduce = self._reduced[kind]
        return NotImplemented if reduce is None else reduce(self, value)


def _graph_module(pickler: _Pickler, gm: GraphModule) -> Any:
    numbers = {node: number for number, node in enumerate(gm.graph.nodes)}
    nodes = [_node(node, numbers) for node in gm.graph.nodes]
    used = {str(node.target).partition(".")[0] for node in gm.graph.nodes if node.op in ("get_attr", "call_module")}
    attributes = {name: getattr(gm, name) for name in sorted(used)}
    more = {name: found for name in _OF_DYNAMO if (found := getattr(gm, name, None)) is not None}
    meta = {key: value for key, value in gm.meta.items() if key not in _LEFT_OUT}
    kind = type(gm).__name__, is_lazy(gm)
    return _loaded_graph_module, (kind, attributes, more, meta, nodes, [*gm.__dict__])


def _node(node: Node, numbers: dict[Node, int]) -> Any:
    def operand(each: Node) -> Any:
        return _Operand(numbers[each])

    args, kwargs = map_arg((node.args, node.kwargs), operand)
    meta = {key: value for key, value in node.meta.items() if key not in _LEFT_OUT}
    if node.op == "placeholder" and isinstance(meta.get("example_value"), torch.Tensor):
        meta["example_value"] = Input(meta["example_value"])
    if any(map(_is_within_transform, tree_leaves(meta.get("example_value")))):
        del meta["example_value"]
    source = getattr(node, "_dynamo_source", _Operand)
    return node.op, node.target, args, kwargs, node.name, node.type, meta, source


def _is_within_transform(value: Any) -> bool:
    """Whether a value is of `vmap` or another transform that the graph begins and ends; compilers ask nothing of it."""
    return isinstance(value, torch.Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


_OF_DYNAMO = ("_param_name_to_source", "_backend_id", "_source_to_user_stacks", "compile_subgraph_reason")
# What only traces and reports read.
_LEFT_OUT = frozenset(
    ("creation_timestamp", "from_node", "fwd_source_fn_stack", "grapharg", "nn_module_stack", "source_fn_stack",
     "fxpasses_branches", "fxpasses_restored")
)  # fmt: skip


class _Operand:
    """A node among the operands of another: its number. The class itself stands for an attribute that is missing."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _Operand, (self.number,)


class Input:
    """A graph's input, whose description has all that compilers ask of it."""

    def __init__(self, fake: Any) -> None:
        self.fake = fake


def _loaded_graph_module(
    kind: tuple[str, bool],
    attributes: dict[str, Any],
    more: dict[str, Any],
    meta: dict[str, Any],
    nodes: list[Any],
    order: list[str],
) -> GraphModule:
    graph = Graph()
    made: list[Node] = []

    def operand(value: Any) -> Any:
        if isinstance(value, _Operand):
            return made[value.number]
        if isinstance(value, (tuple, list)):
            found = [operand(each) for each in value]
            if isinstance(value, list):
                return found
            return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)
        if isinstance(value, dict):
            return {key: operand(each) for key, each in value.items()}
        if isinstance(value, slice):
            return slice(operand(value.start), operand(value.stop), operand(value.step))
        return value

    for op, target, args, kwargs, called, of_type, notes, source in nodes:
        node = graph.create_node(op, target, operand(args), operand(kwargs), called, of_type)
        if node.name != called:
            raise CannotPickle(f"a node called {called} gets the name {node.name}")
        node.meta = notes
        if source is not _Operand:
            node._dynamo_source = source
        made.append(node)
    name, lazily = kind
    gm = new_graph_module(attributes, graph, name) if lazily else GraphModule(attributes, graph, class_name=name)
    gm.meta = meta
    for key, value in more.items():
        setattr(gm, key, value)
    own = gm.__dict__
    gm.__dict__ = {key: own[key] for key in [*order, *own] if key in own}  # the order counts for AOTAutograd's cache
    return gm


def _reduced_input(pickler: _Pickler, value: Input) -> Any:
    described = pickler._describer.describe_tensor(value.fake)
    for each in _parts(described):
        if each.view_func is not None and not isinstance(each.view_func, _FakeTensorViewFunc):
            raise CannotPickle(f"an input is a view made by {each.view_func}")
        if each.ctx is not None or each.attrs is not None:
            raise CannotPickle(f"an input is a {type(value.fake).__name__}")
    return _loaded_input, (_storage(value.fake), described)


def _parts(described: Any) -> list[Any]:
    """A tensor's description, and those of the tensors that it holds: what it is a view of, and its gradient."""
    held = [each for each in (described.base, described.grad) if each is not None]
    return [described, *(part for each in held for part in _parts(each))]


def _loaded_input(storage: int, described: Any) -> Any:
    loading = _loading.get()

    def fake(make: Callable[[], Any], device: Any) -> Any:
        with no_dispatch():
            meta = make()
            loading.of_storage.setdefault(storage, meta)
            return FakeTensor(loading.fake_mode, meta, device)

    return loading.converter.meta_tensor(described, loading.shape_env, fake, None, None)


def _fake_tensor(pickler: _Pickler, fake: Any) -> Any:
    if fake.layout is not torch.strided or type(fake) is not FakeTensor:
        raise CannotPickle(f"a result is a {type(fake).__name__} of layout {fake.layout}")
    sizes = tuple(fake.shape), fake.stride(), fake.storage_offset()
    if not isinstance(sizes[2], int):
        return _reduced_input(pickler, Input(fake))
    flags = fake.requires_grad, fake.is_leaf
    return _loaded_fake_tensor, (_storage(fake), sizes, fake.dtype, fake.device, flags)


def _storage(fake: Any) -> int:
    """A number that tensors of one memory have in common."""
    return int(fake.untyped_storage()._cdata)


def _loaded_fake_tensor(
    storage: int, sizes: Any, dtype: torch.dtype, device: torch.device, flags: tuple[bool, bool]
) -> Any:
    loading = _loading.get()
    shape, strides, offset = sizes
    requires_grad, is_leaf = flags
    with no_dispatch():
        of = loading.of_storage.get(storage)
        if of is None:
            meta = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
            if offset != 0:
                meta = torch.empty(0, dtype=dtype, device="meta").set_(meta.untyped_storage(), offset, shape, strides)
            loading.of_storage[storage] = meta
        else:
            meta = torch.as_strided(of.detach().view(dtype) if of.dtype != dtype else of, shape, strides, offset)
        made = FakeTensor(loading.fake_mode, meta, device)
    if requires_grad and not is_leaf:
        with torch.enable_grad():
            return _Computed.apply(loading.root, made)
    return made.requires_grad_(requires_grad)


class _Computed(torch.autograd.Function):
    """Makes a tensor one that autograd has computed."""

    @staticmethod
    def forward(ctx: Any, root: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(made)
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError


def _fake_mode(pickler: _Pickler, mode: FakeTensorMode) -> Any:
    pickler._mode = pickler._mode or mode
    if mode is not pickler._mode:
        raise CannotPickle("it holds fake tensors of two traces")
    return _loaded_fake_mode, ()


def _loaded_fake_mode() -> FakeTensorMode:
    return _loading.get().fake_mode


def _sym_node(pickler: _Pickler, value: Any) -> Any:
    node = value.node
    if not isinstance(node, SymNode):
        raise CannotPickle(f"a number is a {type(node).__name__}")
    return _loaded_sym_node, (type(value), node._expr, node.shape_env, node.pytype, node._hint)


def _loaded_sym_node(kind: Any, expression: Any, shape_env: ShapeEnv, pytype: type, hint: Any) -> Any:
    return kind(SymNode(expression, shape_env, pytype, hint))


# What a trace has set on the environment, or what belongs to its process.
_NOT_OF_ENV = frozenset(
    ("tracked_fakes", "fake_tensor_cache", "real_tensor_prop_unbacked_vals", "_log_real_tensor_propagation",
     "evaluate_expr", "guard_or_defer_runtime_assert")
)  # fmt: skip


def _shape_env(pickler: _Pickler, env: ShapeEnv) -> Any:
    state = {key: value for key, value in env.__dict__.items() if key not in _NOT_OF_ENV}
    return _loaded_shape_env, (), {**state, "frozen": False, "runtime_asserts_frozen": False}, None, None, _fill


def _loaded_shape_env() -> ShapeEnv:
    return _loading.get().shape_env


def _fill(env: ShapeEnv, state: dict[str, Any]) -> None:
    env.__dict__.update(state)


def _operator(pickler: _Pickler, op: Any) -> Any:
    if isinstance(op, torch._ops.OpOverload):
        namespace, _, name = op._schema.name.partition("::")
        return _loaded_operator, (namespace, name, op._overloadname, _defining_module(namespace, name))
    if isinstance(op, torch._ops.OpOverloadPacket):
        namespace, _, name = op._qualified_op_name.partition("::")
        return _loaded_operator, (namespace, name, None, _defining_module(namespace, name))
    name = str(getattr(op, "_name", ""))
    if getattr(torch.ops.higher_order, name, None) is op:
        return _loaded_operator, ("higher_order", name, None, None)
    raise CannotPickle(f"{op} is no operator that a program finds by its name")


def _defining_module(namespace: str, name: str) -> str | None:
    """The module of this package that defines an operator of its own, as a `custom_op` or by a function of its name."""
    if namespace != "fxpasses":
        return None
    functions = None
    for place, module in list(sys.modules.items()):
        found: Any = vars(module).get(name) if place.startswith("fxpasses.") else None
        if getattr(found, "_qualname", None) == f"{namespace}::{name}" and found._init_fn.__module__ == place:
            return place
        if getattr(found, "__module__", None) == place and place.endswith(".operators"):
            functions = place
    if functions is None:
        raise CannotPickle(f"no module has the operator fxpasses::{name}")
    return functions


def _loaded_operator(namespace: str, name: str, overload: str | None, module: str | None) -> Any:
    if module is not None:
        importlib.import_module(module)
    packet: Any = getattr(getattr(torch.ops, namespace), name)
    return packet if overload is None else getattr(packet, overload)


def _function(pickler: _Pickler, function: Any) -> Any:
    """A function of C++ by its name in torch, where `pickle` would search for it in all modules."""
    name = str(getattr(function, "__name__", ""))
    for place in (getattr(function, "__module__", None), *_PLACES):
        if place and getattr(_module(place), name, None) is function:
            return _loaded_function, (place, name)
    return NotImplemented


_PLACES = ("torch", "torch._C._nn", "torch.nn.functional", "torch._C._linalg", "torch._C._special", "torch._C._fft")


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:  # `torch._C._nn` is no module that can be imported
        parent, _, last = name.rpartition(".")
        return getattr(_module(parent), last, None) if parent else None


def _loaded_function(place: str, name: str) -> Any:
    return getattr(_module(place), name)


def _code(pickler: _Pickler, code: types.CodeType) -> Any:
    """Dynamo's code has constants that `marshal` does not take, such as dtypes."""
    bare = code.replace(co_consts=())
    return _loaded_code, (marshal.dumps(bare), list(code.co_consts))


def _loaded_code(bare: bytes, constants: list[Any]) -> types.CodeType:
    code: types.CodeType = marshal.loads(bare)
    return code.replace(co_consts=tuple(constants))


def _python_module(pickler: _Pickler, module: types.ModuleType) -> Any:
    return importlib.import_module, (module.__name__,)


def _python_function(pickler: _Pickler, function: Any) -> Any:
    """`torch.nn.functional.max_pool2d` is found in its module, but not by the name that it has in itself."""
    return NotImplemented if "<locals>" not in function.__qualname__ else _function(pickler, function)


def _module_of_program(pickler: _Pickler, module: torch.nn.Module) -> Any:
    return NotImplemented if type(module).__module__.startswith("fxpasses.") else _refused(pickler, module)


def _refused(pickler: _Pickler, value: Any) -> Any:
    raise CannotPickle(f"it holds a {type(value).__name__}")


_REDUCED: tuple[tuple[Any, Callable[[_Pickler, Any], Any]], ...] = (
    (Input, _reduced_input),
    (FakeTensor, _fake_tensor),
    (GraphModule, _graph_module),
    ((torch.SymInt, torch.SymFloat, torch.SymBool), _sym_node),
    (ShapeEnv, _shape_env),
    ((torch._ops.OperatorBase, torch._ops.OpOverloadPacket), _operator),
    (types.CodeType, _code),
    (types.ModuleType, _python_module),
    ((types.BuiltinFunctionType, types.MethodDescriptorType), _function),
    (types.FunctionType, _python_function),
    (torch.nn.Module, _module_of_program),
    (FakeTensorMode, _fake_mode),
    ((Node, torch.Tensor), _refused),
)
