"""Case 6a: the time of the passes as graphs grow."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.case import Case, Contender, Parameters, Program

COPY = "copying the graph"


def build(parameters: Parameters, device: str, passes: Sequence[str] = ()) -> Program:
    """The step is the pipeline with these passes: a copy of the graph for each, the pass, and the checks after it."""
    from fxpasses.graph.copying import copy_graph_module
    from fxpasses.options import Options
    from fxpasses.passes.pipeline import run_passes
    from fxpasses.registry import selected

    gm, examples = (decoder_graph if parameters["graph"] == "decoder" else expert_graph)(parameters["size"])

    def step() -> Any:
        if not passes:
            return copy_graph_module(gm)
        return run_passes([entry.load()() for entry in selected(passes)], gm, examples, Options(strict=True))

    def figures() -> Mapping[str, float]:
        result = step()
        found = {"nodes_before": nodes_in(gm), "nodes_after": nodes_in(result.gm if passes else result)}
        for report in result.reports if passes else ():
            found |= {key: value for key, value in report.figures.items() if key.startswith("host_reads")}
        return found

    return Program(step, values=dict, figures=figures)


def nodes_in(gm: Any) -> int:
    from torch.fx import GraphModule

    return sum(len(module.graph.nodes) for module in gm.modules() if isinstance(module, GraphModule))


def decoder_graph(nodes: int) -> tuple[Any, list[Any]]:
    from bench.cases.traced_decoder import decoder

    return decoder(nodes)


def expert_graph(experts: int) -> tuple[Any, list[Any]]:
    """The graph that Dynamo captures of a block whose loop has that many experts."""
    import torch

    from bench.cases.expert_block import new_block
    from fxpasses.graph.copying import copy_graph_module

    captured: list[tuple[Any, list[Any]]] = []

    def keep(gm: Any, examples: list[Any]) -> Any:
        captured.append((copy_graph_module(gm), list(examples)))
        return gm.forward

    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    block = new_block("where", {"experts": experts, "hidden": 32, "width": 32, "top": 2})
    torch.compile(block, backend=keep, fullgraph=True)(torch.randn(64, 32))
    return captured[0]


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    nodes, experts = ((1_000,), (8,)) if quick else ((1_000, 5_000, 10_000, 50_000), (8, 32, 128))
    decoders = [{"graph": "decoder", "size": size} for size in nodes]
    return decoders + [{"graph": "experts", "size": size} for size in experts]


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Time per node, which is constant for a linear pass."""
    return [
        {
            "graph": entry["parameters"]["graph"],
            "passes": entry["contender"],
            "nodes": entry["figures"]["nodes_before"],
            "nodes after": entry["figures"]["nodes_after"],
            "s": entry["median_s"],
            "µs per node": 1e6 * entry["median_s"] / entry["figures"]["nodes_before"],
            "host reads": entry["figures"].get("host_reads_before"),
            "after": entry["figures"].get("host_reads_after"),
        }
        for entry in entries
        if entry["outcome"] == "measured"
    ]


def contender(name: str, *passes: str) -> Contender:
    return Contender(name, functools.partial(build, passes=passes), compiles=False)


CASE = Case(
    name="pass_time",
    title="Cost of fxpasses: time of the passes as graphs grow",
    groups=groups,
    contenders=[
        contender(COPY),
        contender("hoist_metadata", "hoist_metadata"),
        contender("group_experts", "group_experts"),
        contender("both passes", "group_experts", "hoist_metadata"),
    ],
    baseline=COPY,
    shows=("time",),
    x="size",
    expected=(
        "The analyses walk the graph once and number its values, so the time per node should not grow. `size` is the "
        "requested number of nodes, or the number of experts of a loop that Dynamo captured."
    ),
    arithmetic=arithmetic,
)
