"""Kernels of a graph share C++ files, with Inductor's results; what cannot share has a file of its own."""

from __future__ import annotations

import contextlib
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from fxpasses.compiler import kernel_files, kernel_libraries, lowering_backward
from fxpasses.compiler.kernel_libraries import Source
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


def kernel(code: str = SOURCE) -> Source | None:
    return Source.of(["const float*", "float*"], code)


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
    ("count", "threads", "libraries"), [(1, 8, 1), (16, 8, 1), (20, 8, 2), (20, 1, 1), (60, 3, 3), (70, 1, 2)]
)
def test_there_are_as_many_libraries_as_are_worth_it(count: int, threads: int, libraries: int) -> None:
    kernels = [kernel(SOURCE.replace("x0<3", f"x0<{number}")) for number in range(100, 100 + count)]
    found = list(kernel_libraries._groups(kernels, threads))  # type: ignore[arg-type]
    assert len(found) == libraries
    assert {one for group in found for one in group} == set(kernels)


def program(x: Tensor, w: Tensor, number: int) -> Tensor:
    """Several kernels, forward and backward: of float64, integers, and a dynamic size; and products between."""
    rows = (x.softmax(-1) + torch.arange(x.shape[0])[:, None] % 3 * number) @ w
    counted = torch.where(rows.sum(-1) > 0, 1, 0).cumsum(0)
    return (torch.layer_norm(rows, (w.shape[1],)) * counted[:, None]) @ w.sin()


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7 + seed, 16, dtype=torch.float64, generator=generator).requires_grad_()
    return x, torch.randn(16, 16, dtype=torch.float64, generator=generator).requires_grad_(), 2


def results(of: Any, seed: int = 0) -> list[Tensor]:
    x, w, number = inputs(seed)
    result = of(x, w, number)
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
    monkeypatch.setattr(kernel_libraries, "_LISTED", "on purpose;")
    with pytest.warns(UserWarning, match="in one file failed .*Each is compiled in its own file"):
        actual = results(compiled(program, "inductor", strict=False))
    torch.testing.assert_close(actual, results(program))
    assert kernel_files._fails
    monkeypatch.setattr(kernel_files, "_fails", False)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="on purpose"):
        results(compiled(program, "inductor"))
    assert not any("all_kernels" in source for source in compiled_files(new_cache) if "on purpose" not in source)


@pytest.mark.slow
def test_graphs_of_other_backends_are_left_alone(new_cache: Path) -> None:
    """Also while another thread compiles for this backend."""
    with kernel_files.gathering():
        torch.testing.assert_close(results(torch.compile(program)), results(program))
    assert not any("all_kernels" in source for source in compiled_files(new_cache))


def test_a_large_kernel_is_worth_a_library_and_libraries_take_as_long() -> None:
    def long(lines: int) -> Source | None:
        return kernel(SOURCE.replace("    {\n", "    {\n" + "// long\n" * lines))

    small, large = [long(lines) for lines in range(8)], [long(lines) for lines in range(3000, 3003)]
    groups = list(kernel_libraries._groups([*small, *large], 3))  # type: ignore[list-item]
    assert sorted(len(group) for group in groups) == [3, 4, 4]
    assert all(sum(one in large for one in group) == 1 for group in groups)


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


class Layers(torch.nn.Module):
    """Layers that are compiled once, what is before, and what is after: three pieces."""

    def __init__(self, size: int = 24) -> None:
        super().__init__()
        layers = [torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.GELU()) for _ in range(5)]
        self.layers, self.head = torch.nn.ModuleList(layers), torch.nn.Linear(size, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = x.sin() * x.exp()
        for layer in self.layers:
            h = h + layer(h).tanh()
        return self.head(h).softmax(-1).square()


def steps(of: Any, model: torch.nn.Module, count: int = 2) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 24, generator=generator).requires_grad_()
    found: list[Any] = []
    for _ in range(count):
        loss = of(x).sum()
        found += [loss.detach(), *torch.autograd.grad(loss, [x, *model.parameters()])]
    return found


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The libraries of several kernels that are built."""
    from torch._inductor.cpp_builder import CppBuilder

    found: list[str] = []
    build = CppBuilder.build

    def noted(self: Any, *arguments: Any, **named: Any) -> Any:
        found.append(self._target_file)
        return build(self, *arguments, **named)

    monkeypatch.setattr(CppBuilder, "build", noted)
    return found


def libraries(built: list[str]) -> list[str]:
    return [path for path in built if path.endswith(".main.so")]


def another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget what was compiled, as far as it is not in files."""
    torch._dynamo.reset()
    torch._inductor.codecache.PyCodeCache.cache_clear()
    monkeypatch.setattr(kernel_libraries, "_opened", {})


@pytest.mark.slow
def test_pieces_share_a_library_for_forward_and_one_for_backward(
    new_cache: Path, monkeypatch: pytest.MonkeyPatch, built: list[str]
) -> None:
    model = Layers()
    expected = steps(model, model)
    with inductor_config.patch(compile_threads=1):
        torch.testing.assert_close(steps(compiled(model, "inductor", fold="on"), model), expected)
        together = lowering_backward._SPEC is not None  # torch 2.11 compiles each backward when it is first needed
        assert len(libraries(built)) == (2 if together else 4)
        kernels = [set(re.findall(r"kernel_[0-9]+(?=\()", source)) for source in compiled_files(new_cache)]
        assert max(map(len, kernels)) > 2
        built.clear()
        another_process(monkeypatch)  # with its caches: forward and backward are loaded one after the other
        torch.testing.assert_close(steps(compiled(model, "inductor", fold="on"), model), expected)
        assert not built
        for library in new_cache.glob("**/*.main.so"):
            library.unlink()
        another_process(monkeypatch)  # the notes are there, and the libraries are not
        torch.testing.assert_close(steps(compiled(model, "inductor", fold="on"), model), expected)
        assert libraries(built)


@pytest.mark.parametrize("text", ["", "of nothing", "../../etc/passwd 0", "missing.so 0"])
def test_a_damaged_note_is_no_note(text: str, new_cache: Path) -> None:
    source = kernel()
    assert source is not None
    note = kernel_libraries._Notes()._path(source)
    note.parent.mkdir(parents=True)
    note.write_text(text)
    x, y = torch.randn(3), torch.zeros(3)
    kernel_libraries.load([source], 1, None)[source](x, y)
    assert torch.equal(x, y)
    assert note.read_text() != text


@pytest.mark.slow
def test_what_is_after_a_failed_piece_is_loaded_again(new_cache: Path) -> None:
    """The modules of the pieces before have kernels that wait for a library that is never built."""
    ours = compiled(program, "inductor")
    with contextlib.suppress(ZeroDivisionError), kernel_files.loading_at_the_end():
        ours(*inputs())
        raise ZeroDivisionError
    torch._dynamo.reset()
    torch.testing.assert_close(results(compiled(program, "inductor")), results(program))


def test_a_kernel_that_is_called_too_early_is_compiled_alone(new_cache: Path) -> None:
    with kernel_files.loading_at_the_end():
        torch.testing.assert_close(results(compiled(program, "inductor")), results(program))


class Both(Layers):
    """Returns the last layer's result as well, so that a backward may begin with the layers."""

    def forward(self, x: Tensor) -> Any:
        h = x.sin() * x.exp()
        for layer in self.layers:
            h = h + layer(h).tanh()
        return h, self.head(h.sin()).softmax(-1).square()


@pytest.mark.slow
def test_what_was_compiled_for_one_backward_is_not_used_for_two(new_cache: Path) -> None:
    """Such code writes into saved tensors."""
    model = Both()

    def gradients(of: Any) -> list[Any]:
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(1)).requires_grad_()
        found = [torch.autograd.grad(of(x)[1].sum(), [model.head.weight])]  # compiles the layers' with the head's
        loss = of(x)[0].sum()
        return found + [torch.autograd.grad(loss, [x], retain_graph=keeps) for keeps in (True, True, False)]

    torch.testing.assert_close(gradients(compiled(model, "inductor", fold="on")), gradients(model))


@pytest.mark.slow
def test_a_backward_whose_compilation_was_interrupted_is_compiled_later(
    new_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Any, *arguments: Any, **named: Any) -> Any:
        raise KeyboardInterrupt

    model = Layers()
    ours = compiled(model, "inductor", fold="on")
    with inductor_config.patch(compile_threads=1):
        loss = ours(torch.randn(6, 24).requires_grad_()).sum()
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr("torch._inductor.cpp_builder.CppBuilder.build", interrupted)
            loss.backward()
        torch.testing.assert_close(steps(ours, model), steps(model, model))


@pytest.mark.slow
def test_threads_may_need_one_backward_at_a_time(new_cache: Path) -> None:
    model = Layers()
    ours = compiled(model, "inductor", fold="on")
    xs = [torch.randn(6, 24, generator=torch.Generator().manual_seed(seed)).requires_grad_() for seed in range(3)]
    losses = [ours(x).sum() for x in xs]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda each: torch.autograd.grad(*each), zip(losses, xs, strict=True)))
    torch.testing.assert_close(found, [torch.autograd.grad(model(x).sum(), x) for x in xs])
