"""What a plan takes to be in use, and the marks of the allocator, are set by the tests."""

from __future__ import annotations

import pytest

from fxpasses.compiler import fitting
from fxpasses.memory import limits
from tests.memory.programs import PLANS, noted


@pytest.fixture(autouse=True)
def in_use(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that are in use before the step, as far as a plan knows."""
    found = [0]
    monkeypatch.setattr(limits, "in_use", lambda device: found[0])
    monkeypatch.setattr(fitting, "Step", noted)
    PLANS.clear()
    return found


@pytest.fixture(autouse=True)
def highest(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The allocator's highest mark."""
    found = [0]
    monkeypatch.setattr(limits, "highest", lambda device: found[0])
    monkeypatch.setattr(fitting, "_unpredicted", {})
    return found


@pytest.fixture
def few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing fits, all numbers of tiles are tried, which takes long."""
    monkeypatch.setattr(fitting, "_TILES", (2,))
