"""The caches of Inductor and AOTAutograd work on rewritten graphs, and do not mix up programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import thorough

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
import fxpasses

def layer(x, lengths, w):
    longest = lengths.max().item()
    if "check" in sys.argv:
        torch._check(longest <= x.shape[0])
    mask = torch.zeros(8, 8)
    mask.masked_fill_(torch.arange(8)[:, None] < longest, 1.0)
    return (mask @ x @ w).sin()

def program(x, lengths, w):
    for _ in range(2):
        x = checkpoint(layer, x, lengths, w, use_reentrant=False)
    return x * lengths.min().item()

torch.manual_seed(0)
x, w, lengths = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True), torch.tensor([3, 5])
compiled = torch.compile(program, backend="fastpack", options={"fastpack.strict": True})
actual, expected = compiled(x, lengths, w), program(x, lengths, w)
torch.testing.assert_close(actual, expected)
gradients = [torch.autograd.grad(y.sum(), w)[0] for y in (actual, expected)]
torch.testing.assert_close(*gradients)
print(json.dumps(counters["aot_autograd"]["autograd_cache_hit"]))
"""


FOLDED = """
import json
import torch
from torch._dynamo.utils import counters
import fxpasses

layers = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()) for _ in range(4)))
compiled = torch.compile(layers, backend="fastpack", options={"fastpack.strict": True, "fastpack.fold": "on"})
with fxpasses.inspect.record() as record:
    compiled(torch.randn(2, 8, requires_grad=True)).sum().backward()
assert any(report.pass_name == "fold_layers" and report.changed for report in record.graphs[0].reports)
print(json.dumps([counters["aot_autograd"][f"autograd_cache_{kind}"] for kind in ("hit", "miss", "bypass")]))
"""


def hits(cache: Path, *arguments: str, program: str = PROGRAM) -> Any:
    """How often AOTAutograd's cache, whose entries hold Inductor's code, was hit in a process of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@thorough
@pytest.mark.slow
def test_a_second_process_finds_the_compiled_program(tmp_path):
    assert hits(tmp_path) == 0
    assert hits(tmp_path) == 1
    assert hits(tmp_path, "check") == 0  # the same main graph, but more is known of its inputs


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_layers(tmp_path):
    _, missed, _ = hits(tmp_path, program=FOLDED)
    assert hits(tmp_path, program=FOLDED) == [missed, 0, 0]
    assert missed <= 3  # one body, and what stands before and behind the layers
