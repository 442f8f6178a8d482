"""Case 6c: what compiling a decoder of many equal layers costs, and what its steps cost afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.case import Case, Parameters, Program, scale
from bench.cases.compilers import (
    EAGER,
    OURS,
    STOCK,
    STOCK_FLAGS,
    Compiler,
    contender,
    eager,
    inductor,
    inductor_with_flags,
    ours,
)
from bench.first_call import CXX, DYNAMO, PHASES

NESTED, BY_LAYER, UNFOLDED = "Inductor, nested region", "Inductor by layer", "fastpack, fold off"
DENSE = "–"  # a model without experts
MIB = 1 / 2**20


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    """The first call is measured by itself, in CPU seconds; only then a model in eager mode checks its gradients."""
    from bench.cases.decoders import new_decoder, packed_batches
    from bench.cases.training import fresh, training_program
    from bench.first_call import first_call

    more = {} if parameters["experts"] == DENSE else {"experts_implementation": parameters["experts"]}

    def new_model() -> Any:
        return new_decoder(parameters, device, "sdpa", **more)

    model = new_model()
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=False)
    costs: dict[str, float] = {}

    def loss_of(batch: Mapping[str, Any]) -> Any:
        return compiled(**batch).loss

    def values() -> Mapping[str, float]:
        call = lambda: loss_of(fresh(batches[0])).backward()  # noqa: E731
        if compiler is eager:
            call()
        else:
            costs.update(first_call(call))
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        reference = new_model()
        reference.load_state_dict(model.state_dict())
        reference(**fresh(batches[0])).loss.backward()
        expected = [parameter.grad for parameter in reference.parameters()]
        return {**program.values(), "1 + error of gradients": 1 + error(gradients, expected)}

    program = training_program(model, loss_of, batches)
    return Program(program.step, values, batches=program.batches, compiling=lambda: costs)


def error(actual: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest relative difference of a parameter's gradient; infinite where one has none and the other has."""
    worst = 0.0
    for got, wanted in zip(actual, expected, strict=True):
        if got is None and wanted is None:
            continue
        if got is None or wanted is None:
            return float("inf")
        worst = max(worst, float((got - wanted).norm() / wanted.norm().clamp_min(1e-12)))
    return worst


def nested(model: Any) -> Any:
    """The decoder layer's `forward` marked as a region that is compiled once."""
    import torch

    kind = type(model.model.layers[0])
    kind.forward = torch.compiler.nested_compile_region(kind.forward)
    return torch.compile(model)


def by_layer(model: Any) -> Any:
    """Each layer compiled by itself, as one does by hand; what is around them is left to eager mode."""
    from torch import nn

    for part in list(model.modules()):
        if isinstance(part, nn.ModuleList):
            for layer in part:
                layer.compile()
    return model


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    rest = {"tokens": 512, **scale("cpu")}  # compiling takes as long at any width
    dense = {"experts": DENSE, **rest}
    if quick:
        return [{"model": "llama", "checkpointed": False, "layers": 4, **dense}]
    dense_ones = [("llama", False, n) for n in (4, 28, 40)] + [("llama", True, 28), ("qwen3", False, 28)]
    found = [{"model": model, "checkpointed": how, "layers": n, **dense} for model, how, n in dense_ones]
    # A step of layers as wide as real ones, of which folding needs four.
    found += [{"model": "llama", "checkpointed": False, "layers": 4, **dense, "width": "full", "tokens": 256}]
    return found + [
        {"model": "qwen3_moe", "checkpointed": False, "layers": 4, "experts": experts, **rest}
        for experts in ("eager", "grouped_mm")
    ]


def same_as_without_flags(parameters: Parameters, device: str) -> str:
    return "the same graph as without flags" if parameters["experts"] != "eager" else ""


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """CPU seconds of a first call by phase, and in a second process with the caches of the first."""
    rows = []
    for entry in entries:
        cold, warm = entry.get("compiling_cold"), entry.get("compiling_warm")
        if entry["outcome"] != "measured" or not cold:
            continue
        parameters = entry["parameters"]
        kind = [parameters["model"], "checkpointed" * parameters["checkpointed"], parameters["experts"].strip(DENSE)]
        phases = {phase: cold[f"{phase}_s"] for phase in PHASES}
        rows.append(
            {
                "model": ", ".join(filter(None, kind)),
                "layers": parameters["layers"],
                "contender": entry["contender"],
                "CPU s": cold["cpu_s"],
                **phases,
                f"after {DYNAMO}": cold["cpu_s"] - phases[DYNAMO],
                f"without {CXX}": cold["cpu_s"] - phases[CXX],
                "elapsed s": cold["wall_s"],
                "CPU s, filled caches": warm["cpu_s"] if warm else None,
                "peak MiB": cold["peak_bytes"] * MIB,
                "of them before": cold["rest_bytes"] * MIB,
            }
        )
    return rows


CASE = Case(
    name="compile_time",
    title="Compile time: decoders of 4 to 40 equal layers",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor),
        contender(STOCK_FLAGS, build, inductor_with_flags, unavailable=same_as_without_flags),
        contender(NESTED, build, nested),
        contender(BY_LAYER, build, by_layer),
        ours(UNFOLDED, build, fold="off"),
        ours(OURS, build, fold="auto"),
    ],
    baseline=EAGER,
    shows=("time", "step_bytes", "allocated_bytes", "page_faults", "graphs"),
    x="layers",
    expected=(
        "A compiler that takes a model as one graph compiles each layer again: time and memory grow with the layers. "
        "If a layer that stands L times is compiled once, only Dynamo's trace, the passes, and the search for equal "
        "layers grow. Steps then have a call from Python for each layer, forward and backward, and nothing is fused "
        "across the border of a layer."
    ),
    arithmetic=arithmetic,
    cpu_time=True,
    notes=(
        "Seconds of the first call, forward and backward, are CPU seconds of the process and of all that it starts; "
        "the phases add up to them. The C++ compiler is all that runs in other processes; with empty caches, some 6 s "
        "of it are Inductor's tests of the processor's vector instructions, for any program. `first step` is what "
        "remains: running the code. Memory is the resident set of the process, without the C++ compiler's. Filled "
        "caches are those of the first process, in a second one; where there is no figure, there was no second one. "
        "After its first call every contender's gradients are compared with eager mode, parameter by parameter. "
        "`Inductor, nested region` marks the decoder layer with `torch.compiler.nested_compile_region`; `Inductor by "
        "layer` calls `layer.compile()`, so embedding, mask, head and loss are not compiled. The experts of the "
        "mixture are transformers' `eager` loop or its `grouped_mm`."
    ),
)
