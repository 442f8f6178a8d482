"""Adds graphs and reports to PyTorch's structured trace: `TORCH_TRACE=folder`, which `tlparse` reads.

Private name, checked on torch 2.13: `torch._logging.trace_structured`, whose event "artifact" tlparse shows as a file
of its compilation.
"""

from __future__ import annotations

from typing import Any

import torch

from fxpasses.inspect.codec import dumps, to_json
from fxpasses.inspect.model import Graph


def emit(graph: Graph) -> None:
    """Add artefacts for one compilation: the record as JSON, each stage's graph, and the report as text."""
    from fxpasses.inspect.readable import readable
    from fxpasses.inspect.text import Style, graph_report

    _artifact("fxpasses_record", "json", dumps(to_json(graph)))
    for position, stage in enumerate(graph.stages):
        if stage.regions is not None:
            _artifact(f"fxpasses_{position}_{stage.name}", "string", readable(stage))
    _artifact("fxpasses_report", "string", graph_report(graph, Style(color=False, width=120)))


def _artifact(name: str, encoding: str, payload: str) -> None:
    metadata: dict[str, Any] = {"name": name, "encoding": encoding}
    torch._logging.trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: payload)
