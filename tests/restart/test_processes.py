"""A training program starts again from a file: nothing is traced and nothing compiled, and its steps are the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")
_PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
import fxpasses
from tests.fold.programs import Plan, Stack

path, width = sys.argv[1], int(sys.argv[2])
found = fxpasses.load_caches(path, missing_ok=True)

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stack, self.head = Stack(Plan(("attention", "block") * 4)), torch.nn.Linear(12, width)

    def forward(self, tokens, lengths):
        logits = self.stack(tokens)[0]
        seen = torch.arange(tokens.shape[1]) < lengths[:, None]
        return self.head(logits * seen[..., None] * lengths.max().item()).square().mean()


torch.manual_seed(0)
model = Model()
program = torch.compile(model, backend="fastpack", options={"fastpack.strict": True})
losses = []
for size in (6, 6, 5, 4):
    batch = torch.arange(2 * size).view(2, size) % 12, torch.tensor([size - 1, 2])
    expected, actual = model(*batch), program(*batch)
    ours, eager = (torch.autograd.grad(loss, model.parameters()) for loss in (actual, expected))
    torch.testing.assert_close([actual, *ours], [expected, *eager], rtol=1e-4, atol=1e-5)
    losses.append(actual.item())
fxpasses.save_caches(path)
print(json.dumps([found, counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"], losses]))
"""


def run(folder: Path, path: Path, width: int = 5) -> Any:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": os.getcwd()}
    script = folder.parent / "program.py"
    script.write_text(_PROGRAM)
    command = [sys.executable, str(script), str(path), str(width)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_process_with_the_file_traces_and_compiles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "compiled.zip"
    found, traced, missed, losses = run(tmp_path / "first", path)
    assert not found and traced == 2 and missed > 0
    for name in ("second", "third"):  # each saves what it has
        assert run(tmp_path / name, path) == [True, 0, 0, losses]
    found, traced, missed, _ = run(tmp_path / "other", path, width=7)
    assert found and traced == 2 and missed > 0
    assert run(tmp_path / "fourth", path, width=7)[:3] == [True, 0, 0]
