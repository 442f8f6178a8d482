"""The tensors that a forward graph saves for its backward graph, and which of them could be moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._prims_common import is_non_overlapping_and_dense_or_false
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxpasses.graph.aliases import AliasSets, storages, written_operands
from fxpasses.graph.symbols import bytes_of
from fxpasses.offload.runtime import device_copies
from fxpasses.report import Reason


@dataclass
class Partition:
    """A forward and a backward graph, as AOTAutograd's partitioners return them.

    The first `outputs` of forward's outputs go to the caller; the others are saved, and are placeholders of the same
    name in backward. inputs: the names of forward's inputs that are activations (`inputs.py`).
    """

    forward: GraphModule
    backward: GraphModule
    outputs: int
    inputs: frozenset[str] = frozenset()

    @property
    def returned(self) -> Sequence[object]:
        return list(self.forward.graph.output_node().args[0])  # type: ignore[arg-type]

    def saved(self) -> list[Node]:
        return [node for node in self.returned[self.outputs :] if isinstance(node, Node)]


@dataclass
class Group:
    """Saved tensors that share memory. lead: the tensor to move, which spans the others and need not be saved itself.
    views: the tensors that backward rebuilds from it, each with its offset, in elements, from the lead's first one."""

    lead: Node
    views: list[tuple[Node, int | torch.SymInt]] = field(default_factory=list)
    lead_is_saved: bool = True

    @property
    def saved(self) -> list[Node]:
        return [self.lead] * self.lead_is_saved + [view for view, _ in self.views]


def groups(
    partition: Partition, tier: str, replayed: bool = False
) -> tuple[list[Group], list[tuple[Node, Reason, str]]]:
    """The groups that may move, and the tensors that may not, with reasons. replayed: see `OffloadActivations`."""
    given = _owned(partition)
    returned = {s for node in partition.returned[: partition.outputs] if isinstance(node, Node) for s in storages(node)}
    used = {node.name for node in partition.backward.graph.find_nodes(op="placeholder") if node.users}
    convolves = any("convolution" in str(node.target) for node in partition.forward.graph.nodes)
    refused: list[tuple[Node, Reason, str]] = []
    leads: dict[int, list[Node]] = {}
    for node in partition.saved():
        if node.name not in used or not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # a size, or a tensor that backward does not use
        if (reason := _unsupported(node, tier, replayed, convolves)) is not None:
            refused.append((node, *reason))
        elif (storage := storages(node)[0]) in given or storage in returned:
            refused.append((node, Reason.NOT_COMPUTED if storage in given else Reason.RETURNED, ""))
        else:
            leads.setdefault(storage, []).append(node)
    found = []
    memory = AliasSets(partition.forward.graph.nodes)
    for members in leads.values():
        names = dict.fromkeys(node.name for node in members)
        group = _group([next(n for n in members if n.name == name) for name in names], memory, partition.backward)
        if isinstance(group, Group):
            found.append(group)
        else:
            refused += [(node, *group) for node in members]
    return found, refused


def _owned(partition: Partition) -> set[int]:
    """The storages of forward's inputs that have an owner, and of tensors that either graph writes to."""
    found = _written(partition.forward)
    for node in partition.forward.graph.nodes:
        if node.op in ("placeholder", "get_attr") and node.name not in partition.inputs:
            found.update(storages(node))
    changed = _written(partition.backward)
    for node in partition.backward.graph.find_nodes(op="placeholder"):
        found.update(changed.intersection(storages(node)))
    return found


def _written(gm: GraphModule) -> set[int]:
    return {key for node in gm.graph.nodes for operand in written_operands(node) for key in storages(operand)}


def _unsupported(node: Node, tier: str, replayed: bool, convolves: bool) -> tuple[Reason, str] | None:
    value = node.meta["val"]
    if type(value) is not torch._subclasses.FakeTensor or value.layout is not torch.strided:
        return Reason.UNSUPPORTED_VALUE, f"a {type(value).__name__} of layout {value.layout}"
    if value.is_quantized or value.is_conj() or value.is_neg():
        return Reason.UNSUPPORTED_VALUE, "quantized, conjugated or negated"
    if convolves and value.dim() == 4:
        return Reason.STRIDES_MAY_CHANGE, ""
    if tier == "host" and value.device.type == "cpu":
        text = 'they lie in host memory already, and "fastpack.offload" is "host" ("disk" works on the CPU)'
        return Reason.WRONG_DEVICE, text
    if replayed and value.device.type == "cuda":
        return Reason.REPLAYED, 'mode="reduce-overhead", or another that uses CUDA graphs'
    if device_copies.unified_memory(value.device):
        return Reason.WRONG_DEVICE, f"{value.device} shares its memory with the host"
    return None


def _group(members: list[Node], memory: AliasSets, backward: GraphModule) -> Group | tuple[Reason, str]:
    """The group whose lead is the smallest tensor that spans all members; if no tensor is known to, why none moves.

    A lead that is computed has neither gaps nor overlaps: some columns, or what `unfold` returns, Inductor may compute
    to memory of their own, with other strides, where a view was traced.
    """
    first = members[0]
    if len(members) == 1 and _keeps_strides(first):
        return Group(first)
    around = [node for node in memory.sharing(first) if node not in members and node.op != "output"]
    covers = [lead for lead in (*members, *around) if _covers(lead, members, backward)]
    leads = [lead for lead in covers if _keeps_strides(lead)]
    if not leads:
        has_gaps = covers or len(members) == 1
        return (Reason.UNSUPPORTED_VALUE, "it has gaps or overlaps") if has_gaps else (Reason.SHARED_MEMORY, "")
    lead = min(leads, key=lambda node: (bytes_of(node.meta["val"]) or 0, node not in members))
    start = lead.meta["val"].storage_offset()
    views = [(node, node.meta["val"].storage_offset() - start) for node in members if node is not lead]
    return Group(lead, views, lead in members)


def _keeps_strides(node: Node) -> bool:
    """Whether a compiler can be told to give a tensor its traced strides: an input, or one without gaps and overlaps.

    Private name, checked on torch 2.11, 2.13 and 2.15: `is_non_overlapping_and_dense_or_false`.
    """
    return node.op == "placeholder" or bool(is_non_overlapping_and_dense_or_false(node.meta["val"]))


def _covers(lead: Node, members: list[Node], backward: GraphModule) -> bool:
    """Whether a tensor is known to contain all elements of others, at offsets that backward can compute."""
    value = lead.meta.get("val")
    if type(value) is not torch._subclasses.FakeTensor or value.is_conj() or value.is_neg():
        return False
    start, end = _extent(value)
    for member in members:
        other = member.meta["val"]
        first, last = _extent(other)
        is_inside = statically_known_true(start <= first) and statically_known_true(last <= end)
        if other.dtype != value.dtype or not is_inside:
            return False
        if any(whence(n, lead, backward) is None for n in (*other.shape, *other.stride(), first - start)):
            return False
    return True


def _extent(value: torch.Tensor) -> tuple[int | torch.SymInt, int | torch.SymInt]:
    """The range of a tensor's elements in its storage: the first, and the one after the last."""
    start = value.storage_offset()
    return start, start + 1 + sum((size - 1) * step for size, step in zip(value.shape, value.stride(), strict=True))


def whence(number: int | torch.SymInt, lead: Node, backward: GraphModule) -> int | Node | tuple[Any, int] | None:
    """How backward obtains a number: a constant, a saved size, (operator, dimension) of the lead; None if it cannot."""
    if not isinstance(number, torch.SymInt):
        return number
    expression = number.node.expr
    if expression.is_number:
        return int(expression)
    value = lead.meta["val"]
    aten = torch.ops.aten
    for operator, numbers in ((aten.sym_size.int, value.shape), (aten.sym_stride.int, value.stride())):
        for dimension, own in enumerate(numbers):
            if type(own) is not int and own.node.expr == expression:
                return operator, dimension
    for node in backward.graph.find_nodes(op="placeholder"):
        saved = node.meta.get("val")
        if isinstance(saved, torch.SymInt) and saved.node.expr == expression:
            return node
    return None
