"""The tensors that a forward graph saves for its backward graph, and who shares memory with whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.fx import GraphModule, Node

from fxpasses.report import Reason
from fxpasses.runtime.offload import device_copies
from fxpasses.runtime.offload.layout import span


@dataclass
class Partition:
    """A forward and a backward graph, as AOTAutograd's partitioners return them.

    Of forward's outputs the first `outputs` go to the caller; the others are saved, and are placeholders of the same
    name in backward.
    """

    forward: GraphModule
    backward: GraphModule
    outputs: int

    @property
    def returned(self) -> Sequence[object]:
        return list(self.forward.graph.output_node().args[0])  # type: ignore[arg-type]

    def saved(self) -> list[Node]:
        return [node for node in self.returned[self.outputs :] if isinstance(node, Node)]


@dataclass
class Group:
    """Saved tensors on one memory. lead: the one that is moved. others: rebuilt from it in backward, as (name, offset
    in elements from the lead's first element)."""

    lead: Node
    others: list[tuple[Node, int]] = field(default_factory=list)


@dataclass
class Memory:
    """Which nodes of a graph share memory. Fake tensors know: a view's fake lies on its base's storage."""

    owners: dict[int, list[Node]]

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Memory:
        owners: dict[int, list[Node]] = {}
        for node in nodes:
            for storage in storages(node):
                owners.setdefault(storage, []).append(node)
        return cls(owners)

    def sharing(self, node: Node) -> list[Node]:
        """All nodes on the memory of a tensor, itself among them, in the graph's order."""
        return self.owners[storages(node)[0]]


def storages(node: Node) -> list[int]:
    """The storages of a node's result, by identity.

    Private name, checked on torch 2.11 and 2.13: `untyped_storage()._cdata`.
    """
    values = node.meta.get("val")
    leaves = values if isinstance(values, (tuple, list)) else [values]
    return [
        leaf.untyped_storage()._cdata
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided
    ]


def groups(partition: Partition, tier: str) -> tuple[list[Group], list[tuple[Node, Reason, str]]]:
    """What could be moved, and what could not, with the reason."""
    given = {
        s for node in partition.forward.graph.nodes if node.op in ("placeholder", "get_attr") for s in storages(node)
    }
    returned = {s for node in partition.returned[: partition.outputs] if isinstance(node, Node) for s in storages(node)}
    used = {node.name for node in partition.backward.graph.find_nodes(op="placeholder") if node.users}
    refused: list[tuple[Node, Reason, str]] = []
    leads: dict[int, list[Node]] = {}
    for node in partition.saved():
        if node.name not in used or not isinstance(node.meta.get("val"), torch.Tensor):
            continue  # sizes, and what backward does not look at
        reason = _unsupported(node, tier)
        if reason is None:
            storage = storages(node)[0]
            if storage in given:
                reason = (Reason.NOT_COMPUTED, "")
            elif storage in returned:
                reason = (Reason.RETURNED, "")
        if reason is None:
            leads.setdefault(storages(node)[0], []).append(node)
        else:
            refused.append((node, *reason))
    found = []
    for members in leads.values():
        names = dict.fromkeys(node.name for node in members)
        group = _group([next(n for n in members if n.name == name) for name in names])
        if group is None:
            refused += [(node, Reason.SHARED_MEMORY, "") for node in members]
        else:
            found.append(group)
    return found, refused


def _unsupported(node: Node, tier: str) -> tuple[Reason, str] | None:
    value = node.meta["val"]
    if type(value) is not torch._subclasses.FakeTensor or value.layout is not torch.strided:
        return Reason.UNSUPPORTED_VALUE, f"a {type(value).__name__} of layout {value.layout}"
    if value.is_quantized or value.is_conj() or value.is_neg():
        return Reason.UNSUPPORTED_VALUE, "quantized, conjugated or negated"
    if tier == "host" and value.device.type == "cpu":
        return (
            Reason.WRONG_DEVICE,
            'they lie in host memory already, and "fastpack.offload" is "host" ("disk" works on the CPU)',
        )
    if device_copies.unified_memory(value.device):
        return Reason.WRONG_DEVICE, f"{value.device} shares its memory with the host"
    return None


def _group(members: list[Node]) -> Group | None:
    """The member that spans the memory of all, and where the others lie in it; None where none is known to."""
    if len(members) == 1:
        return Group(members[0])
    values = [node.meta["val"] for node in members]
    numbers = [n for value in values for n in (*value.shape, *value.stride(), value.storage_offset())]
    if not all(type(number) is int for number in numbers) or len({value.dtype for value in values}) > 1:
        return None
    spans = [(v.storage_offset(), v.storage_offset() + span(v) // v.element_size()) for v in values]
    for lead, (start, end) in zip(members, spans, strict=True):
        if all(start <= first and last <= end for first, last in spans):
            others = [
                (node, first - start) for node, (first, _) in zip(members, spans, strict=True) if node is not lead
            ]
            return Group(lead, others)
    return None
