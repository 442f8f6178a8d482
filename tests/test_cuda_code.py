"""The tests of `tests/cuda_code`, in a process of their own, which takes a device for present that is not there.

They need torch's build for CUDA, as `make compat` installs it for torch 2.15, take minutes, and ask for many private
names of PyTorch. So they run where they are asked for: FXPASSES_CUDA_CODE=1 make compat COMPAT_TORCH=2.15.0
ARGS=tests/test_cuda_code.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
CHECKED = (2, 15)  # the version whose names the stand-ins replace


@pytest.mark.timeout(3600)
@pytest.mark.skipif(os.environ.get("FXPASSES_CUDA_CODE") != "1", reason="asked for by FXPASSES_CUDA_CODE=1")
def test_code_for_cuda_without_a_device():
    version = tuple(map(int, torch.__version__.split(".")[:2]))
    if version < CHECKED or torch.version.cuda is None:
        pytest.skip(f"needs torch {'.'.join(map(str, CHECKED))}, built for CUDA, and this is {torch.__version__}")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is there: the tests marked gpu run on it")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/cuda_code"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(found.stdout)
    assert found.returncode == 0, found.stderr
