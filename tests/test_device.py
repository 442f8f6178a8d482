"""The tests of `tests/device`, in processes of their own: autograd makes a thread for each device at its first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device import building

ROOT = Path(__file__).parents[1]
GROUPS = sorted({path.stem.split("_")[1] for path in ROOT.glob("tests/device/test_*_*.py")})


@pytest.mark.all_cases
@pytest.mark.timeout(2400)  # a first run builds the device, and one test here is many
@pytest.mark.parametrize("speed", ["not slow", pytest.param("slow", marks=pytest.mark.slow)], ids=["short", "long"])
@pytest.mark.parametrize("group", GROUPS)
def test_on_the_simulated_device(group, speed):
    missing = building.missing()
    if missing:
        pytest.skip(f"the simulated device cannot be built: {missing}")
    files = sorted(map(str, ROOT.glob(f"tests/device/test_{group}_*.py")))
    command = [sys.executable, "-m", "pytest", "-q", "-m", speed, "-p", "no:cacheprovider", *files]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(found.stdout)
    assert found.returncode in (0, 5), found.stderr  # 5: no test of this group is of this speed
