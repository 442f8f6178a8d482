"""Whether a CUDA graph can record a graph whole, the nodes in the way, and what has it recorded again.

    lengths: "i64[4]"                     on the device
    longest = lengths.max();  item = longest.item()      in the way: the host reads a value from the device
    rows = x[x > 0]                                      in the way: its size depends on data
    y = x.cpu()                                          in the way: it copies to the host

A graph is one of Dynamo's, with bodies, or one of AOTAutograd's. A node counts where it causes something: a tensor of
size [u0] is not in the way, the node that brings u0 into the graph is. What a kernel does inside is not known.

The graph's device is the one on which its floating-point tensors are. If they are all on the CPU, the answer is the one
for the same graph on an accelerator; only copies that name no device (`.cpu()`, `.numpy()`) are known as such there.

The answer follows Inductor's. With `torch._inductor.config.graph_partition` on, which is the default, it records the
pieces between the nodes in the way, and a number that the graph takes is a part of what it records, as is a size. With
it off, one node in the way leaves the graph unrecorded, and a number that only the running program knows is in the way
even as an input. Private names followed, on torch 2.11, 2.13 and 2.15, none of which is imported:
`torch._inductor.utils.get_first_incompatible_cudagraph_node`, which calls `is_cudagraph_unsafe_fx_node`
(`FORBIDDEN_CUDAGRAPH_OPS`, the tag `cudagraph_unsafe`, `_fx_node_is_input_dependent_cudagraph_unsafe`, sparse results)
and refuses any unbacked symbol; `torch._inductor.cudagraph_utils.check_lowering_disable_cudagraph`, which refuses CPU
tensors and several devices; `torch._inductor.lowering.cond` and `while_loop`; and
`torch._inductor.cudagraph_trees.cudagraphify_impl`, which records once for each value of the integer inputs. Inductor
treats functional collectives as any other operator, so they are not in the way. It inlines 0-d constants on the CPU,
so neither are those.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from fxpasses.base.cuda_graphs import Capturability, NumberInput, Obstacle, Obstruction
from fxpasses.graph.calls import operator_of
from fxpasses.graph.provenance import in_program, module_of, source, where
from fxpasses.graph.symbols import constant, free_symbols, is_symbolic, unbacked_symbols
from fxpasses.inspect.snapshot import leaves_of, value_of

_READS = frozenset({"item", "tolist", "numpy", "is_nonzero", "equal", "allclose", "_local_scalar_dense"})
_CONTROL_FLOW = frozenset({"cond", "while_loop", "while_loop_stack_output", "scan", "map_impl"})
_MASK_WRITES = frozenset({"index_put", "index_put_", "_unsafe_index_put"})
# Inductor's FORBIDDEN_CUDAGRAPH_OPS that have no tag, and no unbacked symbol in their result either.
_FORBIDDEN = frozenset(
    {
        "aten._fused_moving_avg_obs_fq_helper.default",
        "aten._fused_moving_avg_obs_fq_helper_functional.default",
        "fbgemm.dense_to_jagged.default",
        "fbgemm.jagged_to_padded_dense.default",
        "run_and_save_rng_state",
        "run_with_rng_state",
        "aten._linalg_eigh.default",  # listed since 2.15
        *(["aten.topk.default"] if torch.version.hip is not None else []),
    }
)
_MAIN = "main"  # as in paths of records


def capturability(gm: GraphModule, pieces: bool | None = None) -> Capturability:
    """Whether a CUDA graph can record `gm`, whose nodes have fake values (`example_value` or `val`).

    pieces: whether pieces of the graph may be recorded, by default as Inductor is configured. Linear in the graph,
    changes nothing, and never raises for a graph whose nodes lack values: what is not known is not in the way.
    """
    inductor: Any = torch._inductor.config
    search = _Search(_device_of(gm), inductor.graph_partition if pieces is None else pieces)
    search.graph(gm, _MAIN)
    return Capturability(search.found, _numbers(gm))


class _Search:
    def __init__(self, device: torch.device, pieces: bool) -> None:
        self.device = device
        self.pieces = pieces
        self.found: list[Obstacle] = []
        self.known: set[Any] = set()  # unbacked symbols that a node before has brought in
        self.constants: set[Node] = set()  # 0-d CPU tensors that a compiler inlines

    def graph(self, gm: GraphModule, path: str) -> None:
        for node in gm.graph.nodes:
            if node.op == "output" or isinstance(_attribute(gm, node), GraphModule):
                continue
            found = self._obstruction(node, path == _MAIN)
            if found is not None:
                reason, text = found
                inside = "" if path == _MAIN else path
                self.found.append(Obstacle(node.name, reason, text, _where(node), module_of(node)[0], inside))
            for reference in node.all_input_nodes:
                if isinstance(body := _attribute(gm, reference), GraphModule):
                    self.graph(body, f"{path}/{reference.target}")

    def _obstruction(self, node: Node, in_main: bool) -> tuple[Obstruction, str] | None:
        """The first reason, if any. Every check that keeps state runs for every node."""
        number, place = self._number(node), self._place(node, in_main)
        return _operator(node) or number or place

    def _number(self, node: Node) -> tuple[Obstruction, str] | None:
        """Numbers that come from data: who brings their symbol into the graph."""
        leaves = _leaves(node)
        new = {symbol for leaf in leaves for symbol in unbacked_symbols(leaf)} - self.known
        self.known |= new
        is_call = node.op.startswith("call")
        if is_call and _has_data_dependent_size(node, leaves):
            return Obstruction.DATA_DEPENDENT_SIZE, ""
        if is_call and new and node.meta.get("unbacked_bindings"):
            in_size = any(isinstance(leaf, torch.Tensor) for leaf in leaves)
            return Obstruction.DATA_DEPENDENT_SIZE if in_size else Obstruction.HOST_READ, ""
        if is_call or not new:  # a call that binds none has only another name for a symbol that is known
            return None
        if self.pieces and not isinstance(value_of(node), torch.SymFloat):  # what is recorded takes no floats
            return None
        return Obstruction.UNBACKED_NUMBER, ", ".join(sorted(map(str, new)))

    def _place(self, node: Node, in_main: bool) -> tuple[Obstruction, str] | None:
        """Tensors that are not on the graph's device, and copies to and from it."""
        name = operator_of(node)
        if name == "getitem" or (node.op == "placeholder" and not in_main):  # what was counted before, by another name
            return None
        if self.device.type == "cpu":
            return (Obstruction.COPY_TO_HOST, "") if name == "cpu" else None
        results = [tensor.device for tensor in _tensors(node)]
        operands = [(operand, tensor.device) for operand in node.all_input_nodes for tensor in _tensors(operand)]
        if self._is_constant(node, results):
            self.constants.add(node)
            return None
        from_host = [operand not in self.constants for operand, device in operands if device.type == "cpu"]
        from_device = any(device.type not in ("cpu", "meta") for _, device in operands)
        for device in results:
            if device.type == "cpu":
                return (Obstruction.COPY_TO_HOST if from_device else Obstruction.ON_HOST), ""
            if device.type != "meta" and device != self.device:
                return Obstruction.OTHER_DEVICE, f"{device}, and the graph is on {self.device}"
        if results and any(from_host) and (not from_device or name in ("copy", "copy_")):
            return Obstruction.COPY_FROM_HOST, ""
        return None

    def _is_constant(self, node: Node, results: list[torch.device]) -> bool:
        on_cpu = [tensor for tensor in _tensors(node) if tensor.device.type == "cpu" and tensor.ndim == 0]
        known = all(operand in self.constants for operand in node.all_input_nodes)
        return bool(results) and len(on_cpu) == len(results) and known and node.op != "placeholder"


def _operator(node: Node) -> tuple[Obstruction, str] | None:
    """What an operator says of itself, by its name and its tags."""
    name, target = operator_of(node), node.target
    tags = target.tags if isinstance(target, torch._ops.OpOverload) else ()
    if name in _READS or torch.Tag.data_dependent_output in tags:
        return Obstruction.HOST_READ, ""
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _CONTROL_FLOW:
        return Obstruction.CONTROL_FLOW, ""
    if torch.Tag.cudagraph_unsafe in tags or str(target) in _FORBIDDEN:
        return Obstruction.UNSAFE_OPERATOR, str(target)
    if _writes_through_mask(node, name):
        return Obstruction.MASK_WRITE, ""
    if any(tensor.is_sparse for tensor in _tensors(node)):
        return Obstruction.SPARSE, ""
    return None


def _writes_through_mask(node: Node, name: str) -> bool:
    """`x[mask] = y` and its operators; a mask as such is no copy, so `masked_fill` is not among them."""
    if name not in _MASK_WRITES | {"setitem"} or len(node.args) < 2:
        return False
    indices = node.args[1] if isinstance(node.args[1], (tuple, list)) else (node.args[1],)
    tensors = [tensor for index in indices if isinstance(index, Node) for tensor in _tensors(index)]
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors)


def _has_data_dependent_size(node: Node, leaves: list[Any]) -> bool:
    """Whether an operator that may decide a size does so here.

    The tag alone does not say: `aten.index.Tensor` has it for its masks, and takes numbers as well.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.dynamic_output_shape not in target.tags:
        return operator_of(node) in ("nonzero", "masked_select") and any(map(unbacked_symbols, leaves))
    return not leaves or any(unbacked_symbols(leaf) for leaf in leaves)


def _device_of(gm: GraphModule) -> torch.device:
    """Where the floating-point tensors are, or all tensors if there are none; an accelerator before the CPU."""
    tensors = [
        tensor
        for module in gm.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        for tensor in _tensors(node)
        if tensor.device.type != "meta"
    ]
    floats = [tensor for tensor in tensors if tensor.dtype.is_floating_point or tensor.dtype.is_complex]
    devices = [tensor.device for tensor in floats or tensors]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))


def _numbers(gm: GraphModule) -> list[NumberInput]:
    sizes = {symbol for node in gm.graph.nodes for tensor in _tensors(node) for symbol in free_symbols(tensor)}
    found, known = [], set[Any]()
    placeholders = gm.graph.find_nodes(op="placeholder")
    numbers = [value for value in map(value_of, placeholders) if is_symbolic(value)]
    passed = {symbol for value in numbers for symbol in free_symbols(value)}
    for node in placeholders:
        value = value_of(node)
        sized = {symbol for tensor in _tensors(node) for symbol in unbacked_symbols(tensor)} - passed - known
        if sized:  # the prologue's results bring their sizes
            known |= sized
            found.append(NumberInput(node.name, "int", True, in_program(source(node)), _where(node)))
        in_sizes = is_symbolic(value) and bool(sizes & free_symbols(value))
        if is_symbolic(value) and constant(value) is None and (node.users or in_sizes):
            kind = {torch.SymInt: "int", torch.SymFloat: "float", torch.SymBool: "bool"}[type(value)]
            found.append(NumberInput(node.name, kind, in_sizes, in_program(source(node)), _where(node)))
    return found


def _where(node: Node) -> str:
    """The node's place in the program; for an input without one, that of its first user with one."""
    users = node.users if node.op == "placeholder" else ()
    return where(node) or next(filter(None, map(where, users)), "")


def _attribute(gm: GraphModule, node: Node) -> Any:
    return getattr(gm, str(node.target), None) if node.op == "get_attr" else None


def _leaves(node: Node) -> list[Any]:
    return [leaf for leaf in leaves_of(node) if isinstance(leaf, torch.Tensor) or is_symbolic(leaf)]


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    return (leaf for leaf in _leaves(node) if isinstance(leaf, torch.Tensor))
