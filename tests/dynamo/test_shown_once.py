"""`warnings.warn` in a program: shown once and no graph break, or left to Dynamo."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import assert_same, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

X = torch.linspace(-1, 2, 8).requires_grad_()


def helper(x: Tensor, level: int) -> Tensor:
    warnings.warn(f"use other ({level})", FutureWarning, stacklevel=level)
    return x.sin()


def program(x: Tensor, level: int = 1) -> Tensor:
    return helper(x * 2, level) + x


def told(action: str, level: int, batches: int = 2) -> tuple[list[warnings.WarningMessage], int]:
    """The program's warnings under a filter, of eager mode's calls and the compiled ones, and the number of graphs."""
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)  # type: ignore[arg-type]
        record = assert_same(lambda x: program(x, level), [(X,)] * batches, "aot_eager")
    found = [each for each in caught if each.category is FutureWarning]
    return found, len([graph for graph in record.graphs if graph.outcome != "retraced"])


@pytest.mark.parametrize("level", [1, 2])
def test_shown_once_for_its_place(level: int) -> None:
    found, graphs = told("default", level)
    assert graphs == 1
    lines = {1: helper.__code__.co_firstlineno + 1, 2: program.__code__.co_firstlineno + 1}
    assert {(each.filename, each.lineno) for each in found} == {(__file__, lines[level])}


def test_the_compiled_program_shows_it() -> None:
    globals().pop("__warningregistry__", None)
    torch._dynamo.reset()
    compiled = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "eager"}, fullgraph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        compiled(X)
        compiled(X)
    assert [(each.filename, str(each.message)) for each in caught] == [(__file__, "use other (1)")]


def test_all_calls_are_shown_if_a_filter_says_so() -> None:
    found, graphs = told("always", 1)
    assert len(found) == 4 and graphs > 1


def test_an_error_is_an_error() -> None:
    compiled = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "eager"})
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        for call in (program, compiled):
            with pytest.raises(FutureWarning, match="use other"):
                call(X)


def counts_its_warnings(x: Tensor) -> Tensor:
    with warnings.catch_warnings(record=True) as caught:
        warnings.warn("use other", FutureWarning, stacklevel=1)
    return x * len(caught)


def test_a_program_that_catches_warnings_sees_them() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert_same(counts_its_warnings, [(X,)] * 2, "aot_eager")


def test_filters_of_python_itself_name_modules_by_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """`("default", None, DeprecationWarning, "__main__", 0)`; an internal error of Dynamo before."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.resetwarnings()
        monkeypatch.setattr(warnings, "filters", [("ignore", None, FutureWarning, __name__, 0), *warnings.filters])
        record = assert_same(lambda x: program(x), [(X,)], "aot_eager")
    assert len(record.graphs) == 1 and not [each for each in caught if each.category is FutureWarning]


class Warns(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return helper(x, 3)


def test_the_caller_of_a_module_is_a_place_in_torch() -> None:
    """Its frames are not traced, so the graph breaks, and the place is eager mode's."""
    globals().pop("__warningregistry__", None)
    inner = Warns()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert_same(lambda x: inner(x) + inner(x * 2), [(X,)], "aot_eager")
    assert {each.filename for each in caught if each.category is FutureWarning} == {torch.nn.modules.module.__file__}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        warnings.warn("in backward", FutureWarning, stacklevel=1)
        return grad * 2


def of_experts(x: Tensor, idx: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(3):
        tok = torch.where(idx == e)[0]
        if tok.numel() == 0:
            continue
        warnings.warn("an expert has tokens", FutureWarning, stacklevel=1)
        out.index_add_(0, tok, x[tok].tanh())
    return out


def shown(call: Callable[[], Any]) -> list[str]:
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call()
    return [str(each.message) for each in caught if each.category is FutureWarning]


def test_a_backward_function_warns_when_it_runs() -> None:
    program = compiled(lambda x: Doubled.apply(x).sin(), "aot_eager")
    outputs: list[Tensor] = []
    assert shown(lambda: outputs.append(program(X))) == []
    assert shown(lambda: outputs[0].sum().backward()) == ["in backward"]


def test_an_expert_without_tokens_does_not_warn() -> None:
    """Speculation traces its branch all the same."""
    program = compiled(of_experts, "aot_eager", experts="auto")
    idx = torch.arange(8) % 2
    assert shown(lambda: program(X, idx + 9)) == []
    assert shown(lambda: program(X, idx)) == ["an expert has tokens"]
