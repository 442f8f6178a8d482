"""Random programs on a device whose streams run in a random order: eager mode's numbers on the CPU, bit for bit."""

from __future__ import annotations

import gc

import pytest
import torch

from tests.device import simulated
from tests.device.random_programs import plan_of, train
from tests.support import THOROUGH

SHORT = 8
SEEDS = 200 if THOROUGH else 80
ORDERS = ("random", "random", "late", "early")


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < SHORT else pytest.mark.slow) for seed in range(SEEDS)]
)
def test_numbers_are_those_of_the_cpu(seed):
    plan = plan_of(seed)
    expected = train(plan, seed, "cpu", compile=False)
    simulated.set_order(ORDERS[seed % len(ORDERS)], seed)
    device = "sim:1" if seed % 5 == 4 else "sim:0"
    found = train(plan, seed, device, compile=True)
    torch._dynamo.reset()
    gc.collect()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), plan
