"""Random programs over rows give eager mode's loss and gradients when only live rows are computed."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

import fxpasses.inspect
from tests.rows.programs import Batch, Plan, Program, batches, plan
from tests.support import THOROUGH, compiled, reports_of


def seen(step: Any, model: Program, batch: Batch) -> dict[str, Any]:
    """What the program returns, and its gradients; zeros where there are none."""
    model.zero_grad()
    returned = step(*[tensor.clone() for tensor in batch])
    returned[0].backward()
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in model.named_parameters()
    }
    return {**gradients, **{f"output {at}": value.detach() for at, value in enumerate(returned)}}


def assert_eager_modes(of: Plan, seed: int, counts: Counter[str]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    model = Program(of).double()
    with fxpasses.inspect.record() as record:
        options = {"rows": "auto", "dynamic": True if seed % 2 else None}
        part = compiled(model.of_rows if of.given else model, "eager" if seed % 5 else "aot_eager", **options)

        def step(ids: Tensor, *others: Tensor) -> Any:
            return part(model.embedding(ids), ids, *others) if of.given else part(ids, *others)

        for batch in batches(seed):
            expected, actual = seen(model, model, batch), seen(step, model, batch)
            for name, one in expected.items():
                # A NaN in a row that nothing reads does not spread from there.
                if name.startswith("output") or one.isfinite().all():
                    message = functools.partial("{}: {}".format, name)
                    torch.testing.assert_close(actual[name], one, rtol=1e-9, atol=1e-9, equal_nan=True, msg=message)
    reports = reports_of(record, "live_rows")
    counts["programs"] += 1
    counts["packed"] += any(report.changed for report in reports)
    counts.update({f"{refusal.reason.name}: {refusal.text}" for report in reports for refusal in report.refusals})


def run(seeds: range) -> None:
    counts: Counter[str] = Counter()
    for seed in seeds:
        assert_eager_modes(plan(seed), seed, counts)
    assert counts["packed"] > len(seeds) / 5, counts  # the others are not of rows alone, or have few dead ones


def test_random_programs_are_eager_modes() -> None:
    run(range(2006, 2008))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_many_random_programs_are_eager_modes() -> None:
    run(range(500 if THOROUGH else 15))
