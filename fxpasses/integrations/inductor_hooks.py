"""`inductor_options`: passes for programs that have to keep `backend="inductor"`, by Inductor's own hooks.

    torch.compile(model, backend="inductor", options=fxpasses.inductor_options())

A stack that calls the compiler itself (vLLM's, torchtitan's) leaves room only for Inductor's hooks. They get a graph
and return one: nothing runs once per batch, nothing intercepts the trace, and nothing is compiled separately. If a pass
needs one of these, the table of passes (`registry.py`) says why the hooks cannot run it.

Checked on torch 2.11, 2.13 and 2.15: `pre_grad_custom_pass`, which gets the graph that Dynamo captured after the graphs
of its bodies, and `custom_partitioner_fn`; both have a `uuid` for PyTorch's caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule

from fxpasses import inspect, registry
from fxpasses.compiler.partitioner import Partitioner
from fxpasses.graph.provenance import input_sources
from fxpasses.options import PREFIX, Options
from fxpasses.passes.pipeline import Pass, run_passes
from fxpasses.version import code_digest

_REFUSED = {entry.name: entry.not_in_inductor for entry in registry.PASSES if entry.not_in_inductor}
_WITHOUT_EFFECT = {
    "memory": "it plans layers that are compiled once",
    "memory.checkpoints": "it plans layers that are compiled once",
    **{option: entry.not_in_inductor for entry in registry.PASSES if entry.not_in_inductor for option in entry.options},
    "capture": "no hook sees Dynamo's trace; set torch._dynamo.config.capture_scalar_outputs and "
    "capture_dynamic_output_shape_ops yourself",
    "lowering": "the lowering is Inductor's",
    "mode": "pass the options of torch._inductor.list_mode_options(mode) along",
}


def inductor_options(options: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options for `torch.compile(model, backend="inductor", options=...)`: the passes that Inductor's hooks can run.

    These are `group_experts` and `coalesce_reads`, and on request `factor_adapters`, `split_topk` and
    `offload_activations`.

    options: `fastpack.passes`, `fastpack.experts`, `fastpack.topk`, `fastpack.verify`, `fastpack.strict` and
    `fastpack.offload` with its own options; other keys are Inductor's, and are passed on unchanged. Defaults of the
    process or the environment are not read. The passes see only what Dynamo captures: loops over experts need its
    capture flags. Raises `ValueError`, with the reason, for passes and options that the hooks have no place for, and if
    an option already takes a hook.
    """
    given = dict(options or {})
    for name, reason in _WITHOUT_EFFECT.items():
        if PREFIX + name in given:
            raise ValueError(f"{PREFIX}{name} has no effect under Inductor's hooks: {reason}")
    for name in given.get(PREFIX + "passes", ()):
        if name in _REFUSED:
            raise ValueError(f'{PREFIX}passes holds {name!r}, which needs backend="fastpack": {_REFUSED[name]}')
    settings = Options.parse(given)
    found: dict[str, Any] = dict(settings.inductor)
    passes = [entry for entry in registry.selected(settings.passes) if not entry.not_in_inductor]
    if passes:
        _take(found, "pre_grad_custom_pass", PassesOnCapturedGraph(passes, replace(settings, inductor={})))
    if settings.offloads:
        functorch: Any = torch._functorch.config
        if functorch.donated_buffer:
            raise ValueError(
                f"{PREFIX}offload needs torch._functorch.config.donated_buffer = False, which no option of Inductor "
                "sets: backward would overwrite saved tensors, which here are handles; set it before compiling"
            )
        _take(found, "custom_partitioner_fn", Partitioner(settings.offload, settings.strict))
    return found


def _take(found: dict[str, Any], hook: str, own: Any) -> None:
    if found.get(hook) is not None:
        raise ValueError(f"{hook} is given, and fxpasses needs it; call inductor_options()[{hook!r}] from your own")
    found[hook] = own


class PassesOnCapturedGraph(CustomGraphPass):
    """Runs passes on the graph that Dynamo captured, with its bodies, in place; a pass that fails is dropped."""

    def __init__(self, passes: Sequence[registry.Entry], settings: Options) -> None:
        self.passes, self.settings = tuple(passes), settings

    def __call__(self, graph: Graph) -> None:
        gm = graph.owning_module
        if gm is None or not any(input_sources(gm)):
            return  # a checkpoint's body, which Inductor passes separately: it is rewritten with the graph around it
        examples = [node.meta.get("example_value") for node in graph.find_nodes(op="placeholder")]
        observer = inspect.observe(gm, examples, self.settings)
        passes: list[Pass] = [entry.load()() for entry in self.passes]
        result = run_passes(passes, gm, examples, self.settings, observer.after_pass)
        if result.gm is not gm:
            _put(result.gm, gm)
        observer.finish("rewritten" if result.gm is not gm else "captured")

    def uuid(self) -> str:
        """A key of the package, the passes and the options: PyTorch's caches keep the graphs that these made."""
        names = [entry.name for entry in self.passes]
        options = json.dumps([names, self.settings.experts, self.settings.topk], default=str)
        return f"fxpasses:{code_digest()}:{options}"


def _put(rewritten: GraphModule, gm: GraphModule) -> None:
    """Give `gm`, the object with which Inductor goes on, the graph and the bodies of `rewritten`."""
    for node in rewritten.graph.find_nodes(op="get_attr"):
        name = str(node.target)
        if "." not in name:
            setattr(gm, name, getattr(rewritten, name))
    gm.graph = rewritten.graph
