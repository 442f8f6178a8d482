"""What Inductor does for a program, it does as often where our passes have rewritten the program.

Each program reads its batch in every layer, so the passes have something to do. It is compiled by stock Inductor, with
the flags that let it capture the reads, and by the backend; Inductor's counters or its code have to agree where the
passes have no part in it, and results with eager mode. The list is that of docs/composition.md.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

import fxpasses.inspect
from fxpasses import fastpack_backend
from tests.support import reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

LENGTHS = torch.tensor([3, 5, 8])


@dataclass
class Outcome:
    """What a compiler made of a program: its code, Inductor's counters, results and gradients."""

    code: str
    counts: dict[str, int]
    results: list[Tensor]

    def count(self, pattern: str) -> int:
        return len(re.findall(pattern, self.code))


def outcome(program: Any, inputs: Sequence[Any], compiler: Callable[[Any], Any], backward: bool = True) -> Outcome:
    torch._dynamo.reset()
    counters.clear()
    program, inputs = copy.deepcopy(program), copy.deepcopy(list(inputs))

    def step() -> Tensor:
        out = compiler(program)(*inputs)
        if backward:
            out.square().mean().backward()
        return out

    with torch._inductor.config.patch(force_disable_caches=True):
        out, codes = run_and_get_code(step)
    gradients = [p.grad for p in program.parameters() if p.grad is not None] if isinstance(program, nn.Module) else []
    return Outcome("\n".join(codes), dict(counters["inductor"]), [out.detach(), *gradients])


def stock(program: Any, **options: Any) -> Any:
    return torch.compile(program, options=options or None)


def ours(program: Any, **options: Any) -> Any:
    given = {"fastpack.strict": True, **options}
    return torch.compile(program, backend=functools.partial(fastpack_backend, options=given))


def both(
    program: Any, inputs: Sequence[Any], backward: bool = True, tolerance: float = 1e-4, **options: Any
) -> tuple[Outcome, Outcome]:
    """What stock Inductor and the backend make of it, checked against eager mode; the passes must have acted."""
    expected = outcome(program, inputs, lambda eager: eager, backward)
    theirs = outcome(program, inputs, functools.partial(stock, **options), backward)
    with fxpasses.inspect.record() as record:
        mine = outcome(program, inputs, functools.partial(ours, **options), backward)
    assert sum(len(report.changes) for report in reports_of(record)) > 0
    for found in (theirs, mine):
        torch.testing.assert_close(found.results, expected.results, rtol=tolerance, atol=tolerance)
    return theirs, mine


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) / lengths.max().item()
        return x


class Linears(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x)) / lengths.max().item()
        return x


@pytest.mark.slow
def test_convolutions_keep_channels_last() -> None:
    theirs, mine = both(Convolutions(), (torch.randn(2, 8, 6, 6), LENGTHS))
    strides = r"\(288, 1, 48, 8\)"  # of [2, 8, 6, 6] with channels last
    assert theirs.count(rf"assert_size_stride\(\w+, \(2, 8, 6, 6\), {strides}") > 2
    for pattern in (rf"assert_size_stride\(\w+, \(2, 8, 6, 6\), {strides}", r"extern_kernels\.convolution\("):
        assert mine.count(pattern) == theirs.count(pattern)


@pytest.mark.slow
def test_a_bias_gradient_is_fused_with_the_gradient_of_the_activation() -> None:
    theirs, mine = both(Linears(), (torch.randn(16, 32), LENGTHS))
    fused = r"def cpp_fused\w*gelu_backward\w*sum|cpp_fused\w*gelu_backward\w*sum\w* = async_compile"
    assert mine.count(fused) == theirs.count(fused)  # none, where the sums of several threads are split
    assert mine.count("gelu_backward") == theirs.count("gelu_backward") > 0
    for product in (r"extern_kernels\.mm\(", r"extern_kernels\.addmm\("):
        assert mine.count(product) == theirs.count(product)


@pytest.mark.slow
def test_max_autotune_has_templates_with_epilogues() -> None:
    """The bias, the activation and the division by the batch's number are in the product's own loop."""
    options = {"max_autotune": True, "max_autotune_gemm_backends": "CPP"}
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):  # the template needs constant weights
        theirs, mine = both(Linears(64).eval(), (torch.randn(64, 64), LENGTHS), backward=False, **options)
    for name in ("select_algorithm_num_precompiles", "cpp_templated_kernel_counter", "cpp_epilogue_fusion_counter"):
        assert mine.counts.get(name, 0) == theirs.counts.get(name, 0)
    assert theirs.counts.get("cpp_templated_kernel_counter", 0) > 0


@pytest.mark.slow
def test_the_mode_max_autotune_no_cudagraphs_is_inductors() -> None:
    program, inputs = Linears(), (torch.randn(16, 32), LENGTHS)
    theirs = outcome(program, inputs, lambda model: torch.compile(model, mode="max-autotune-no-cudagraphs"))
    mine = outcome(program, inputs, functools.partial(ours, **{"fastpack.mode": "max-autotune-no-cudagraphs"}))
    torch.testing.assert_close(mine.results, theirs.results, rtol=1e-4, atol=1e-4)
    for name in ("select_algorithm_num_precompiles", "select_algorithm_autotune", "cpp_templated_kernel_counter"):
        assert mine.counts.get(name, 0) == theirs.counts.get(name, 0)
    for pattern in (r"extern_kernels\.(?:add)?mm\(", r"cpp_CppMicroGemm|cpp_gemm"):
        assert mine.count(pattern) == theirs.count(pattern)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "x"),
    [(Convolutions().eval(), torch.randn(2, 8, 6, 6)), (Linears().eval(), torch.randn(16, 32))],
    ids=["convolutions", "linears"],
)
def test_freezing_for_evaluation(program: nn.Module, x: Tensor) -> None:
    with torch.no_grad(), torch._inductor.config.patch(freezing=True):  # Dynamo asks for the process's setting
        theirs, mine = both(program, (x, LENGTHS), backward=False)
    frozen = [name for name in theirs.counts if "mkldnn" in name or "binary_folding" in name]
    assert frozen and {name: mine.counts.get(name) for name in frozen} == {name: theirs.counts[name] for name in frozen}
    assert mine.count("_frozen_param") == theirs.count("_frozen_param") > 0


class Narrow(nn.Module):
    """Linears whose products are of float8, with a scale for each operand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(32, 32).to(torch.float8_e4m3fn))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for _ in range(2):
            narrow = (x / lengths.max().item()).to(torch.float8_e4m3fn)
            product = torch._scaled_mm(narrow, self.weight.t(), self.scale.detach(), self.scale.detach())
            x = product.float() * self.scale
        return x


@pytest.mark.slow
def test_products_of_float8() -> None:
    with torch.no_grad():  # autograd has no formula for it; a library's own function calls it in backward as well
        theirs, mine = both(Narrow(), (torch.randn(16, 32), LENGTHS), backward=False, tolerance=1e-3)
    assert mine.count(r"_scaled_mm") == theirs.count(r"_scaled_mm") > 0


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
@pytest.mark.parametrize("kind", ["int8 weights", "int8 weights and activations", "int8 in training"])
def test_linears_of_torchao(kind: str) -> None:
    from torchao import quantization

    model = Linears(64)
    if kind == "int8 weights":
        quantization.quantize_(model, quantization.Int8WeightOnlyConfig())
    elif kind == "int8 weights and activations":
        quantization.quantize_(model, quantization.Int8DynamicActivationInt8WeightConfig())
    else:
        from torchao.prototype.quantized_training import int8_weight_only_quantized_training

        quantization.quantize_(model, int8_weight_only_quantized_training())
    training = kind == "int8 in training"
    with torch.set_grad_enabled(training):
        theirs, mine = both(model, (torch.randn(16, 64), LENGTHS), backward=training, tolerance=1e-3)
    products = r"extern_kernels\.\w*mm\w*\(|torch\.ops\.\w+\.\w*mm\w*"
    assert mine.count(products) == theirs.count(products) > 0


@pytest.mark.slow
def test_a_compiled_optimizer_is_one_fused_program() -> None:
    def trained(compiler: Callable[[Any], Any]) -> tuple[list[Tensor], list[str]]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Linears()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        forward, step = compiler(model), compiler(optimizer.step)
        codes: list[str] = []
        for seed in range(3):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))
            forward(x, LENGTHS).square().mean().backward()
            with torch._inductor.config.patch(force_disable_caches=True):
                codes += run_and_get_code(step)[1]
            optimizer.zero_grad()
        return [parameter.detach() for parameter in model.parameters()], codes

    expected, _ = trained(lambda program: program)
    theirs, their_code = trained(stock)
    mine, my_code = trained(ours)
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    kernels = r"(\w+) = async_compile"
    assert len(re.findall(kernels, "".join(my_code))) == len(re.findall(kernels, "".join(their_code))) > 0


@pytest.fixture
def one_rank_of_two() -> Iterator[None]:
    """A group whose collectives do nothing: what is compiled counts, and not what arrives."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


class Sharded(nn.Module):
    """Each layer gathers its weight, as a sharded data-parallel model does."""

    def __init__(self) -> None:
        super().__init__()
        self.shards = nn.ParameterList(torch.randn(16, 32) / 8 for _ in range(3))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        functional = torch.distributed._functional_collectives
        for shard in self.shards:
            weight = functional.all_gather_tensor(shard, 0, dist.group.WORLD)
            x = torch.tanh(x @ weight) / lengths.max().item()
        return x


@pytest.mark.slow
@pytest.mark.usefixtures("one_rank_of_two")
@pytest.mark.parametrize(
    "options",
    [
        {"reorder_for_compute_comm_overlap": True},
        {"bucket_all_gathers_fx": "all"},
        {"reorder_for_compute_comm_overlap": True, "bucket_all_gathers_fx": "all"},
    ],
    ids=["reordering", "bucketing", "both"],
)
def test_collectives_are_reordered_and_bucketed(options: dict[str, Any]) -> None:
    def order(found: Outcome) -> list[str]:
        named = r"all_gather_into_tensor\w*|wait_tensor|extern_kernels\.mm"
        calls = (line for line in found.code.splitlines() if not line.lstrip().startswith("#"))
        return [
            match for line in calls if "=" in line or "(" in line for match in re.findall(named + r"(?=[.\w]*\()", line)
        ]

    program, inputs = Sharded(), (torch.randn(4, 32), LENGTHS)
    with torch.no_grad():
        theirs = outcome(program, inputs, functools.partial(stock, **options), backward=False)
        mine = outcome(program, inputs, functools.partial(ours, **options), backward=False)
    assert order(mine) == order(theirs)
    gathers = theirs.count(r"torch\.ops\._c10d_functional\.all_gather_into_tensor\w*\.default\(")
    assert gathers == (1 if "bucket_all_gathers_fx" in options else 3)
