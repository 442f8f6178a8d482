"""What compiles the rewritten graph: Inductor, AOTAutograd alone, or nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.compiler.config
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx import GraphModule

from fxpasses import __version__
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.symbols import constant, is_symbolic
from fxpasses.options import Options
from fxpasses.prologue_program import Program
from fxpasses.report import Report

if TYPE_CHECKING:
    from fxpasses.partitioner import Partitioner

Compiled = Callable[..., Any]


def lower(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    salt: str,
    told: Callable[[Report], None] = lambda report: None,
) -> Compiled:
    """Compile `gm`. `salt` tells programs apart that have the same graph but differ in what is known of its inputs.

    `told` gets the reports of passes that work on the partitioned graphs, once all is compiled.
    """
    if options.lowering == "eager":
        return gm
    with _partitioner(options) as partitioner:
        if options.lowering == "aot_eager":
            compiled = _aot_eager(gm, example_inputs, partitioner)
        else:
            compiled = _inductor(gm, example_inputs, options, salt, partitioner)
    if partitioner is not None:
        for report in partitioner.reports:
            told(report)
        if not partitioner.asked:
            told(
                Report(partitioner.name, summary="nothing was partitioned: compiled for inference, or found in a cache")
            )
    return compiled


# Results of a prologue are kept for the batch: not in memory that the next replay of a CUDA graph writes over. And the
# main graph is compiled for the strides that the operators give them.
_FOR_PROLOGUES = {"triton.cudagraphs": False, "freezing": False, "keep_output_stride": True}


def lower_prologue(program: Program, options: Options) -> Compiled | None:
    """Compile a prologue's device graph, to be called without gradients; None where it is to run as it is.

    It is compiled with the main graph and not when it first runs, so its integers are unbacked symbols: nothing is
    assumed of a batch, and no batch compiles it again.
    """
    if program.device is None or not program.worth_compiling or options.lowering != "inductor":
        return None
    gm = copy_graph_module(program.device)
    masks = _return_bytes(gm)
    examples = [_example(node.meta["example_value"]) for node in gm.graph.find_nodes(op="placeholder")]
    context: Any = TracingContext(detect_fake_mode(examples))
    with tracing(context), torch.inference_mode(False), torch.no_grad():
        compiled = _inductor(gm, examples, options, program.key(), None, _FOR_PROLOGUES)

    def call(*inputs: Any) -> tuple[Any, ...]:
        outputs = compiled(*inputs)
        return tuple(value.view(torch.bool) if i in masks else value for i, value in enumerate(outputs))

    return call


def _return_bytes(gm: GraphModule) -> set[int]:
    """Have the graph return bytes of 0 and 1 for its masks on the CPU; the positions of these.

    Inductor's C++ writes vectors of bools element by element, which took half the time of making a mask (torch 2.13).
    """
    output = gm.graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    masks = set()
    for position, node in enumerate(results):
        fake = node.meta["example_value"]
        if isinstance(fake, torch.Tensor) and fake.dtype is torch.bool and fake.device.type == "cpu":
            with gm.graph.inserting_before(output):
                results[position] = gm.graph.call_method("to", (node, torch.uint8))
            masks.add(position)
    output.args = (tuple(results),)
    gm.recompile()
    return masks


def _example(fake: Any) -> Any:
    number = constant(fake) if is_symbolic(fake) else None
    return fake if number is None else number


@contextlib.contextmanager
def _partitioner(options: Options) -> Iterator[Partitioner | None]:
    """What partitions the joint graph, where that is not left to PyTorch."""
    if options.offload.tier == "off" or "offload_activations" not in options.passes:
        yield None
        return
    from fxpasses.partitioner import Partitioner

    functorch: Any = torch._functorch.config
    # A donated buffer is a saved tensor that backward may write over. Handles must not be: they are mapped files. And
    # with donated buffers no backward can be run twice.
    with functorch.patch(donated_buffer=False):
        inductor: Any = torch._inductor.config
        inner = options.inductor.get("custom_partitioner_fn", inductor.custom_partitioner_fn)
        yield Partitioner(options.offload, options.strict, inner if options.lowering == "inductor" else None)


def _aot_eager(gm: GraphModule, example_inputs: Sequence[Any], partitioner: Partitioner | None) -> Compiled:
    if partitioner is None:
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(example_inputs))
    from torch._dynamo.backends.common import aot_autograd
    from torch._dynamo.backends.debugging import boxed_nop

    # The backend "aot_eager", which takes no partitioner of ours.
    backend: Any = aot_autograd(
        fw_compiler=boxed_nop, bw_compiler=boxed_nop, partition_fn=partitioner, keep_inference_input_mutations=True
    )
    return backend(gm, list(example_inputs))


def _inductor(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    salt: str,
    partitioner: Partitioner | None,
    fixed: Mapping[str, Any] = MappingProxyType({}),
) -> Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = dict(list_mode_options(options.mode)) if options.mode else {}
    patches |= {**options.inductor, **fixed}
    if partitioner is not None:
        patches["custom_partitioner_fn"] = partitioner
    config: Any = torch.compiler.config
    # PyTorch's caches do not look into our operators, whose gradients may change with the version.
    tag = ":".join([config.cache_key_tag, "fxpasses", __version__, salt])
    compile_graph: Any = compile_fx
    with config.patch(cache_key_tag=tag):
        return compile_graph(gm, list(example_inputs), config_patches=patches or None)
