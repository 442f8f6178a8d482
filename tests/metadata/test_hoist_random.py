"""Random programs give equal results and gradients with and without `hoist_metadata`."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import fxpasses.inspect
from tests.metadata.random_programs import SEQUENCES, STEPS, TOKENS, WIDTH, Layer, Plan, Program
from tests.support import THOROUGH, compiled, reports_of

chance = st.floats(0, 1, exclude_max=True, allow_subnormal=False)
steps = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), chance, chance, chance), min_size=3, max_size=9).map(tuple)
layers = st.builds(Layer, steps, st.booleans(), st.booleans(), st.booleans())
# Layers repeat, as they do in models: values of one layer are those of another.
plans = st.builds(
    lambda some, repeats, returns: Plan(tuple(some) + tuple(some[:1]) * repeats, returns),
    st.lists(layers, min_size=2, max_size=3),
    st.integers(0, 2),
    st.sampled_from(["x", "mask", "views"]),
)

seen: Counter[str] = Counter()


@pytest.mark.slow
@pytest.mark.timeout(1500)  # two minutes, and much more on a busy machine
@hypothesis.settings(
    max_examples=200 if THOROUGH else 50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
    phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
)
@hypothesis.given(plans, st.integers(0, 1000), st.sampled_from(["eager", "eager", "aot_eager"]))
def test_equal_results_and_gradients(plan, seed, lowering):
    torch._dynamo.reset()
    torch.manual_seed(seed)
    program = Program(plan)
    batches = make_batches(random.Random(seed))
    try:
        expected = [results(program, batch, number) for number, batch in enumerate(batches)]
    except RuntimeError:  # such as a backward pass through memory that was written since
        hypothesis.reject()
    without = compiled(program, lowering, passes=[])
    try:
        captured = [results(without, batch, number) for number, batch in enumerate(batches)]
    except Exception:  # what Dynamo does not capture is not this pass's
        hypothesis.reject()
    hypothesis.assume(all(equal(*pair) for pair in zip(expected, captured, strict=True)))

    torch._dynamo.reset()
    with fxpasses.inspect.record() as record:
        function = compiled(program, lowering)
        for number, batch in enumerate(batches):
            inputs = copies(batch)
            assert equal(results(function, inputs, number, copy=False), expected[number])
            if inputs[1]._version == 0:  # the program leaves its inputs alone: the same batch once more
                assert equal(results(function, inputs, number, copy=False), expected[number])
    note(record)


def test_the_programs_are_not_vacuous():
    """Runs after the test above, and on its own checks nothing."""
    if seen["programs"] < 25:
        pytest.skip("the random programs did not run")
    assert seen["hoisted"] > seen["programs"] / 3
    assert seen["refused"] > seen["programs"] / 3


def make_batches(generator: random.Random) -> list[list[torch.Tensor]]:
    return [
        [
            torch.randn(TOKENS, WIDTH),
            torch.tensor(generator.sample(range(1, 9), SEQUENCES)),
            torch.arange(TOKENS) % generator.randint(2, 9),
        ]
        for _ in range(3)
    ]


def copies(batch: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone().requires_grad_(tensor.is_floating_point()) for tensor in batch]


def results(program: Any, batch: list[torch.Tensor], seed: int, copy: bool = True) -> list[torch.Tensor | None]:
    """Outputs, gradients and inputs after the run; the outputs are then overwritten, as their owner may."""
    inputs = copies(batch) if copy else batch
    torch.manual_seed(seed)
    outputs = pytree.tree_leaves(program(*inputs))
    gradients = torch.autograd.grad(outputs[0].square().sum(), [inputs[0], *program.parameters()], allow_unused=True)
    kept = [output.detach().clone() for output in outputs]
    with torch.no_grad():
        for output in outputs:
            output.add_(1)
    return [*kept, *gradients, *(tensor.detach().clone() for tensor in inputs)]


def equal(first: list[torch.Tensor | None], second: list[torch.Tensor | None]) -> bool:
    for one, other in zip(first, second, strict=True):
        if (one is None) != (other is None):
            return False
        if one is not None and other is not None:
            if one.dtype != other.dtype or not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
                return False
    return True


def note(record: fxpasses.inspect.Record) -> None:
    reports = reports_of(record)
    seen["programs"] += 1
    seen["hoisted"] += any(report.changed for report in reports)
    seen["refused"] += any(report.refusals for report in reports)
