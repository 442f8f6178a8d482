"""Private modules of PyTorch are named where these lists say: Dynamo in `dynamo/` and features' `capture/`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fxpasses

ROOT = Path(fxpasses.__file__).parent
# By private module of torch: the files that may name it, besides those that trace programs.
MAY_NAME = {
    "_dynamo": {
        "collectives/ddp_buckets.py", "compiler/lowering.py", "compiler/lowering_backward.py",
        "compiler/lowering_by_operator.py", "inspect/cli/doctor.py", "inspect/dynamo_history.py",
        "inspect/minimise.py", "integrations/inductor_hooks.py", "loss/lazy_tensor.py", "loss/row_program.py",
        "restart/dynamo_state.py", "restart/hashes.py", "restart/program.py", "restart/restoring.py",
    },
    "_guards": {
        "attention/runtime/operators.py", "collectives/ddp_buckets.py", "collectives/eager_sequences.py",
        "compiler/lowering_backward.py", "compiler/lowering_prologues.py", "compiler/lowering_segments.py",
        "compiler/output_strides.py",
        "graph/symbols.py", "inspect/cli/doctor.py", "inspect/dry_run.py", "inspect/recording.py",
        "loss/row_program.py", "restart/dynamo_state.py", "restart/restoring.py",
    },
    "_functorch": {
        "collectives/partitioner.py", "compiler/forked_compiler.py", "compiler/lowering.py",
        "compiler/lowering_backward.py", "compiler/memory_partitioner.py", "compiler/overwritten_inputs.py",
        "compiler/partitioner.py", "graph/effects.py", "inspect/dry_run.py", "inspect/minimise.py",
        "inspect/partition.py", "integrations/inductor_hooks.py", "loss/lazy_tensor.py", "memory/recompute.py",
        "restart/program.py",
    },
    "_inductor": {
        "collectives/partitioner.py", "compiler/broken_kernels.py", "compiler/cache_files.py",
        "compiler/forked_compiler.py", "compiler/kernel_files.py", "compiler/kernel_libraries.py",
        "compiler/lowering.py", "compiler/lowering_backward.py", "compiler/memory_partitioner.py",
        "compiler/output_strides.py", "compiler/overwritten_inputs.py", "compiler/partitioner.py",
        "compiler/restrided_graph.py",
        "compiler/slice_offsets.py", "compiler/stride_order.py", "compiler/vector_tests.py", "inspect/capturability.py",
        "inspect/cli/doctor.py",
        "integrations/inductor_hooks.py", "loss/row_program.py", "offload/insert.py", "options.py",
        "restart/program.py", "rows/live_rows.py",
    },
    "_higher_order_ops": {"attention/runtime/cuda.py", "graph/checkpoints.py"},
}  # fmt: skip


@pytest.mark.parametrize("module", MAY_NAME)
def test_files_that_name_a_private_module(module: str) -> None:
    named = re.compile(rf"^[^#`]*\btorch\.{module}\b(?!.*`)", re.M)
    found = {file.relative_to(ROOT).as_posix() for file in ROOT.rglob("*.py") if named.search(file.read_text())}
    elsewhere = {name for name in found if name.split("/")[0] != "dynamo" and "capture" not in name.split("/")}
    assert elsewhere == MAY_NAME[module]
