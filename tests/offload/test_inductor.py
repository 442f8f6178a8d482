"""Through Inductor, which reorders nodes, reuses memory and keeps caches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.partitioners import default_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn

import fxpasses
from fxpasses.compiler.partitioner import Partitioner
from fxpasses.offload.runtime.disk import UnlinkedFile
from fxpasses.options import Offload
from tests.offload import programs
from tests.offload.test_offload_activations import assert_equal, numbers
from tests.support import compiled

PROGRAM = """
import json, sys
import torch
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
import fxpasses
import fxpasses.inspect

def layer(x, w):
    return x + (x @ w).sin()

def program(x, w):
    for _ in range(4):
        x = checkpoint(layer, x, w, use_reentrant=False)
    return x.square().mean()

torch.manual_seed(0)
x, w = torch.randn(8, 4), torch.randn(4, 4, requires_grad=True)
expected = torch.autograd.grad(program(x, w), w)[0]
for others in json.loads(sys.argv[1]):
    torch._dynamo.reset()
    counters.clear()
    fxpasses.offload_stats(reset=True)
    options = {"fastpack.strict": True, "fastpack.offload": "disk", "fastpack.offload.min_bytes": 0} | others
    with fxpasses.inspect.record() as record:
        compiled = torch.compile(program, backend="fastpack", options=options)
        actual = torch.autograd.grad(compiled(x, w), w)[0]
    torch.testing.assert_close(actual, expected)
    (said,) = [r.summary for r in record.graphs[0].reports if r.pass_name == "offload_activations"]
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    print(json.dumps([hits, fxpasses.offload_stats().tensors_in, said, actual.tolist()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("buffers", [2])
def test_memory_that_inductor_uses_again_is_not_what_is_written(buffers, monkeypatch, tmp_path):
    """The disk is slow, so that a copy that is not waited for would see what was written over its source."""
    write = UnlinkedFile.write

    def slow(self: UnlinkedFile, data: torch.Tensor) -> None:
        time.sleep(0.05)
        write(self, data)

    monkeypatch.setattr(UnlinkedFile, "write", slow)
    make: Any = lambda: programs.Decoder(4)  # noqa: E731
    expected = numbers(make, programs.retain_graph, "cpu", "off", lowering="inductor")
    fxpasses.offload_stats(reset=True)
    actual = numbers(
        make, programs.retain_graph, "cpu", "disk", lowering="inductor", buffers=buffers, directory=str(tmp_path)
    )
    assert_equal(actual, expected)
    stats = fxpasses.offload_stats()
    assert stats.tensors_out >= 3 and stats.tensors_in == 3 * stats.tensors_out


class Strided(nn.Module):
    """What is saved was traced with the strides of a product's view, and Inductor would choose those of `table`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))
        self.table = torch.rand(4, 4, 512, 16)

    def forward(self, x: Tensor) -> Tensor:
        table = self.table[..., : x.shape[1], :]
        for weight in self.weights:
            heads = (x @ weight).unflatten(-1, (4, 16)).transpose(1, 2) * table + table.cos()
            x = heads.exp().sin().transpose(1, 2).flatten(2)
        return x.square().mean()


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is used again before it has been written is then seen."""
    write = UnlinkedFile.write

    def slow(self: UnlinkedFile, data: Tensor) -> None:
        time.sleep(0.05)
        write(self, data)

    monkeypatch.setattr(UnlinkedFile, "write", slow)


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_moved_tensor_has_the_strides_that_it_was_traced_with(dynamic: bool) -> None:
    """Else Inductor copies its handle, while the disk is written to."""
    model, x = Strided(), torch.randn(4, 512, 64)
    sizes = {"offload.min_bytes": 0, "offload.keep_last": 0}
    program = compiled(model, "inductor", dynamic=dynamic, fold="off", offload="disk", **sizes)
    fxpasses.offload_stats(reset=True)
    for tokens in (512, 256) if dynamic else (512,):
        expected = torch.autograd.grad(model(x[:, :tokens]), list(model.parameters()))
        found = torch.autograd.grad(program(x[:, :tokens]), list(model.parameters()))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    stats = fxpasses.offload_stats()
    assert stats.tensors_out == stats.tensors_in >= 3


class Overlapping(nn.Module):
    """Backward needs a view with overlaps of what Inductor computes to memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(64, 64) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight + 1).unfold(1, 4, 2).sin().sum(-1).repeat(1, 3)[:, :64]
        return x.square().mean()


class Gaps(Overlapping):
    """Backward needs some columns of what Inductor computes to memory of its own, such as a query without its key."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x @ weight + 1)[:, :32] @ weight[:32]
        return x.square().mean()


class Empty(Overlapping):
    """Backward needs tensors without elements among others."""

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            hidden = x @ weight
            x = torch.cat([hidden[:, :0].exp().sin(), hidden.sin()], 1) + hidden
        return x.square().mean()


@pytest.mark.usefixtures("slow_disk")
@pytest.mark.parametrize(
    ("make", "sizes"),
    [(Gaps, (40, 64)), (Empty, (4, 40, 64)), pytest.param(Overlapping, (40, 64), marks=pytest.mark.slow)],
)
def test_all_copies_are_waited_for(make: type[Overlapping], sizes: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(sizes)
    all_move = {"offload.min_bytes": 0, "offload.keep_last": 0}
    program = compiled(model, "inductor", dynamic=make is Empty, fold="off", offload="disk", **all_move)
    fxpasses.offload_stats(reset=True)
    expected = torch.autograd.grad(model(x), list(model.parameters()))
    found = torch.autograd.grad(program(x), list(model.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    stats = fxpasses.offload_stats()
    assert stats.tensors_out == stats.tensors_in >= 3


def run(cache: Path, *options: dict[str, Any]) -> list[list[Any]]:
    """In a process of its own: for each set of options the cache's hits, tensors read, what was said, and gradients."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", PROGRAM, json.dumps(options)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()[-len(options) :]]


@pytest.mark.slow
def test_a_second_process_offloads_from_warm_caches(tmp_path):
    ((hits, moved, said, cold),) = run(tmp_path, {})
    assert hits == 0 and moved == 2 and said.startswith("2 activations")
    (hits, moved, said, warm), *others = run(tmp_path, {}, {"fastpack.offload.keep_last": 0})
    assert hits == 1 and moved == 2 and warm == cold
    assert "come from PyTorch's cache" in said and "offload_stats()" in said  # the pass had nothing to look at
    ((hits, moved, said, other),) = others  # other options are another program
    assert hits == 0 and moved == 3 and other == cold and said.startswith("3 activations")


class Users(CustomPartitionerFn):
    """A partitioner that the user gave Inductor."""

    def __init__(self, identity: Any = "the user's") -> None:
        self.identity, self.calls = identity, 0

    def __call__(self, gm: Any, joint_inputs: Any, **kwargs: Any) -> Any:
        self.calls += 1
        kwargs.pop("compiler", None)
        return default_partition(gm, joint_inputs, **kwargs)

    def uuid(self) -> Any:
        return self.identity


def test_the_caches_key_covers_options_and_the_users_partitioner():
    plain = Partitioner(Offload("disk"), strict=False).uuid()
    assert plain == Partitioner(Offload("disk"), strict=False).uuid()
    changed = {"directory": "/elsewhere", "min_bytes": 0, "keep_last": 0, "buffers": 1}
    changed |= {"device_budget": 1, "host_budget": 1}
    others = [Partitioner(Offload("disk", **{k: v}), strict=False).uuid() for k, v in changed.items()]
    others += [Partitioner(Offload("host"), strict=False).uuid()]
    others += [Partitioner(Offload("disk"), strict=False, inner=Users()).uuid()]
    assert plain not in others and len(set(others)) == len(others)
    assert Partitioner(Offload("disk"), strict=False, inner=Users(None)).uuid() is None  # not to be cached


@pytest.mark.slow
@torch._functorch.config.patch(enable_autograd_cache=False)  # a warm one partitions nothing
def test_a_users_partitioner_runs_first():
    mine = Users()
    options = {
        "fastpack.strict": True,
        "fastpack.offload": "disk",
        "fastpack.offload.min_bytes": 0,
        "custom_partitioner_fn": mine,
    }
    weight, x = torch.randn(4, 4, requires_grad=True), torch.randn(8, 4)

    def program(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (((x @ w).sin() @ w).sin() @ w).sin().sum()

    fxpasses.offload_stats(reset=True)
    found = torch.autograd.grad(torch.compile(program, backend="fastpack", options=options)(x, weight), weight)
    torch.testing.assert_close(found, torch.autograd.grad(program(x, weight), weight))
    assert mine.calls == 1 and fxpasses.offload_stats().tensors_in >= 1
