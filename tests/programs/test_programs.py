"""Random programs, as users write them, train compiled as they train in eager mode.

`python -m tests.programs.running FROM:TO` runs any others, and `SEED --show` prints one.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.programs.running import difference, fault, in_eager_mode, program
from tests.support import thorough

# Programs of a test, of the quick ones, of these and the slow ones, of all: the others take hours, and THOROUGH=1 runs
# them.
COUNTS = {"aot_eager": (5, 10, 80, 2000), "inductor": (3, 3, 9, 150)}


def groups() -> list[Any]:
    found = []
    for lowering, (in_one, quick, slow, all_of_them) in COUNTS.items():
        for first in range(0, all_of_them, in_one):
            marks = [pytest.mark.slow] if first >= quick else []
            marks += [thorough] if first >= slow else []
            seeds = range(first, first + in_one)
            found.append(pytest.param(lowering, seeds, marks=marks, id=f"{lowering}-{first}"))
    return found


@pytest.mark.quick(1)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("lowering", "seeds"), groups())
def test_programs_train_as_in_eager_mode(lowering, seeds):
    assert not {seed: found for seed in seeds if (found := fault(seed, lowering))}


@pytest.mark.parametrize("change", ["loss", "gradient", "buffer"])
def test_a_difference_is_found(change):
    seen = {"loss": torch.tensor(1.0), "gradient of w": torch.ones(3), "buffer steps": torch.tensor(3)}
    wrong = {
        name: value + 1e-2 if name.startswith(change) and value.is_floating_point() else value
        for name, value in seen.items()
    }
    wrong |= {"buffer steps": torch.tensor(4)} if change == "buffer" else {}
    assert difference(seen, dict(seen)) == ""
    assert difference(seen, wrong).startswith(change)


def test_most_programs_run_in_eager_mode(tmp_path):
    ran = [seed for seed in range(40) if in_eager_mode(program(seed, tmp_path), seed) is not None]
    assert len(ran) >= 0.85 * 40
