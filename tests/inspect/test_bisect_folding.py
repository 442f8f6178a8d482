"""`fxpasses bisect` on a folding that is wrong: it names the pass, and the kind of layers that is to blame."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import thorough

ROOT = Path(__file__).parents[2]
# A layer of the second kind is given the weights of the one before.
WRONG = """
from fxpasses.fold.outlining import call_layer
from fxpasses.fold.fold_layers import _Rewriter

right = _Rewriter.fold

def wrong(self, kind, name):
    right(self, kind, name)
    if name == "layer_1":
        calls = [n for n in self.gm.graph.nodes if n.target is call_layer and n.args[0].target == name]
        calls[1].args = (*calls[1].args[:2], *calls[0].args[2:])

_Rewriter.fold = wrong
"""
CHECK = """
import torch

class Layers(torch.nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layers = torch.nn.ModuleList(make() for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

class First(torch.nn.Linear):
    def forward(self, x):
        return x + torch.tanh(super().forward(x)).relu().sin()

class Second(torch.nn.Linear):
    def forward(self, x):
        return x * torch.sigmoid(super().forward(x))

torch.manual_seed(0)
model = torch.nn.Sequential(Layers(lambda: First(8, 8)), Layers(lambda: Second(8, 8)))
options = {"fastpack.lowering": "aot_eager", "fastpack.fold": "on"}
x = torch.randn(3, 8, requires_grad=True)
torch.testing.assert_close(torch.compile(model, backend="fastpack", options=options)(x), model(x))
"""


@pytest.mark.slow
@thorough  # test_cli.py has a faster one, of a pass
def test_bisect_finds_a_wrong_folding_and_its_kind_of_layers(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(WRONG)  # as if it were wrong as installed
    (tmp_path / "check.py").write_text(CHECK)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-m", "fxpasses", "bisect", "--output", "repro.py", "--minimise", "0", "check.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "found: the pass fold_layers" in done.stdout, done.stdout
    told = done.stdout.partition("change 2 of 2 that fold_layers makes in it")[2].splitlines()
    assert told[1].startswith("  linear_4 at check.py:") and told[1].endswith("3 calls ×4 → one body"), done.stdout
    assert "FXPASSES_CHANGES=fold_layers:2 python check.py" in done.stdout, done.stdout
