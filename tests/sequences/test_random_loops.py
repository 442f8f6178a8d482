"""Random programs that loop over parts give eager mode's results and gradients on each of several batches."""

from __future__ import annotations

from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.sequences.comparing import assert_eager_modes, batches
from tests.sequences.random_loops import JOINS_OF_ROWS, JOINS_OF_VALUES, STEPS, UNBATCHED, VALUES, Plan, program_of
from tests.support import THOROUGH

pytestmark = pytest.mark.usefixtures("capture_flags")

BATCHED = sorted(STEPS.keys() - set(UNBATCHED))
steps = st.tuples(st.sampled_from([*BATCHED, *BATCHED, *UNBATCHED]), st.booleans())
plans = st.builds(
    Plan,
    st.lists(steps, min_size=1, max_size=4).map(tuple),
    st.sampled_from(sorted(VALUES)),
    st.sampled_from([*["cat"] * 5, *sorted(JOINS_OF_ROWS)]),
    st.sampled_from([*["stack"] * 3, *sorted(JOINS_OF_VALUES)]),
    st.sampled_from(["appended", "comprehended"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0, 0, 0, 0, 1, 2]),
)
sizes = st.lists(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 6]), min_size=1, max_size=5), min_size=3, max_size=3)

seen: Counter[str] = Counter()


def check(plan: Plan, of: list[list[int]], seed: int) -> None:
    # An empty part has a mean of NaN, in which all else would be lost: not in the first batch.
    first = [size or 1 for size in of[0]]
    record = assert_eager_modes(program_of(plan), batches([first, *of[1:]], seed), "eager" if seed % 4 else "aot_eager")
    graphs = [graph for graph in record.graphs if graph.function]
    seen["programs"] += 1
    seen["less graphs than batches"] += len(graphs) < 3


@hypothesis.settings(max_examples=2, deadline=None, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(plans, sizes, st.integers(0, 1000))
def test_a_random_loop_is_as_in_eager_mode(plan: Plan, of: list[list[int]], seed: int) -> None:
    check(plan, of, seed)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", range(8))
def test_many_random_loops_are_as_in_eager_mode(case: int) -> None:
    @hypothesis.seed(case)
    @hypothesis.settings(
        max_examples=50 if THOROUGH else 8,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )
    @hypothesis.given(plans, sizes, st.integers(0, 1000))
    def run(plan: Plan, of: list[list[int]], seed: int) -> None:
        torch._dynamo.reset()
        check(plan, of, seed)

    before = Counter(seen)
    run()
    made = seen - before
    assert made["less graphs than batches"] > made["programs"] / 4, made  # the others have an operator without a rule
