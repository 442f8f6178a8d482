"""The verdict on a run, in a line: what is not computed, read, kept or compiled any more, or why nothing changed.

what changed: 32 host reads → 2; 516 MiB of logits never stand in full; 12 layers compiled as 1
what changed: nothing: 4 × it is small (hoist_metadata)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fxpasses.base.units import many, size
from fxpasses.inspect.model import Run
from fxpasses.report import Report


def said(run: Run) -> list[str]:
    """What comes first of a run with graphs: the verdict, and which part of attention and of the rows was computed."""
    reports = [report for graph in run.graphs if graph.outcome != "retraced" for report in graph.reports]
    return [text for text in (verdict(reports), run.attention_text, run.rows_text) if text] if run.graphs else []


def verdict(reports: Iterable[Report]) -> str:
    """The line. reports: those of all graphs of a run, each for one step."""
    reports = list(reports)
    found: Counter[tuple[str, str]] = Counter()
    for report in reports:
        if report.changed:
            found.update({(report.pass_name, name): number for name, number in report.figures.items()})
    names = {report.pass_name for report in reports if report.changed}
    parts = list(_parts(found, names))
    return f"what changed: {'; '.join(parts) if parts else _nothing(reports)}"


def _parts(found: Counter[tuple[str, str]], changed: set[str]) -> Iterator[str]:
    if "live_rows" in changed:
        yield "only rows that can reach the loss are computed"
    if attentions := found["sparsify_attention", "attentions"]:
        yield f"{many(attentions, 'attention')} by the batch's plan"
    before, after = (
        found["hoist_metadata", name] + found["coalesce_reads", name]
        for name in ("host_reads_before", "host_reads_after")
    )
    if before > after:
        yield f"{many(before, 'host read')} → {after}"
    before, after = (found["hoist_metadata", name] for name in ("tensors_built_before", "tensors_built_after"))
    if before:
        yield f"{many(before, 'tensor')} of the batch → {after}, once per batch"
    if loops := found["group_experts", "loops_grouped"]:
        yield f"{many(loops, 'loop')} over experts → one product by groups each"
    if adapters := found["factor_adapters", "adapters"]:
        yield f"{many(adapters, 'adapter')} of experts applied to rows"
    if "chunk_loss" in changed:
        logits = found["chunk_loss", "logits_bytes"]
        yield f"{size(logits)} of logits never stand in full" if logits else "logits never stand in full"
    if lazy := found["lazy_outputs", "lazy_outputs"]:
        yield f"{many(lazy, 'output')} computed only when read"
    if layers := found["fold_layers", "layers"]:
        yield f"{many(layers, 'layer')} compiled as {found['fold_layers', 'kinds']}"
    if moved := found["offload_activations", "bytes_moved"]:
        yield f"{size(moved)} of activations wait off the device"
    if topk := found["split_topk", "topk"]:
        yield f"{topk} top-k in two stages"


def _nothing(reports: list[Report]) -> str:
    refused = Counter(
        f"{refusal.reason.value} ({report.pass_name})" for report in reports for refusal in report.refusals
    )
    if not refused:
        return "nothing: no pass found what it could leave out"
    ((reason, count),) = refused.most_common(1)
    return f"nothing: {count} × {reason}"
