"""Random programs over two ranks: each rank issues eager mode's sequence of collectives, and has its numbers.

The ranks run one after the other, each with its own batches, in a process group that notes what it is asked for. Where
both sequences are eager mode's, they fit each other as eager mode's do.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import hypothesis
import hypothesis.strategies as st
import pytest
import torch

from fxpasses.dynamo import variants
from tests.distributed.random_collectives import made, sources, steps_of_ranks
from tests.distributed.recorded_group import recorded_group
from tests.distributed.test_collectives import assert_same_step
from tests.support import THOROUGH, compiled

_VARIANTS = 3  # of a frame, in place of 6: its questions are given up


def check(source: str, steps: Any, lowering: str) -> None:
    program = made(source)
    with warnings.catch_warnings(), mock.patch.object(variants, "_MOST", _VARIANTS):
        warnings.simplefilter("ignore")
        for rank, batches in enumerate(steps):
            torch._dynamo.reset()
            with recorded_group(rank) as group:
                actual = compiled(program, lowering, strict=False)
                for lengths in batches:
                    assert_same_step(group, actual, program, torch.tensor(lengths))


def checking(examples: int) -> Any:
    given = hypothesis.given(sources(), steps_of_ranks(), st.sampled_from(["eager", "aot_eager", "aot_eager"]))
    health = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large]
    settings = hypothesis.settings(max_examples=examples, suppress_health_check=health, print_blob=True)
    return lambda function: settings(given(function))


@checking(examples=5)
def test_each_rank_issues_what_eager_mode_issues(source: str, steps: Any, lowering: str) -> None:
    check(source, steps, lowering)


@pytest.mark.slow
@pytest.mark.timeout(0)
@checking(examples=1000 if THOROUGH else 25)
def test_each_rank_issues_what_eager_mode_issues_in_many_programs(source: str, steps: Any, lowering: str) -> None:
    check(source, steps, lowering)
