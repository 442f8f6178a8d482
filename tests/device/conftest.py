"""Each test here runs on the simulated device "sim", which is there from the first test of the process to the last.

Autograd makes its threads at the first backward pass of a process, one for each device that is there, so these tests
have processes of their own: `pytest tests/device`, or `tests/test_device.py` among all others.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from tests.device import building, simulated

_MISSING = building.missing()
if not _MISSING:
    simulated.load()
else:
    torch.utils.rename_privateuse1_backend("sim")  # so that files with skipped tests can be imported


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if _MISSING:
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"the simulated device cannot be built: {_MISSING}"))


@pytest.fixture(autouse=True, scope="session")
def backward_is_traced() -> None:
    """Autograd's threads are not Python's, so `coverage` misses what runs in them unless each installs its tracer."""
    tracer = threading.gettrace()
    if tracer is None or _MISSING:
        return
    with simulated.plugged_in():
        for device in range(simulated.DEVICES):
            x = torch.ones((), device=f"sim:{device}", requires_grad=True).clone()
            x.register_hook(lambda _: sys.settrace(tracer))
            x.backward()


@pytest.fixture(autouse=True)
def sim() -> Iterator[None]:
    """Two devices in a fresh state, in the late order. No test may write to memory that it has released."""
    with simulated.plugged_in():
        yield
        simulated.set_order("late")
        assert simulated.counts().late_writes == 0


@pytest.fixture(params=["late", "early"])
def order(request: pytest.FixtureRequest) -> str:
    """The two orders in which a missing wait is a wrong number."""
    simulated.set_order(request.param)
    return request.param
