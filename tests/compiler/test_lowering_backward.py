"""Backward that does not compile falls back, as forward does; and an autograd graph may be kept."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.compile_fx as compile_fx
from torch import Tensor
from torch._inductor.utils import get_donated_idxs

from fxpasses.compiler.lowering_by_operator import forward_by_operator
from tests.support import assert_same, compiled, results, slices_to_the_longest


def trimmed(x: Tensor, lengths: Tensor) -> Tensor:
    return (x[:, : int(lengths.max())].exp().log() ** 2).sum()


def untrimmed(x: Tensor, lengths: Tensor) -> Tensor:
    return (x.exp().log() ** 2).sum()


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    return torch.arange(8.0).view(2, 4).requires_grad_(), torch.tensor(lengths)


def failing_in_backward(gm: Any, inputs: Any, **options: Any) -> Any:
    if options.get("is_backward"):
        raise RuntimeError("no code for this")
    return forward_by_operator(gm)


def overwriting(gm: Any, inputs: Any, **options: Any) -> Any:
    """Overwrites in backward what it may: the saved tensors that are "donated"."""
    run = forward_by_operator(gm)
    donated = get_donated_idxs() if options.get("is_backward") else None

    def call(arguments: list[Any]) -> Any:
        written = [arguments[position] for position in donated or []]
        gradients = run(arguments)
        for tensor in written:
            tensor.fill_(torch.nan)
        return gradients

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Replaces Inductor's compiler of one graph."""
    torch._dynamo.reset()
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield lambda compiler: monkeypatch.setattr(compile_fx, "compile_fx_inner", compiler)
    torch._dynamo.reset()


def warned(step: Any) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = step()
    return result, [str(warning.message) for warning in caught if "fxpasses" in str(warning.message)]


def test_a_backward_that_does_not_compile_with_forward_falls_back_as_a_forward_does(inductor: Any) -> None:
    inductor(failing_in_backward)
    program = compiled(trimmed, "inductor", strict=False)
    for lengths in ((3, 2), (4, 1)):
        found, _ = warned(lambda lengths=lengths: results(program, batch(*lengths)))
        torch.testing.assert_close(found, results(trimmed, batch(*lengths)))


def test_a_backward_that_does_not_compile_when_it_is_called_runs_uncompiled(inductor: Any) -> None:
    inductor(failing_in_backward)
    program = compiled(untrimmed, "inductor", strict=False)
    for expected_warnings in (1, 0):
        found, given = warned(lambda: results(program, batch(3, 2)))
        torch.testing.assert_close(found, results(untrimmed, batch(3, 2)))
        assert len(given) == expected_warnings, given


@pytest.mark.parametrize("program", [trimmed, untrimmed])
def test_under_strict_a_backward_that_does_not_compile_raises(inductor: Any, program: Any) -> None:
    inductor(failing_in_backward)
    with pytest.raises(Exception, match="no code for this"):
        results(compiled(program, "inductor"), batch(3, 2))


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_an_autograd_graph_may_be_kept_where_sizes_of_the_batch_are_captured(inductor: Any, lowering: str) -> None:
    inductor(overwriting)
    program = compiled(trimmed, lowering)
    for _ in range(2):
        x, lengths = batch(3, 2)
        loss = program(x, lengths)
        for passes, keep in enumerate((True, True, False), start=1):
            loss.backward(retain_graph=keep)
            expected = torch.where(torch.arange(4) < 3, 2 * x, 0) * passes
            torch.testing.assert_close(x.grad, expected)


def test_the_deviation_of_one_token_has_the_gradient_of_eager_mode() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x.sum() + x[:, : int(lengths.max())].std(1).nan_to_num().sum()

    assert_same(program, [batch(3, 2), batch(1, 1)], "aot_eager")


@slices_to_the_longest
def test_backward_asserts_nothing_of_sizes_that_it_is_not_given(capture_flags: None) -> None:
    """Before, "name 's27' is not defined" from `.backward()`, in the second batch."""
    linear = torch.nn.Linear(4, 5)

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : lengths.max().item()]
        i, j = torch.triu_indices(x.shape[1], x.shape[1], 1)
        return (x[:, i] - x[:, j]).pow(2).sum() + linear(x).sum()

    def batch(tokens: int, *lengths: int) -> tuple[Tensor, Tensor]:
        x = torch.linspace(-1, 1, 8 * tokens).view(2, tokens, 4)
        return x.requires_grad_(), torch.tensor(lengths)

    assert_same(program, [batch(9, 6, 4), batch(7, 7, 7)], "inductor", 1e-4)
