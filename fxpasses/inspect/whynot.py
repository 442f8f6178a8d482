"""Near misses: rewrites that passes refused, with the reason and the cost of leaving the code alone."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from fxpasses.inspect.ledger import unbacked_in
from fxpasses.inspect.model import Graph, Node, Stage, bodies_of, inputs_of
from fxpasses.inspect.readable import input_name
from fxpasses.report import Reason, Refusal


@dataclass
class NearMiss:
    """Refusals that identical layers share. host_reads: per run of the graph. bytes: of the values concerned."""

    pass_name: str
    target: str
    reason: str
    text: str
    where: str
    code: str = ""
    module: str = ""
    count: int = 0
    host_reads: int = 0
    bytes: int = 0


def near_misses(graph: Graph) -> list[NearMiss]:
    """The refusals of every pass on a graph, with equal ones together, the most expensive first."""
    found: dict[tuple[str, ...], NearMiss] = {}
    before = graph.captured
    saved = {one.name: one.bytes or 0 for one in graph.partition.saved} if graph.partition is not None else {}
    for stage in graph.stages[1:]:
        nodes = _by_name(before)
        counted: set[int] = set()
        for refusal in stage.report.refusals if stage.report else ():
            node = _subject(refusal, nodes) if not stage.partitioned else None
            target = node.short_target if node is not None else refusal.subject
            text = _readable(refusal.text, nodes, before)
            key = (stage.name, target, refusal.reason.name, text, refusal.where)
            miss = found.setdefault(key, NearMiss(stage.name, target, refusal.reason.value, text, refusal.where))
            miss.count += 1
            if stage.partitioned:
                miss.bytes += saved.get(refusal.subject, 0)
            if node is not None:
                miss.code = node.source.code if node.source else ""
                miss.module = node.module if miss.module in ("", node.module) else _any_layer(node.module)
                if refusal.reason.name == Reason.NOT_ALIKE.name:
                    miss.host_reads += len(_queries(node, before) - counted)
                    counted |= _queries(node, before)
                else:
                    miss.host_reads += node.host_read
                    miss.bytes += sum(value.bytes or 0 for value in node.values)
        before = stage if stage.regions is not None else before
    return sorted(found.values(), key=lambda miss: (-miss.host_reads, -miss.bytes))


def _readable(text: str, nodes: dict[str, list[Node]], stage: Stage) -> str:
    """The text with names of nodes replaced by names of the program: an input's, or the module of a checkpoint.

    Layers lose their number, so that identical layers are reported once.
    """

    def describe(match: re.Match[str]) -> str:
        node = next(iter(nodes.get(match[1], [])), None)
        if node is not None and node.op == "placeholder":
            return f"`{input_name(node)}`"
        if node is None or not bodies_of(node):
            return match[0]
        module = _any_layer(_module_of_body(stage, bodies_of(node)[0]))
        place = f" of `{module}`" if module else f" at {node.source}" if node.source else ""
        return f"what the checkpoint{place} returns"

    return re.sub(r"`(\w+)`", describe, text)


def _module_of_body(stage: Stage, path: str) -> str:
    """The innermost module that contains all of a body."""
    nodes = (node for region in stage.regions or () if region.path == path for node in region.nodes)
    levels = zip(*(node.module.split(".") for node in nodes if node.module), strict=False)
    return ".".join(level[0] for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels))


def _any_layer(module: str) -> str:
    return re.sub(r"\b\d+\b", "*", module)


def _by_name(stage: Stage) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for region in stage.regions or ():
        for node in region.nodes:
            found.setdefault(node.name, []).append(node)
    return found


def _queries(merge: Node, stage: Stage) -> set[int]:
    """The host reads, by identity, that determine how many rows the experts of a loop have.

    merge: the node that merges one expert's rows; the other experts' nodes have the same line and module.
    """
    for region in stage.regions or ():
        if not any(node is merge for node in region.nodes):
            continue
        alike = [
            n for n in region.nodes if (n.target, n.module, n.source) == (merge.target, merge.module, merge.source)
        ]
        taken = {name for node in alike for name in inputs_of(node)}
        values = [value for node in region.nodes if node.name in taken for value in node.values]
        symbols = {symbol for value in values for size in value.shape for symbol in unbacked_in(size)}
        return {id(node) for node in region.nodes if node.host_read and symbols & set(node.binds)}
    return set()


def _subject(refusal: Refusal, nodes: dict[str, list[Node]]) -> Node | None:
    """The subject of a refusal. Bodies repeat names; module and source line determine which node is meant."""
    candidates = nodes.get(refusal.subject, [])
    candidates = [node for node in candidates if refusal.module in ("", node.module)] or candidates
    return next((node for node in candidates if str(node.source or "") == refusal.where), next(iter(candidates), None))
