"""The caches of Inductor and AOTAutograd work on rewritten graphs, and do not mix up programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def hits(cache: Path, *arguments: str) -> int:
    """How often AOTAutograd's cache, whose entries hold Inductor's code, was hit in a process of its own."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_finds_the_compiled_program(tmp_path):
    assert hits(tmp_path) == 0
    assert hits(tmp_path) == 1
    assert hits(tmp_path, "check") == 0  # the same main graph, but more is known of its inputs
