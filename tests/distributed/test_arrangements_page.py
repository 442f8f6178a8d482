"""The table of arrangements in docs/distributed.md has the figures that the tests of this folder assert."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.distributed import test_ddp, test_expert_parallel
from tests.distributed.test_sharded import FAST, SLOW

PAGE = Path(__file__).parents[2] / "docs" / "distributed.md"


def rows() -> dict[str, list[str]]:
    section = PAGE.read_text().split("## Arrangements")[1].split("\n## ")[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {name: figures for name, _, *figures in cells[2:]}


def change(before: int, after: int) -> str:
    return f"{before} → {after}"


@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="pipelines read one number less on torch 2.11")
def test_each_figure_is_asserted() -> None:
    reads, masks = zip(test_ddp.EAGER_COUNTS, test_ddp.COUNTS, strict=True)
    expected = {
        "DDP, three layers": [change(*reads), change(*masks)],
        "expert parallel, a layer": [change(test_expert_parallel.EAGER_READS, test_expert_parallel.READS), ""],
    }
    found = rows()
    for name, (_, outcome, _) in (FAST | SLOW).items():
        if name in found:
            assert (outcome.graphs, outcome.breaks, outcome.difference) == (1, 0, 0.0)
            expected[name] = [change(outcome.eager_reads, outcome.reads), change(outcome.eager_masks, outcome.masks)]
    assert found == expected and len(found) > 5
