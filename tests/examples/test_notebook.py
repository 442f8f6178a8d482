"""The notebook runs, but for its installation, and is kept without outputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = json.loads((Path(__file__).parents[2] / "examples" / "quickstart.ipynb").read_text())
CODE = [cell for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]


def test_the_notebook_has_no_outputs():
    assert [(cell["outputs"], cell["execution_count"]) for cell in CODE] == [([], None)] * len(CODE)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    # The tag is nbclient's: cells that it passes over.
    cells = ["".join(cell["source"]) for cell in CODE if "skip-execution" not in cell["metadata"].get("tags", ())]
    assert len(cells) == len(CODE) - 1
    script = tmp_path / "quickstart.py"
    script.write_text("\n\n".join(cells))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1 graph\n")
    assert "what changed: 16 host reads → 4; 4 tensors of the batch → 1, once per batch" in done.stdout
    assert done.stdout.endswith("losses and gradients agree with eager mode's\n")
