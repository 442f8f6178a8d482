"""What a test may assume: fresh Dynamo state, seed 0, one thread; gpu tests run only where CUDA is."""

import os

import hypothesis
import pytest
import torch
import torch._dynamo

MAX_THREADS = 1

# No deadline: the first example of a property pays for compilation.
hypothesis.settings.register_profile("fxpasses", deadline=None, derandomize=bool(os.environ.get("CI")))
hypothesis.settings.load_profile("fxpasses")

if torch.get_num_threads() > MAX_THREADS:
    torch.set_num_threads(MAX_THREADS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch.cuda.is_available() is False")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def fresh_dynamo_and_seed() -> None:
    """Resets Dynamo's compiled code and seeds torch, so that no test depends on the tests before it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
