"""A process finds the graphs with DTensors that another has compiled."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from fxpasses.compiler.mesh_keys import without_hashes


def test_a_mesh_is_pickled_without_its_hash() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        known = hash(mesh)
        with without_hashes():
            kept = pickle.dumps(mesh)
        assert b"_hash" not in kept and b"_hash" in pickle.dumps(mesh)
        restored = pickle.loads(kept)
        assert restored == mesh and hash(restored) == known
    finally:
        dist.destroy_process_group()


_PROGRAM = """
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fxpasses

dist.init_process_group("gloo", init_method="file://{file}", rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
parallelize_module(model, init_device_mesh("cpu", (1,)), {{"0": ColwiseParallel(), "2": RowwiseParallel()}})
program = torch.compile(model, backend="fastpack", options={{"fastpack.strict": True}})
program(torch.ones(4, 8)).sum().backward()
print(counters["inductor"]["fxgraph_cache_hit"], counters["inductor"]["fxgraph_cache_miss"])
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    found = []
    for name in ("first", "second"):
        command = [sys.executable, "-c", _PROGRAM.format(file=tmp_path / name)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.strip())
    assert found == ["0 2", "2 0"]
