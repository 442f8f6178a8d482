"""Case 13: a training step of each workload of MLPerf Training v1.1, small."""

from __future__ import annotations

from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import EAGER, Compiler, usual
from bench.cases.mlperf_models import WORKLOADS, missing


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    from bench.cases.mlperf_models import loss_of, workload
    from bench.cases.training import training_program

    model, batches = workload(parameters["workload"], device)
    compiled = compiler(model)
    return training_program(model, lambda batch: loss_of(compiled(**batch)), batches)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    names = ("DLRM", "RNN-T") if quick else tuple(WORKLOADS)
    return [{"workload": name} for name in names if not missing(name)]


CASE = Case(
    name="mlperf",
    title="Workloads of MLPerf Training v1.1, small",
    groups=groups,
    contenders=usual(build),
    baseline=EAGER,
    expected=(
        "These models were not prepared for this package. Where a step asks its batch (lengths of utterances, objects "
        "of an image) the question leaves the graph and no break is left; where it asks nothing, the code is what "
        "Inductor makes of it, and the passes cost time to compile alone."
    ),
    notes=(
        "The models have the parts of the references and a small part of their width: steps take milliseconds, of "
        "which calls from Python are a large part. MaskFormer matches queries with objects on the host, by scipy: its "
        "loss is eager in all contenders, and without scipy it is left out. RT-DETR has a loss of its own, which "
        "matches them on the device. What an SSD step computes from the objects of each image is in the graph of ours, "
        "and eager under stock PyTorch: compiling it makes the first call longer."
    ),
    cpu_time=True,
)
