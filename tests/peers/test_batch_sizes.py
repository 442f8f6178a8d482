"""PyTorch's own samples of operators, on as many rows as the batch says: on all, on one, on all but one."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import fxpasses
from tests.peers.comparing import close, copies, first_line, step
from tests.support import thorough

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")

from torch.testing._internal.common_methods_invocations import op_db

from tests.peers import samples

OPERATORS = ["__rdiv__", "clamp", "cumsum", "masked_select", "nn.functional.layer_norm", "softmax", "std", "unbind"]
LEFT_OUT = {"lu_unpack"}  # it ends the process in eager mode, given pivots for other rows
CHUNKS = 12


def of_a_tensor(op: Any, arguments: Any, keywords: Any) -> Any:
    return lambda x, lengths: op(x[: lengths.max()], *arguments, **keywords)


def of_a_number(op: Any, arguments: Any, keywords: Any) -> Any:
    return lambda x, lengths: op(x[: lengths.max().item()], *arguments, **keywords)


def faults(infos: Iterable[Any], lowering: str, trimmed: Any, at_most: int = 3) -> dict[str, str]:
    """By operator: where this backend raises, or computes other numbers than eager mode."""
    found = {}
    for info in infos:
        for sample in samples.of_rows(info, at_most):
            program = trimmed(info.op, sample.args, sample.kwargs)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                if fault := _fault(program, sample, lowering):
                    found[samples.name_of(info)] = fault
    return found


def _fault(program: Any, sample: Any, lowering: str) -> str:
    torch._dynamo.reset()
    compiled = fxpasses.compile(program, options={"fastpack.lowering": lowering})
    rows = len(sample.input)
    for real in (rows, 1, rows - 1, rows):
        given = (sample.input, torch.tensor([real, 1]))
        torch.manual_seed(0)
        try:
            expected = step(program, program, sample.output_process_fn_grad, copies(given), {})
        except Exception:
            continue  # of arguments for other rows
        torch.manual_seed(0)
        try:
            found = step(program, compiled, sample.output_process_fn_grad, copies(given), {})
        except Exception as error:
            return f"{real} rows: {first_line(error)}"
        if not close(found, expected):
            return f"{real} rows: other numbers"
    return ""


def named(names: Iterable[str]) -> list[Any]:
    return [info for info in op_db if samples.name_of(info) in names]


@pytest.mark.quick(1)
@pytest.mark.parametrize("trimmed", [of_a_tensor, of_a_number])
def test_operators(trimmed: Any) -> None:
    assert not faults(named(OPERATORS), "aot_eager", trimmed, at_most=1)


@pytest.mark.slow
@thorough
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
@pytest.mark.parametrize("trimmed", [of_a_tensor, of_a_number])
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_all_operators(chunk: int, trimmed: Any, lowering: str) -> None:
    infos = [info for info in samples.defined(op_db) if samples.name_of(info) not in LEFT_OUT]
    assert not faults(infos[chunk::CHUNKS], lowering, trimmed, at_most=3 if lowering == "aot_eager" else 1)
