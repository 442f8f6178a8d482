"""A number that C++ asks for, with Python's dispatch switched off, is the batch's, and the process lives."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.dynamo.numbers_from_cpp import PROGRAMS


@pytest.mark.slow
def test_numbers_that_cpp_asks_for() -> None:
    command = [sys.executable, "-X", "faulthandler", "-m", "tests.dynamo.numbers_from_cpp"]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert found.stdout.splitlines() == [f"{name}: same" for name in PROGRAMS], found.stderr[-2000:]
    assert found.returncode == 0, found.stderr[-2000:]
