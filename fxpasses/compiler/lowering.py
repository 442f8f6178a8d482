"""Compiles the rewritten graph: with Inductor, with AOTAutograd alone, or not at all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler.config
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule

from fxpasses.base.containment import contained
from fxpasses.collectives.as_written import uncompiled
from fxpasses.compiler import masked_writes
from fxpasses.compiler.kernel_files import sharing_files
from fxpasses.compiler.lowering_backward import Containment, containing_backward
from fxpasses.compiler.lowering_by_operator import backward_by_operator, forward_by_operator
from fxpasses.compiler.mesh_keys import without_hashes
from fxpasses.compiler.overwritten_inputs import SavingPartitioner, writes_in_place
from fxpasses.compiler.saved_order import may_save_objects
from fxpasses.compiler.vector_tests import testing_one
from fxpasses.experts.runtime import grouped_decompositions
from fxpasses.fold.outlining import WHOLE, Place
from fxpasses.graph.bodies import has_nested_regions
from fxpasses.graph.collectives import check_waits, communicates, spans_ranks
from fxpasses.graph.regions import Region
from fxpasses.memory.step import Step
from fxpasses.options import Options
from fxpasses.report import OnReport, Report, in_each
from fxpasses.version import code_digest

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    from fxpasses.compiler.memory_partitioner import MemoryPartitioner
    from fxpasses.compiler.partitioner import Partitioner

Compiled = Callable[..., Any]


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    salt: str,
    on_report: OnReport = lambda report: None,
    place: Place = WHOLE,
    step: Step | None = None,
) -> Compiled:
    """Compile `gm`.

    salt: distinguishes, in caches, programs with the same graph whose inputs have different known properties.
    on_report: called with the reports of passes on the partitioned graphs, after compilation. place: that of `gm` in
    its step. step: if it has to fit into a number of bytes.
    """
    if options.lowering == "eager":
        return uncompiled(gm)
    hits = _cache_hits()
    with (
        containing_backward(options.strict) as containment,
        _partitioners(gm, example_inputs, options, place, step) as (partition, partitioner, memory),
    ):
        if options.lowering == "aot_eager":
            compiled = _aot_eager(gm, example_inputs, partition)
        else:
            if memory is not None:
                containment.on_code = memory.note_code
            with contextlib.nullcontext() if step is None else _planned_anew():
                compiled = inductor(gm, example_inputs, options, salt, partition, containment)
            if memory is not None:
                with contained("planning with what compiled code allocates", strict=options.strict):
                    memory.take_code_into_account()
    for report in memory.reports if memory is not None else ():
        on_report(report)
    if partitioner is not None and partitioner.options is not None:
        for report in partitioner.reports:
            on_report(in_each(report, place.calls) if place.calls > 1 else report)
        if not partitioner.called:
            on_report(Report(partitioner.name, summary=_FROM_CACHE if _cache_hits() > hits else _FOR_INFERENCE))
    return _as_in_eager_mode(gm, compiled) if spans_ranks() else compiled


_FROM_CACHE = (
    "its graphs come from PyTorch's cache, as this pass left them when they were compiled for these options: the "
    "process that compiled them has the report, and fxpasses.offload_stats() counts the tensors that move"
)
_FOR_INFERENCE = "nothing is saved for backward: the graph was compiled for inference"


def _cache_hits() -> int:
    """The number of graphs that AOTAutograd found in its cache. Private name, checked on torch 2.11 and 2.13."""
    return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


@contextlib.contextmanager
def _partitioners(
    gm: GraphModule, examples: Sequence[Any], options: Options, place: Place, step: Step | None
) -> Iterator[tuple[CustomPartitionerFn | None, Partitioner | None, MemoryPartitioner | None]]:
    """The partitioner of the joint graph (None: PyTorch's own), the one that offloads and the one that plans, if any.

    Partitioners nest: the one that orders and offloads, the one that keeps collectives, the user's, the one that plans,
    or PyTorch's.
    """
    inner = _users_partitioner(options)
    memory = None
    if step is not None and inner is None and not has_nested_regions(gm):
        from fxpasses.compiler.memory_partitioner import MemoryPartitioner
        from fxpasses.offload.inputs import activations

        inner = memory = MemoryPartitioner(options, step, place, activations(examples))
    if writes_in_place(gm):
        inner = SavingPartitioner(inner)
    if spans_ranks():
        inner = _keeping_collectives(gm, inner)
    offloads = options.offloads
    if not offloads and not may_save_objects(gm):
        yield inner, None, memory
        return
    from fxpasses.compiler.partitioner import Partitioner
    from fxpasses.offload.inputs import activations

    functorch: Any = torch._functorch.config
    # Backward may overwrite a donated buffer, which is a saved tensor. It must not overwrite handles, which map files;
    # and with donated buffers, backward cannot run twice.
    with functorch.patch(donated_buffer=False) if offloads else contextlib.nullcontext():
        moved = options.offload if offloads else None
        fused = options.lowering == "inductor"
        outer = Partitioner(moved, options.strict, activations(examples), inner, place, memory, fused)
        yield outer, outer, memory


def _planned_anew() -> contextlib.AbstractContextManager[None]:
    """Without AOTAutograd's cache, which keeps partitions: what fits depends on the process's memory. Backward is
    compiled at once: its code tells what it allocates."""
    functorch: Any = torch._functorch.config
    patched: contextlib.AbstractContextManager[None] = functorch.patch(
        enable_autograd_cache=False, force_non_lazy_backward_lowering=True
    )
    return patched


def _users_partitioner(options: Options) -> CustomPartitionerFn | None:
    if options.lowering != "inductor":
        return None
    inductor: Any = torch._inductor.config
    return options.inductor.get("custom_partitioner_fn", inductor.custom_partitioner_fn)


def _as_in_eager_mode(gm: GraphModule, compiled: Compiled) -> Compiled:
    """`compiled`, or `gm` itself if `compiled` would issue other collectives than eager mode."""
    from fxpasses.collectives.in_checkpoints import with_checkpoints_around
    from fxpasses.collectives.requested_gradients import with_requested_gradients

    run = with_checkpoints_around(gm, with_requested_gradients(gm, compiled))
    if run is compiled:
        return compiled

    def run_piece(*inputs: Any) -> Any:
        # DDPOptimizer has AOTAutograd return fake results for one call. That has to be the call on fake tensors: if
        # something else ran it, the next call, on a batch, would get the fake results.
        is_fake = any(isinstance(value, FakeTensor) for value in inputs)
        return compiled(*inputs) if is_fake else run(*inputs)

    return run_piece


def _keeping_collectives(gm: GraphModule, inner: CustomPartitionerFn | None) -> CustomPartitionerFn:
    from fxpasses.collectives.eager_sequences import eager_sequences
    from fxpasses.collectives.partitioner import CollectivePartitioner

    check_waits(gm)
    return CollectivePartitioner(eager_sequences(gm) if Region(gm).bodies and communicates(gm) else None, inner)


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], partitioner: CustomPartitionerFn | None) -> Compiled:
    """The backend "aot_eager", with our partitioner."""
    from functorch.compile import min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    backend: Any = aot_autograd(
        fw_compiler=forward_by_operator,
        bw_compiler=backward_by_operator,
        partition_fn=partitioner or min_cut_rematerialization_partition,
        keep_inference_input_mutations=True,
    )
    return backend(gm, list(example_inputs))


def inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    salt: str,
    partitioner: CustomPartitionerFn | None = None,
    containment: Containment | None = None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Compiled:
    """Compile with Inductor under the user's options and `fixed`, which takes precedence.

    containment: compiles each graph of AOTAutograd, instead of Inductor's own `compile_fx_inner`.
    """
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = dict(list_mode_options(options.mode)) if options.mode else {}
    patches |= {**options.inductor, **fixed}
    if partitioner is not None:
        patches["custom_partitioner_fn"] = partitioner
    config: Any = torch.compiler.config
    # PyTorch's cache keys do not cover this package's code: its operators' gradients, and the printing of its numbers.
    tag = ":".join([config.cache_key_tag, "fxpasses", code_digest(), salt])
    compile_graph: Any = compile_fx
    arguments = _decompositions(gm, patches)
    if containment is not None:
        containment.tag = tag
        arguments["inner_compile"] = containment.compile_inner
    functorch: Any = torch._functorch.config
    # A bundle takes nothing but Inductor's own code; backward may be something else (`lowering_backward`).
    bundles = functorch.patch(bundled_autograd_cache=False)
    with config.patch(cache_key_tag=tag), bundles, sharing_files(options.strict), testing_one(), without_hashes():
        return compile_graph(gm, list(example_inputs), config_patches=patches or None, **arguments)


def _decompositions(gm: GraphModule, patches: Mapping[str, Any]) -> dict[str, Any]:
    """The argument that gives Inductor its own decompositions under these options and ours; empty if we add none."""
    own = {**grouped_decompositions.decompositions(gm), **masked_writes.decompositions(gm)}
    if not own:
        return {}
    from torch._inductor.decomposition import select_decomp_table

    inductor: Any = torch._inductor.config
    with inductor.patch(dict(patches)):
        return {"decompositions": _Decompositions({**select_decomp_table(), **own}, own)}


class _Decompositions(dict[Any, Any]):
    """Inductor's decompositions and `own`. Inductor pickles the table for a cache's key, and its operators cannot be:
    what tells it from others is our own part."""

    def __init__(self, table: Mapping[Any, Any], own: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__(table)
        self._own = sorted(f"{operator}: {function.__qualname__}" for operator, function in own.items())

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (f"Inductor's, and {self._own}",)
