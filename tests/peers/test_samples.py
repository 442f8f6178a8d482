"""What PyTorch's own tests run, here under this backend: it works wherever eager mode and stock do, with their numbers.

The samples ship with torch. A test fails where they are fewer than they were, or where many of them are not compared.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.peers.comparing import Program, Tally, compare

pytest.importorskip("expecttest", reason="torch.testing._internal imports it")

from torch.testing._internal.autograd_function_db import autograd_function_db
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.testing._internal.common_optimizers import optim_db
from torch.testing._internal.custom_op_db import custom_op_db
from torch.testing._internal.hop_db import hop_db

from tests.peers import samples
from tests.support import thorough

OPERATORS = [
    "argsort", "bmm", "bincount", "cat", "cumsum", "einsum", "gather", "index_add", "index_put", "masked_fill",
    "masked_select", "matmul", "max.reduction_with_dim", "nn.functional.cross_entropy", "nn.functional.dropout",
    "nn.functional.embedding", "nn.functional.gelu", "nn.functional.layer_norm", "nn.functional.linear",
    "nn.functional.one_hot", "nn.functional.scaled_dot_product_attention", "nonzero", "repeat_interleave",
    "scatter_add", "softmax", "split.list_args", "topk", "tril", "unique", "where",
]  # fmt: skip
READ = [
    "bincount", "cumsum", "cummax", "max.reduction_no_dim", "nonzero", "repeat_interleave", "searchsorted", "sort",
    "sum", "unique",
]  # fmt: skip
MODULES = [
    "BatchNorm1d", "Conv2d", "CrossEntropyLoss", "Embedding", "GELU", "GroupNorm", "LayerNorm", "Linear", "RMSNorm",
    "Softmax",
]  # fmt: skip
CHUNKS = 6  # of all operators, so that they spread over processes


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's partitioner fails, it writes a file into the current directory."""
    monkeypatch.chdir(tmp_path)


def check(programs: Iterable[Program], at_least: int, whole: float = 0.85) -> Tally:
    """`at_least`: how many are compared; `whole`: the part of them that is one graph."""
    tally = compare(programs)
    assert not tally.worse
    assert len(tally.compared) >= at_least, tally.not_compared
    assert len(tally.whole) >= whole * len(tally.compared), set(tally.compared) - set(tally.whole)
    return tally


def named(names: list[str], infos: list[Any]) -> list[Any]:
    found = [info for info in infos if samples.name_of(info) in names]
    assert len(found) == len(names), set(names) - {samples.name_of(info) for info in found}
    return found


@pytest.mark.slow
def test_operators() -> None:
    check(samples.operators(named(OPERATORS, op_db)), at_least=len(OPERATORS))


def test_operators_of_which_the_host_reads_a_number() -> None:
    check(samples.read_by_the_host(named(READ, op_db)), at_least=len(READ), whole=1)


def test_modules() -> None:
    check(samples.modules(named([f"nn.{name}" for name in MODULES], module_db)), at_least=len(MODULES), whole=1)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, *(pytest.param(at, marks=thorough) for at in range(1, CHUNKS))])
def test_all_operators(chunk: int) -> None:
    check(samples.operators(samples.defined(op_db)[chunk::CHUNKS]), at_least=120)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [0, pytest.param(1, marks=thorough), pytest.param(2, marks=thorough)])
def test_all_operators_of_which_the_host_reads_a_number(chunk: int) -> None:
    check(samples.read_by_the_host(samples.defined(op_db)[chunk::3]), at_least=130)


@pytest.mark.slow
def test_all_modules() -> None:
    check(samples.modules(module_db), at_least=100)


@pytest.mark.slow
def test_all_optimizers() -> None:
    check(samples.optimizers(optim_db), at_least=10, whole=0)


@pytest.mark.slow
def test_higher_order_operators_and_custom_ones() -> None:
    """Some of them compute with numpy, which breaks the graph under stock too."""
    check(samples.operators([*hop_db, *autograd_function_db, *custom_op_db]), at_least=30, whole=0.5)


@pytest.mark.slow
def test_programs_of_export() -> None:
    check(samples.examples(), at_least=30)
