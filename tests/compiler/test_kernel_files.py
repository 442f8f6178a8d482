"""Kernels of a graph share C++ files, with Inductor's results; what cannot share has a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fxpasses.compiler import kernel_files
from fxpasses.compiler.kernel_files import kernel_of
from tests.support import compiled

SOURCE = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(const float* in_ptr0,
                       float* out_ptr0)
{
    {
        #pragma GCC ivdep
        for(int64_t x0=0; x0<3; x0+=1) out_ptr0[x0] = in_ptr0[x0];
    }
}
"""


def kernel(source: str = SOURCE) -> kernel_files.Kernel | None:
    return kernel_of(["const float*", "float*"], source, lambda: None)


def test_a_source_with_one_function_can_share() -> None:
    found = kernel()
    assert found is not None
    assert found.headers == "#include <torch/csrc/inductor/cpp_prefix.h>\n"
    assert found.named("kernel_3").startswith('extern "C"  void  kernel_3(const float* in_ptr0')


@pytest.mark.parametrize(
    "source",
    [
        SOURCE.replace("extern", "#define N 3\nextern"),
        SOURCE.replace("extern", "static inline void help() {\n}\nextern"),
        SOURCE + "static int other = 0;\n",
        SOURCE + SOURCE,
        SOURCE.replace("kernel(", "other("),
        "",
    ],
)
def test_other_sources_do_not(source: str) -> None:
    assert kernel(source) is None


@pytest.mark.parametrize(
    ("count", "threads", "files"), [(1, 8, 1), (16, 8, 1), (17, 8, 2), (17, 1, 1), (60, 3, 3), (70, 1, 2)]
)
def test_there_are_as_many_files_as_are_worth_it(count: int, threads: int, files: int) -> None:
    kernels = [kernel() for _ in range(count)]
    found = list(kernel_files._files(kernels, threads))  # type: ignore[arg-type]
    assert len(found) == files
    assert {id(one) for file in found for one in file} == {id(one) for one in kernels}


def program(x: Tensor, w: Tensor, number: int) -> Tensor:
    """Several kernels, forward and backward: of float64, integers, and a dynamic size; and products between."""
    rows = (x.softmax(-1) + torch.arange(x.shape[0])[:, None] % 3 * number) @ w
    counted = torch.where(rows.sum(-1) > 0, 1, 0).cumsum(0)
    return (torch.layer_norm(rows, (w.shape[1],)) * counted[:, None]) @ w.sin()


def results(of: Any, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7 + seed, 16, dtype=torch.float64, generator=generator).requires_grad_()
    w = torch.randn(16, 16, dtype=torch.float64, generator=generator).requires_grad_()
    result = of(x, w, 2)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), [x, w])]


@pytest.fixture
def new_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernel_files, "_fails", False)
    torch._dynamo.reset()
    return tmp_path


def compiled_files(cache: Path) -> list[str]:
    sources = [path.read_text() for path in cache.glob("**/*.main.cpp")]
    return sources or [path.read_text() for path in cache.glob("**/*.cpp")]


def test_the_kernels_of_a_graph_are_one_file(new_cache: Path) -> None:
    ours = compiled(program, "inductor")
    for seed in range(2):
        torch.testing.assert_close(results(ours, seed), results(program, seed))
    shared = [source for source in compiled_files(new_cache) if "all_kernels" in source]
    alone = [source for source in compiled_files(new_cache) if "kernel_py" in source and source not in shared]
    assert shared and not alone
    assert max(source.count('extern "C"') for source in shared) > 2


@pytest.mark.slow
def test_a_file_that_does_not_build_costs_its_kernels_a_file_each(
    new_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_files, "_LISTED", "on purpose;")
    with pytest.warns(UserWarning, match="in one file failed .*Each is compiled in its own file"):
        actual = results(compiled(program, "inductor", strict=False))
    torch.testing.assert_close(actual, results(program))
    assert kernel_files._fails
    monkeypatch.setattr(kernel_files, "_fails", False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="on purpose"):
        results(compiled(program, "inductor"))
    assert not any("all_kernels" in source for source in compiled_files(new_cache) if "on purpose" not in source)


def test_graphs_of_other_backends_are_left_alone(new_cache: Path) -> None:
    """Also while another thread compiles for this backend."""
    with kernel_files.gathering():
        torch.testing.assert_close(results(torch.compile(program)), results(program))
    assert not any("all_kernels" in source for source in compiled_files(new_cache))
