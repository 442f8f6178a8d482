"""Seen from outside: the memory of a process that offloads, and what is left of one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Sixteen checkpointed layers of attention and an MLP, activations of 8 MiB, compiled as a whole or one by one; fewer in
# the one to be killed. It waits to be looked at, and then ends.
TRAIN = """
import functools, json, sys
import torch
import torch.nn.functional as F
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint
import fxpasses

torch.set_num_threads(1)
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.up = (torch.nn.Linear(64, n) for n in (192, 64, 64))
    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 16)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
        return x + torch.tanh(self.up(x))
class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(4 if "killed" in sys.argv else 16))
    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x.square().mean()

torch.manual_seed(0)
model, x = Decoder(), torch.randn(1024, 32, 64)
options = {"fastpack.lowering": "aot_eager", "fastpack.strict": True} | json.loads(sys.argv[1])
if "by layer" in sys.argv:
    for number, layer in enumerate(model.layers):
        model.layers[number] = checkpoint_wrapper(layer)
        model.layers[number].compile(backend="fastpack", options=options)
    model.forward = lambda x: functools.reduce(lambda x, layer: layer(x), model.layers, x).square().mean()
    compiled = model
else:
    compiled = torch.compile(model, backend="fastpack", options=options)
loss = compiled(x)
if "killed" in sys.argv:
    print(json.dumps(fxpasses.offload_stats().bytes_held), flush=True)
    sys.stdin.read()
loss.backward()
print(json.dumps([fxpasses.offload_stats().bytes_out, loss.item()]), flush=True)
sys.stdin.read()
"""


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    # A fixed threshold, or the C library raises it as large tensors are freed, and keeps their memory for itself.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    given = json.dumps({f"fastpack.{name}": value for name, value in options.items()})
    command = [sys.executable, "-c", TRAIN, given, *arguments]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def peak_memory(*arguments: str, **options: Any) -> tuple[int, int, float]:
    """The peak of a process's resident memory in bytes, as the system counts it; bytes moved, and the loss."""
    with start(*arguments, **options) as process:
        assert process.stdout is not None and process.stdin is not None
        moved, loss = json.loads(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    assert process.returncode == 0
    return 1024 * int(status.split("VmHWM:")[1].split()[0]), moved, loss


linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")


@linux
@pytest.mark.slow
def test_peak_memory_falls_by_most_of_what_is_moved(tmp_path):
    before, nothing, expected = peak_memory()
    after, moved, loss = peak_memory(**{"offload": "disk", "offload.directory": str(tmp_path)})
    assert nothing == 0 and loss == expected
    assert moved == 14 * (8 << 20)  # of 15 that are computed, the last one stays
    assert before - after >= 0.8 * moved, (before, after, moved)


@linux
@pytest.mark.slow
def test_peak_memory_falls_as_well_where_layers_are_compiled_one_by_one(tmp_path):
    """What is moved there are the layers' inputs. The first one needs no gradient, and stays."""
    before, nothing, expected = peak_memory("by layer")
    after, moved, loss = peak_memory("by layer", **{"offload": "disk", "offload.directory": str(tmp_path)})
    assert nothing == 0 and loss == expected
    assert moved == 15 * (8 << 20)
    assert before - after >= 0.8 * moved, (before, after, moved)


@linux
@pytest.mark.slow
def test_a_killed_process_leaves_nothing(tmp_path):
    with start("killed", **{"offload": "disk", "offload.directory": str(tmp_path)}) as process:
        assert process.stdout is not None
        held = json.loads(process.stdout.readline())
        assert held == 2 * (8 << 20)
        files = [os.readlink(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert sum(name.startswith(str(tmp_path)) and name.endswith("(deleted)") for name in files) == 2
        assert os.listdir(tmp_path) == []
        os.kill(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert os.listdir(tmp_path) == []
