"""Programs whose layers look equal, or whose pieces are not independent: numbers stay those of eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils import _pytree as pytree

import fxpasses.inspect
from fxpasses.fold.fold_layers import FoldLayers
from fxpasses.graph.symbols import sizes_of
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes
from fxpasses.report import Reason, Report
from tests.fold.programs import WIDTH, Block
from tests.support import captured, compiled, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

Program = Callable[["Layers", Tensor], Any]


class Layers(nn.Module):
    def __init__(self, program: Program, layer: Callable[[], nn.Module] = Block, number: int = 4) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(layer() for _ in range(number)), nn.Linear(WIDTH, WIDTH)
        self.program = program

    def forward(self, x: Tensor) -> Any:
        return self.program(self, x)


def step(model: nn.Module, program: Callable[[Tensor], Any]) -> dict[str, Any]:
    """Results, which of them have gradients, and the gradients, None where there are none."""
    model.zero_grad()
    torch.manual_seed(0)
    results = [
        leaf
        for leaf in pytree.tree_leaves(program(torch.randn(3, WIDTH, requires_grad=True)))
        if isinstance(leaf, Tensor)
    ]
    differentiable = [result for result in results if result.requires_grad]
    if differentiable:
        torch.stack([result.float().square().sum() for result in differentiable]).sum().backward()
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    without = [name for name, grad in grads.items() if grad is None]
    return {
        "results": [result.detach() for result in results],
        "grads": {name: grad for name, grad in grads.items() if grad is not None},
        "flags": ([result.requires_grad for result in results], [str(r.dtype) for r in results], without),
    }


def assert_same(model: nn.Module, around: Callable[[Any, Tensor], Any] = lambda program, x: program(x)) -> Report:
    """Two steps against eager mode, bit for bit; returns the pass's report on the first graph."""
    twin = copy.deepcopy(model)
    with fxpasses.inspect.record() as record:
        program = compiled(model, "aot_eager", fold="on")
        for _ in range(2):
            expected, actual = step(twin, lambda x: around(twin, x)), step(model, lambda x: around(program, x))
            assert actual.pop("flags") == expected.pop("flags")
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    return reports_of(record, "fold_layers")[0]


def reasons(report: Report) -> set[Reason]:
    return {refusal.reason for refusal in report.refusals}


def in_turn(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x)
    return model.head(x)


# Modes


def autocast_in_each(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        with torch.autocast("cpu", torch.bfloat16):
            x = layer(x)
    return model.head(x)


class NormInFloat(Block):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = F.layer_norm(x.float(), (WIDTH,))
        return x + self.down(F.gelu(self.up(y)))


def test_the_examination_of_a_graph_leaves_autocast_as_it_was():
    """Also for what is compiled after it: the head is not in the layers' region."""
    assert assert_same(Layers(autocast_in_each)).figures["layers"] == 4
    assert not torch.is_autocast_enabled("cpu")


def test_autocast_off_in_a_layer_under_autocast_around_the_program():
    def around(program: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return program(x)

    report = assert_same(Layers(in_turn, NormInFloat), around)
    assert report.figures["layers"] == 4


def vmap(model: Layers, x: Tensor) -> Tensor:
    def apply(row: Tensor) -> Tensor:
        for layer in model.layers:
            row = layer(row)
        return row

    return torch.func.vmap(apply)(x)


def test_a_function_transform_around_layers_is_a_mode():
    assert Reason.CHANGES_MODE in reasons(assert_same(Layers(vmap)))


def gradients_inside(model: Layers, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return in_turn(model, x)


def test_layers_with_gradients_in_a_program_without():
    def around(program: Any, x: Tensor) -> Any:
        with torch.no_grad():
            return program(x)

    assert reasons(assert_same(Layers(gradients_inside), around)) == {Reason.CHANGES_MODE}
    assert assert_same(Layers(in_turn), around).figures["layers"] == 3  # the first one's input has a gradient


def test_inference_mode():
    def around(program: Any, x: Tensor) -> Any:
        with torch.inference_mode():
            return program(x)

    assert assert_same(Layers(in_turn), around).figures["layers"] == 3


# Gradients


def detached_between(model: Layers, x: Tensor) -> Tensor:
    for layer in model.layers:
        x = layer(x.detach())
    return model.head(x)


class WithStatistics(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), (self.up.bias * 0).sqrt()


def statistics(model: Layers, x: Tensor) -> Any:
    kept = []
    for layer in model.layers:
        x, root = layer(x)
        kept.append(root)
    return model.head(x), [root.detach() + 1 for root in kept]


@pytest.mark.parametrize("model", [(detached_between,), (statistics, WithStatistics)], ids=["between", "statistics"])
def test_a_parameter_without_gradient_gets_none_and_not_zeros(model):
    assert reasons(assert_same(Layers(*model))) == {Reason.NO_GRADIENT}


def last_statistic(model: Layers, x: Tensor) -> Tensor:
    for number, layer in enumerate(model.layers):
        x, root = layer(x)
        x = x + root[:WIDTH] if number == 4 else x
    return x


def test_a_result_of_one_layer_alone_is_no_result_of_the_others():
    """The gradient of a root at 0 is infinite: zeros as its result's gradient give NaN."""
    assert assert_same(Layers(last_statistic, WithStatistics, 5)).figures["layers"] == 4


def two_branches(model: Layers, x: Tensor) -> Any:
    for layer in model.layers:
        x = layer(x)
    return x, model.head(x.detach())


def test_a_branch_behind_a_detach():
    assert_same(Layers(two_branches))


# Values


def with_a_float(model: Layers, x: Tensor) -> Tensor:
    scale = x.detach().sum().item()
    for layer in model.layers:
        x = layer(x)
    return x * scale


def test_a_float_does_not_cross_the_layers():
    assert Reason.UNSUPPORTED_VALUE in reasons(assert_same(Layers(with_a_float)))


def test_ragged_sizes_are_not_known():
    ragged = torch.nested.nested_tensor_from_jagged(torch.ones(3, WIDTH), torch.tensor([0, 1, 3]))
    assert sizes_of(ragged) is None


def report_on(program: Any, *inputs: Any) -> Report:
    gm = captured(program, *inputs)
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    (report,) = run_passes([FoldLayers()], gm, examples, Options(fold="on", strict=True)).reports
    return report


def test_tensor_subclasses_are_equal_only_to_their_kind():
    def program(x: Tensor, weights: list[Tensor]) -> Tensor:
        for w in weights:
            x = torch.relu(x @ w)
        return x

    plain = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    wrapped = [TwoTensor(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)) for _ in range(2)]
    assert "×4" in report_on(program, torch.randn(3, WIDTH), plain + plain).changes[0]
    changes = report_on(program, torch.randn(3, WIDTH), [plain[0], wrapped[0], plain[1], wrapped[1]]).changes
    assert not any("×4" in change for change in changes)


@dataclass
class Settings:
    """Not hashable, as what torchao's tensors keep."""

    axis: int = 0


class Annotated(TwoTensor):
    settings = Settings()

    def __tensor_flatten__(self):
        return ["a", "b"], (None, {"settings": self.settings})

    @staticmethod
    def __tensor_unflatten__(inner_tensors, meta, outer_size, outer_stride):
        made = Annotated(inner_tensors["a"], inner_tensors["b"])
        made.settings = meta[1]["settings"]
        return made


def test_what_a_tensor_subclass_keeps_may_be_of_any_class():
    def program(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = torch.tanh(x @ weight)
        return x

    made = [Annotated(torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)) for _ in range(4)]
    assert "×3" in report_on(program, torch.randn(3, WIDTH), made).changes[0]  # the first takes a plain tensor
    made[2].settings, made[3].settings = Settings(1), Settings(2)
    assert not report_on(program, torch.randn(3, WIDTH), made).changes
