"""Grouped products in Triton, without a GPU: in the interpreter, and compiled for the GPUs that there are."""

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs triton, which `make test` installs on Linux"
)

ARCHITECTURES = [80, 89, 90, 100]
GROUPS, ROWS, DEPTH, WIDTH = 8, 512, 64, 128


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_in_the_interpreter():
    import triton

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        pytest.skip("Triton 3.6's interpreter does not loop up to a number with NumPy 2.4")
    path = Path(__file__).with_name("grouped_triton_interpreted.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, cwd=path.parents[2], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]


class NoGpu:
    """What Triton asks a driver for as it compiles."""

    def __init__(self, architecture):
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", architecture, 32)

    def get_current_target(self):
        return self._target

    def get_current_device(self):
        return f"sm_{self._target.arch}"  # Triton keeps what it compiled by device

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """compiled(architecture, function, *args): the kernels that a call launches, compiled instead, for these operands.

    The call's own arguments on the CPU tell Triton what it would see of those on a device: dtypes, strides, alignment.
    """
    import triton
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run
    kernels = []

    def run(self, *args, grid, warmup, **kwargs):
        kernels.append(launch(self, *args, grid=grid, warmup=True, **kwargs))

    def compile_for(architecture, function, *args):
        kernels.clear()
        monkeypatch.setattr(triton.runtime.driver, "_active", NoGpu(architecture))
        function(*args)
        return list(kernels)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(JITFunction, "run", run)
    return compile_for


def check(architecture, kernel, multiplies):
    ptx = kernel.asm["ptx"]
    assert re.search(rf"\.target sm_{architecture}a?\b", ptx)
    assert kernel.asm["cubin"] and kernel.metadata.shared <= 99 << 10, "more shared memory than the smallest has (8.9)"
    assert re.search(r"(ld\.global\S*\.v[24]|cp\.async\S* .*, 0x10)", ptx), "operands are read one by one"
    tensor_cores = re.search(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", ptx)
    assert bool(tensor_cores) == multiplies


def operands(dtype, listed):
    rows = torch.empty(ROWS, DEPTH, dtype=dtype)
    weights = torch.empty(GROUPS, WIDTH, DEPTH, dtype=dtype)
    offsets = torch.zeros(GROUPS, dtype=torch.int32)
    bias = torch.empty(GROUPS, WIDTH, dtype=dtype)
    return rows, [weight.clone() for weight in weights] if listed else weights, offsets, bias


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_for_every_gpu(architecture, compiled):
    from fxpasses.experts.runtime import grouped_triton

    rows, weights, offsets, bias = operands(torch.bfloat16, listed=True)
    (kernel,) = compiled(architecture, grouped_triton.matmul, rows, weights, offsets, bias, True)
    check(architecture, kernel, multiplies=True)
    (kernel,) = compiled(architecture, grouped_triton.outer, rows, rows, offsets)
    check(architecture, kernel, multiplies=True)
    (kernel,) = compiled(architecture, grouped_triton.total, rows, offsets)
    check(architecture, kernel, multiplies=False)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_compiles_for_every_gpu_in_every_form(architecture, dtype, compiled):
    from fxpasses.experts.runtime import grouped_triton

    multiplies = dtype != torch.float32  # tensor cores have no float32
    for listed, transposed, with_bias in itertools.product([False, True], repeat=3):
        rows, weights, offsets, bias = operands(dtype, listed)
        rows = rows if transposed else torch.empty(ROWS, WIDTH, dtype=dtype)
        bias = torch.empty(GROUPS, WIDTH if transposed else DEPTH, dtype=dtype) if with_bias else None
        (kernel,) = compiled(architecture, grouped_triton.matmul, rows, weights, offsets, bias, transposed)
        check(architecture, kernel, multiplies)
    for function in (grouped_triton.outer, grouped_triton.outer_list):
        (kernel,) = compiled(architecture, function, rows, torch.empty(ROWS, 96, dtype=dtype), offsets)
        check(architecture, kernel, multiplies)
    (kernel,) = compiled(architecture, grouped_triton.total, rows, offsets)
    check(architecture, kernel, multiplies=False)


@pytest.mark.parametrize("precision, multiplies", [("ieee", False), ("tf32", True)])
def test_float32_is_rounded_to_tf32_where_torch_mm_does_so(precision, multiplies, compiled):
    from fxpasses.experts.runtime import grouped_triton

    rows, weights, offsets, _ = operands(torch.float32, listed=False)
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        (kernel,) = compiled(80, grouped_triton.matmul, rows, weights, offsets, None, True)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    check(80, kernel, multiplies)
    assert (".tf32" in kernel.asm["ptx"]) == multiplies
