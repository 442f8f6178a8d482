"""Put `offload` and `settle` into the forward graph, and the chain of `reload` into the backward graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.inspect.flops import flops_of
from fxpasses.options import Offload
from fxpasses.passes.offload.candidates import last_use
from fxpasses.passes.offload.saved import Group, Memory, Partition, storages
from fxpasses.runtime.offload import layout, operators

MARK = "fxpasses_offload"  # in `node.meta` of what was chosen to be moved

# What AOTAutograd and Inductor look at later. The last one is PyTorch's own, checked on torch 2.13: saved tensors that
# carry it come last, and are counted.
_CARRIED = ("stack_trace", "nn_module_stack", "partitioner_tag", "saved_tensor_with_no_vc_check")


def insert(partition: Partition, groups: list[Group], options: Offload) -> None:
    """Rewrite both graphs in place: move the groups whose lead carries the mark."""
    marked = [group for group in groups if group.lead.meta.get(MARK)]
    if not marked:
        return
    handles = _insert_offloads(partition, marked, options)
    _insert_reloads(partition, marked, handles, options)
    for module in (partition.forward, partition.backward):
        module.graph.lint()
        module.recompile()


def _insert_offloads(partition: Partition, groups: list[Group], options: Offload) -> dict[str, Node]:
    """`offload` after the last use of each lead; returns the handles by the lead's name."""
    graph = partition.forward.graph
    memory = Memory.of(graph.nodes)
    positions = {node: number for number, node in enumerate(graph.nodes)}
    places = {group.lead: last_use(group.lead, memory, positions) for group in groups}
    sources = sorted(places, key=lambda lead: positions[places[lead]])
    output, distance = graph.output_node(), options.buffers - 1
    at_end = _last_computed(partition)
    handles: list[Node] = []
    for number, source in enumerate(sources):
        earlier = number - distance
        previous = (sources[earlier], handles[earlier]) if distance and earlier >= 0 else (None, None)
        arguments = (source, *previous, options.tier, options.directory, options.host_budget, distance == 0)
        place = _after(places[source], handles[-1] if handles else None)
        with graph.inserting_after(place):
            handle = _call(graph, operators.offload, arguments, layout.empty_like, source, torch.device("cpu"))
        handles.append(handle)
    if distance:
        with graph.inserting_before(output):
            for source, handle in list(zip(sources, handles, strict=True))[-distance:]:
                after = at_end if at_end is not source else None
                graph.call_function(operators.settle._opoverload, (handle, source, after)).meta["val"] = None
    by_name = {source.name: handle for source, handle in zip(sources, handles, strict=True)}
    _return(partition, by_name, {other.name for group in groups for other, _ in group.others})
    return by_name


def _return(partition: Partition, handles: dict[str, Node], dropped: set[str]) -> None:
    """Have the forward graph save handles instead of the tensors, and not save what is rebuilt."""
    output, returned = partition.forward.graph.output_node(), list(partition.returned)
    stays = [
        number
        for number, node in enumerate(returned)
        if number < partition.outputs or getattr(node, "name", "") not in dropped
    ]
    new: list[Any] = [
        returned[n] if n < partition.outputs else handles.get(getattr(returned[n], "name", ""), returned[n])
        for n in stays
    ]
    output.args = (tuple(new),)
    described = output.meta.get("desc")  # PyTorch's words for each output
    if isinstance(described, (list, tuple)) and len(described) == len(returned):
        output.meta["desc"] = [described[number] for number in stays]


def _insert_reloads(partition: Partition, groups: list[Group], handles: dict[str, Node], options: Offload) -> None:
    """Saved tensors become handles, and a `reload` stands before the first use of each."""
    graph = partition.backward.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    positions = {node: number for number, node in enumerate(graph.nodes)}
    firsts: dict[str, Node] = {}
    for group in groups:
        members = [placeholders[node.name] for node in (group.lead, *(other for other, _ in group.others))]
        firsts[group.lead.name] = min((user for m in members for user in m.users), key=lambda n: positions[n])
    order = sorted(groups, key=lambda group: positions[firsts[group.lead.name]])
    entries = []
    for group in order:
        entry = placeholders[group.lead.name]
        value = entry.meta["val"]
        with graph.inserting_before(entry):
            # Under the name of its handle: the output and the placeholder of a saved tensor are matched by position
            # and, in places, by name.
            new = graph.placeholder(handles[group.lead.name].name)
        new.meta = {**entry.meta, "val": handles[group.lead.name].meta["val"]}
        new.meta.pop("tensor_meta", None)
        entries.append((entry, new, value))
    distance = options.buffers - 1
    before: Node | None = None
    for number, group in enumerate(order):
        entry, handle, value = entries[number]
        first = firsts[group.lead.name]
        ahead = range(1, 1 + distance) if number == 0 else range(distance, 1 + distance) if distance else ()
        upcoming = [entries[number + step][1] for step in ahead if number + step < len(order)]
        after = _computed_from(before, first, graph) if before is not None else None
        arguments = (handle, upcoming, after, value.device, distance)
        with graph.inserting_before(first):
            back = _call(graph, operators.reload, arguments, layout.empty_like, handle, value.device)
            back.meta = {**handle.meta, **back.meta}
            entry.replace_all_uses_with(back)
            for other, offset in group.others:
                view = placeholders[other.name]
                seen = view.meta["val"]
                rebuilt = graph.call_function(
                    torch.ops.aten.as_strided.default, (back, list(seen.shape), list(seen.stride()), offset)
                )
                rebuilt.meta = {**view.meta, "val": back.meta["val"].as_strided(seen.shape, seen.stride(), offset)}
                view.replace_all_uses_with(rebuilt)
                graph.erase_node(view)
        graph.erase_node(entry)
        before = back


def _call(
    graph: Graph, operator: Any, arguments: tuple[Any, ...], make: Callable[..., Any], like: Node, device: Any
) -> Node:
    node = graph.call_function(operator._opoverload, arguments)
    node.meta = {key: like.meta[key] for key in _CARRIED if key in like.meta}
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = make(value, device)
    return node


def _after(place: Node, other: Node | None) -> Node:
    """The later of two nodes."""
    return other if other is not None and place < other else place


def _last_computed(partition: Partition) -> Node | None:
    """What forward computes last: a tensor that is not a view of an input."""
    for node in reversed(partition.forward.graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and storages(node):
            return node
    return None


def _computed_from(source: Node, before: Node, graph: Graph) -> Node | None:
    """The last tensor before node `before` that depends on `source`: the end of the work that `source` was needed for.

    Matrix products and the like before others: a compiler makes their results tensors anyway.
    """
    depends = {source}
    found: Node | None = None
    heavy = False
    node = source.next
    while node is not before and node.op != "output":
        if any(argument in depends for argument in node.all_input_nodes):
            depends.add(node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and not _shares(node, source):
                weight = bool(flops_of(node, [value]))
                if weight or not heavy:
                    found, heavy = node, weight
        node = node.next
    return found


def _shares(node: Node, source: Node) -> bool:
    return bool(set(storages(node)) & set(storages(source)))


def mark(groups: list[Group], moved: set[str]) -> None:
    """Tag what was chosen."""
    for group in groups:
        if group.lead.name in moved:
            group.lead.meta[MARK] = True
