"""Insert `offload` and `settle` into the forward graph, and the chain of `reload` into the backward graph."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.fx import Graph, Node

from fxpasses.graph.aliases import AliasSets, storages
from fxpasses.graph.flops import flops_of
from fxpasses.offload.candidates import departure
from fxpasses.offload.runtime import layout, operators
from fxpasses.offload.saved import Group, Partition, whence
from fxpasses.options import Offload

MARK = "fxpasses_offload"  # in `node.meta` of the tensors that were chosen to move

# Entries that AOTAutograd and Inductor read later. The last one is private, checked on torch 2.13: saved tensors that
# carry it come last, and are counted.
_CARRIED = ("stack_trace", "nn_module_stack", "partitioner_tag", "saved_tensor_with_no_vc_check")


def insert(
    partition: Partition, groups: list[Group], options: Offload, onward: bool = False, fused: bool = False
) -> None:
    """Rewrite both graphs in place: move the groups whose lead carries the mark.

    onward: whether another backward graph follows, so that its tensors are read ahead too. fused: whether Inductor
    compiles the graphs, and chooses the strides of what they do not return.
    """
    marked = [group for group in groups if group.lead.meta.get(MARK)]
    if not marked:
        return
    handles = _insert_offloads(partition, marked, options, fused)
    _return(partition, marked, handles)
    _insert_reloads(partition, marked, handles, options, onward)
    for module in (partition.forward, partition.backward):
        module.graph.lint()
        module.recompile()


def _insert_offloads(partition: Partition, groups: list[Group], options: Offload, fused: bool) -> dict[str, Node]:
    """Insert `offload` where each lead's copy may start; returns the handles by the lead's name."""
    graph = partition.forward.graph
    memory = AliasSets(graph.nodes)
    positions = {node: number for number, node in enumerate(graph.nodes)}
    places = {group.lead: departure(group.lead, memory, positions) for group in groups}
    leads = sorted(places, key=lambda lead: positions[places[lead]])
    output, distance = graph.output_node(), options.buffers - 1
    at_end = _last_computed(partition)
    sources = [_with_traced_strides(lead, output) if fused else lead for lead in leads]
    handles: list[Node] = []
    for number, (lead, source) in enumerate(zip(leads, sources, strict=True)):
        earlier = number - distance
        previous = (sources[earlier], handles[earlier]) if distance and earlier >= 0 else (None, None)
        arguments = (source, *previous, options.tier, options.directory, options.host_budget, distance == 0)
        with graph.inserting_after(max([places[lead], source, *handles[-1:]])):
            handle = _call(graph, operators.offload, arguments, lead, torch.device("cpu"))
        handles.append(handle)
    if distance:
        with graph.inserting_before(output):
            for lead, source, handle in list(zip(leads, sources, handles, strict=True))[-distance:]:
                after = at_end if at_end is not lead else None
                graph.call_function(operators.settle._opoverload, (handle, source, after)).meta["val"] = None
    return {lead.name: handle for lead, handle in zip(leads, handles, strict=True)}


def _with_traced_strides(lead: Node, output: Node) -> Node:
    """What Inductor computes of a lead, with the strides that it was traced with, for all who read it.

    Inductor gives a graph's results these strides, and a handle is one instead of the lead. It has its source's; if
    those were others, the handle would be copied, and a copy of a handle is of memory that nothing has been written to.
    """
    operator = _force_stride_order()
    if operator is None or lead.op == "placeholder":
        return lead
    graph = lead.graph
    with graph.inserting_after(lead):
        found = graph.call_function(operator, (lead, []))
    with graph.inserting_before(found):
        strides = [_stride(lead, dimension) for dimension in range(lead.meta["val"].dim())]
    found.args, found.meta = (lead, strides), dict(lead.meta)
    lead.replace_all_uses_with(found, delete_user_cb=lambda user: user not in (found, output, *strides))
    return found


def _stride(lead: Node, dimension: int) -> int | Node:
    stride = lead.meta["val"].stride(dimension)
    if isinstance(stride, int):
        return stride
    node = lead.graph.call_function(torch.ops.aten.sym_stride.int, (lead, dimension))
    node.meta["val"] = stride
    return node


def _force_stride_order() -> Any:
    """Inductor's operator that gives a tensor the order of these strides; None if this torch has none. Private name,
    checked on torch 2.11 to 2.15."""
    importlib.import_module("torch._inductor.inductor_prims")
    packet = getattr(torch.ops.prims, "inductor_force_stride_order", None)
    return packet.default if packet is not None else None


def _return(partition: Partition, groups: list[Group], handles: dict[str, Node]) -> None:
    """Let the forward graph save a handle in place of the first tensor of each group, and drop the others."""
    output, returned = partition.forward.graph.output_node(), list(partition.returned)
    instead = {group.saved[0].name: handles[group.lead.name] for group in groups}
    dropped = {node.name for group in groups for node in group.saved[1:]}
    names = [getattr(node, "name", "") if n >= partition.outputs else "" for n, node in enumerate(returned)]
    stays = [number for number, name in enumerate(names) if name not in dropped]
    new: list[Any] = [instead.get(names[number], returned[number]) for number in stays]
    output.args = (tuple(new),)
    described = output.meta.get("desc")  # PyTorch's description of each output
    if isinstance(described, (list, tuple)) and len(described) == len(returned):
        output.meta["desc"] = [described[number] for number in stays]


def _insert_reloads(
    partition: Partition, groups: list[Group], handles: dict[str, Node], options: Offload, onward: bool
) -> None:
    """Replace saved tensors by handles, with a `reload` before the first use of each."""
    graph = partition.backward.graph
    placeholders = {node.name: node for node in graph.find_nodes(op="placeholder")}
    positions = {node: number for number, node in enumerate(graph.nodes)}
    firsts: dict[str, Node] = {}
    for group in groups:
        members = [placeholders[node.name] for node in group.saved]
        firsts[group.lead.name] = min((user for m in members for user in m.users), key=lambda n: positions[n])
    order = sorted(groups, key=lambda group: positions[firsts[group.lead.name]])
    entries = []
    for group in order:
        entry = placeholders[group.saved[0].name]
        with graph.inserting_before(entry):
            # The placeholder gets the name of its handle: PyTorch matches a saved tensor's output and placeholder by
            # position and, in places, by name.
            new = graph.placeholder(handles[group.lead.name].name)
        new.meta = _carried(entry) | {"val": handles[group.lead.name].meta["val"]}
        entries.append(new)
    distance = options.buffers - 1
    before: Node | None = None
    for number, group in enumerate(order):
        handle, device = entries[number], group.lead.meta["val"].device
        first = firsts[group.lead.name]
        ahead = range(1, 1 + distance) if number == 0 else range(distance, 1 + distance) if distance else ()
        upcoming = [entries[number + step] for step in ahead if number + step < len(order)]
        after = _computed_from(before, first, graph) if before is not None else None
        arguments = (handle, upcoming, after, device, distance, onward)
        with graph.inserting_before(first):
            back = _call(graph, operators.reload, arguments, handle, device)
            found = {group.lead.name: back}
            for view, offset in group.views:
                found[view.name] = _rebuild(partition, group.lead, back, view, offset)
        for node in group.saved:
            placeholders[node.name].replace_all_uses_with(found[node.name])
            graph.erase_node(placeholders[node.name])
        before = back


def _rebuild(partition: Partition, lead: Node, back: Node, view: Node, offset: int | torch.SymInt) -> Node:
    """A view of the reloaded tensor, at the caller's insertion point."""
    graph, seen = partition.backward.graph, view.meta["val"]

    def number(wanted: int | torch.SymInt) -> Any:
        found = whence(wanted, lead, partition.backward)
        if not isinstance(found, tuple):
            return found
        operator, dimension = found
        node = graph.call_function(operator, (back, dimension))
        node.meta["val"] = wanted
        return node

    sizes, strides = [number(n) for n in seen.shape], [number(n) for n in seen.stride()]
    rebuilt = graph.call_function(torch.ops.aten.as_strided.default, (back, sizes, strides, number(offset)))
    rebuilt.meta = _carried(view)
    with seen.fake_mode:
        rebuilt.meta["val"] = back.meta["val"].as_strided(seen.shape, seen.stride(), offset)
    return rebuilt


def _call(graph: Graph, operator: Any, arguments: tuple[Any, ...], like: Node, device: torch.device) -> Node:
    """A call whose result is a tensor like that of `like`, on `device`."""
    node = graph.call_function(operator._opoverload, arguments)
    node.meta = _carried(like)
    value = like.meta["val"]
    with value.fake_mode:
        node.meta["val"] = layout.empty_like(value, device)
    return node


def _carried(node: Node) -> dict[str, Any]:
    return {key: node.meta[key] for key in _CARRIED if key in node.meta}


def _last_computed(partition: Partition) -> Node | None:
    """The last tensor that forward computes; None if there is none."""
    for node in reversed(partition.forward.graph.nodes):
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and storages(node):
            return node
    return None


def _computed_from(source: Node, before: Node, graph: Graph) -> Node | None:
    """The last tensor before node `before` that depends on `source`: the end of the work that needs `source`.

    Matrix products and the like take precedence: a compiler materializes their results anyway.
    """
    depends, memory = {source}, set(storages(source))
    found: Node | None = None
    heavy = False
    node = source.next
    while node is not before and node.op != "output":
        if not depends.isdisjoint(node.all_input_nodes):
            depends.add(node)
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and memory.isdisjoint(storages(node)):
                is_heavy = bool(flops_of(node, [value]))
                if is_heavy or not heavy:
                    found, heavy = node, is_heavy
        node = node.next
    return found


def mark(groups: list[Group], moved: set[str]) -> None:
    """Mark the leads of the chosen groups."""
    for group in groups:
        if group.lead.name in moved:
            group.lead.meta[MARK] = True
