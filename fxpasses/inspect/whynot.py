"""Why not: what a pass could have done and did not, with the reason and what leaving it costs."""

from __future__ import annotations

from dataclasses import dataclass, field

from fxpasses.inspect.ledger import unbacked_in
from fxpasses.inspect.model import Graph, Node, Stage, inputs_of
from fxpasses.report import Reason, Refusal


@dataclass
class NearMiss:
    """Refusals that say the same of equal layers. host_reads per run of the graph; bytes of the values concerned."""

    graph: str
    pass_name: str
    target: str
    reason: str
    kind: str
    text: str
    where: str
    code: str = ""
    module: str = ""
    count: int = 0
    host_reads: int = 0
    bytes: int = 0
    subjects: list[str] = field(default_factory=list)


def near_misses(graph: Graph) -> list[NearMiss]:
    """The refusals of every pass on a graph, equal ones together, the most expensive first."""
    found: dict[tuple[str, ...], NearMiss] = {}
    before = graph.captured
    for stage in graph.stages[1:]:
        nodes = _by_name(before)
        counted: set[int] = set()
        for refusal in stage.report.refusals if stage.report else ():
            node = _subject(refusal, nodes)
            target = node.short_target if node is not None else refusal.subject
            key = (stage.name, target, refusal.reason.name, refusal.text, refusal.where)
            miss = found.setdefault(
                key,
                NearMiss(
                    graph.compile_id, stage.name, target, refusal.reason.value, refusal.reason.name.lower(),
                    refusal.text, refusal.where,
                ),
            )  # fmt: skip
            miss.count += 1
            miss.subjects.append(refusal.subject)
            if node is not None:
                miss.code = node.source.code if node.source else ""
                miss.module = node.module
                if refusal.reason.name == Reason.NOT_ALIKE.name:
                    miss.host_reads += len(_queries(node, before) - counted)
                    counted |= _queries(node, before)
                else:
                    miss.host_reads += node.host_read
                    miss.bytes += sum(value.bytes or 0 for value in node.values)
        before = stage if stage.regions is not None else before
    return sorted(found.values(), key=lambda miss: (-miss.host_reads, -miss.bytes))


def _by_name(stage: Stage) -> dict[str, list[Node]]:
    found: dict[str, list[Node]] = {}
    for region in stage.regions or ():
        for node in region.nodes:
            found.setdefault(node.name, []).append(node)
    return found


def _queries(merge: Node, stage: Stage) -> set[int]:
    """The host reads, by identity, that give the rows of a loop over experts their size.

    merge: the node that merges one expert's rows; those of the other experts are made at the same line and module.
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
    """The node that a refusal speaks of: names repeat between bodies; module and source line tell which is meant."""
    candidates = nodes.get(refusal.subject, [])
    candidates = [node for node in candidates if refusal.module in ("", node.module)] or candidates
    return next((node for node in candidates if str(node.source or "") == refusal.where), next(iter(candidates), None))
