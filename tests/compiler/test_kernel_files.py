"""Kernels of a graph share C++ files, with Inductor's results; what cannot share has a file of its own."""

from __future__ import annotations

import warnings
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
    ("count", "threads", "files"), [(1, 8, 1), (16, 8, 1), (20, 8, 2), (20, 1, 1), (60, 3, 3), (70, 1, 2)]
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


def test_a_large_kernel_is_worth_a_file_and_files_take_as_long() -> None:
    small = [kernel() for _ in range(8)]
    large = [kernel(SOURCE.replace("    {\n", "    {\n" + "// long\n" * 3000)) for _ in range(3)]
    files = list(kernel_files._files([*small, *large], 3))  # type: ignore[list-item]
    assert sorted(len(file) for file in files) == [3, 4, 4]
    assert all(sum(one in large for one in file) == 1 for file in files)


def test_a_call_with_other_arguments_is_left_to_inductor() -> None:
    class Compiler:
        def cpp_pybinding(self, argtypes: Any, source_code: str, device: str = "") -> Any:
            return argtypes, source_code, device

    gather = kernel_files._gather(Compiler.cpp_pybinding)
    with kernel_files.sharing_files(strict=False):
        assert gather(Compiler(), ["float*"], SOURCE, device="cpu") == (["float*"], SOURCE, "cpu")
        assert type(gather(Compiler(), ["float*"], SOURCE)) is kernel_files.Kernel


@pytest.mark.slow
def test_a_compiler_that_fails_is_not_blamed_on_shared_files(new_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(*arguments: Any, **named: Any) -> Any:
        raise RuntimeError("no compiler")

    def another(x: Tensor, w: Tensor, number: int) -> Tensor:  # which no earlier test has compiled
        return program(x, w, number + 5)

    monkeypatch.setattr("torch._inductor.cpp_builder.CppBuilder.build", build)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        actual = results(compiled(another, "inductor", strict=False))
    torch.testing.assert_close(actual, results(another))
    texts = [str(each.message) for each in warned]
    assert any("no compiler" in text for text in texts) and not any("in one file" in text for text in texts)
    assert not kernel_files._fails
