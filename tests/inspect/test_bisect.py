"""`fxpasses bisect` on a pass that is wrong: it names the pass, the graph and the change, and writes a reproduction."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fxpasses.inspect.cli import main
from tests.support import thorough

ROOT = Path(__file__).parents[2]

WRONG_PASS = """
import torch
from fxpasses.metadata.hoist_metadata import _Cut

right = _Cut._add_input

def wrong(self, ref, entry):
    def is_tensor(entry):
        return isinstance(entry.fake, torch.Tensor)

    tensors = [extra for extra in self.frontier if is_tensor(self.table.entries[extra.ref.number])]
    second = is_tensor(entry) and len(tensors) == 1
    number = right(self, ref, entry)
    if not second:
        return number
    with self.main.gm.graph.inserting_after(number):
        other = self.main.gm.graph.call_function(torch.neg, (number,))
    other.meta = dict(number.meta)
    return other

_Cut._add_input = wrong
"""
CHECK_OF_PASS = """
import torch

def first(x, lengths):
    return x * lengths.max().item()

def second(x, lengths):
    for factor in range(3):
        mask = torch.zeros(8, 8)
        mask[: lengths.max().item()] = factor + 1
        x = mask.mul(2) @ x
    return x

x, lengths = torch.randn(8, 4, requires_grad=True), torch.tensor([3, 5])
options = {"fastpack.lowering": "eager", "fastpack.passes": ["hoist_metadata"]}
for function in (first, second):
    compiled = torch.compile(function, backend="fastpack", options=options)
    torch.testing.assert_close(compiled(x, lengths), function(x, lengths))
"""
# A layer of the second kind is given the weights of the one before.
WRONG_FOLDING = """
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
CHECK_OF_FOLDING = """
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


def bisected(folder: Path, wrong: str, check: str, seconds: int) -> str:
    """What the command prints where `wrong` runs at the start of every process."""
    (folder / "sitecustomize.py").write_text(wrong)  # as if it were wrong as installed
    (folder / "check.py").write_text(check)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    command = [
        sys.executable,
        "-m",
        "fxpasses",
        "bisect",
        "--output",
        "repro.py",
        "--minimise",
        str(seconds),
        "check.py",
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wrong_pass_its_graph_and_its_change(tmp_path):
    """The pass is wrong in the second of three changes that it makes in the second graph."""
    printed = bisected(tmp_path, WRONG_PASS, CHECK_OF_PASS, 20)
    assert "found: the pass hoist_metadata" in printed
    assert "graph: 1/0, check.py:" in printed and "in second" in printed
    # One change in the first graph, and two in the second.
    assert "FXPASSES_GRAPHS=2 FXPASSES_CHANGES=hoist_metadata:3 python check.py" in printed
    told = printed.partition("change 2 of 3 that hoist_metadata makes in it")[2]
    assert "matmul: argument 0: mul → neg" in told and "mul → packed" not in told, told  # and no other mask
    assert "which fails as well, and passes without the passes" in printed, printed
    text = (tmp_path / "repro.py").read_text()
    assert text.count("operator.matmul") < 3 and "# check.py:" in text, text  # the third mask is not needed


@pytest.mark.slow
@thorough  # the one above is faster
def test_a_wrong_folding_and_its_kind_of_layers(tmp_path):
    printed = bisected(tmp_path, WRONG_FOLDING, CHECK_OF_FOLDING, 0)
    assert "found: the pass fold_layers" in printed, printed
    told = printed.partition("change 2 of 2 that fold_layers makes in it")[2].splitlines()
    assert told[1].startswith("  linear_4 at check.py:") and told[1].endswith("3 calls ×4 → one body"), printed
    assert "FXPASSES_CHANGES=fold_layers:2 python check.py" in printed, printed


@pytest.mark.slow
def test_a_script_that_passes_has_nothing_to_find(tmp_path, capsys):
    (tmp_path / "check.py").write_text("pass\n")
    assert main(["bisect", str(tmp_path / "check.py")]) == 1
    assert "the script does not fail" in capsys.readouterr().out
