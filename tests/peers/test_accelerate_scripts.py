"""accelerate's own test scripts, which it installs, with this backend named in the environment as its users name it.

They compare a prepared model's training with a plain one's, and raise where the weights differ.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fxpasses.inspect

pytest.importorskip("accelerate")

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("script", ["test_script", "test_sync"])
def test_a_script_of_accelerate_passes(script: str, tmp_path: Path) -> None:
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true",
        "ACCELERATE_DYNAMO_BACKEND": "FASTPACK", "FASTPACK_OPTIONS": json.dumps({"fastpack.lowering": "aot_eager"}),
        "FXPASSES_RECORD": str(tmp_path / "records"),
    }  # fmt: skip
    command = [sys.executable, "-m", f"accelerate.test_utils.scripts.{script}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [fxpasses.inspect.load(path) for path in (tmp_path / "records").glob("*.jsonl")]
    assert sum(len(record.graphs) for record in records) > 0
