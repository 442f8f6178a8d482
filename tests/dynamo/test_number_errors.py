"""Operations on numbers of the batch that fail for some batches: caught, raised and computed as in eager mode."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import assert_same, compiled, results

pytestmark = pytest.mark.usefixtures("capture_flags")

W = torch.linspace(-1, 1, 16).view(4, 4)


def batch(*lengths: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-1, 1, 4 * sum(lengths)).view(-1, 4)
    return x.requires_grad_(), torch.tensor(lengths)


BATCHES = [batch(3, 2), batch(1, 1), batch(2, 2), batch(3, 1, 4), batch(1), batch(5), batch(3, 2)]


def quotient(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = lengths.sum().item() / (lengths > 2).sum().item()
    except ZeroDivisionError:
        scale = 0.0
    return x @ W * scale


def suppressed(x: Tensor, lengths: Tensor) -> Tensor:
    scale = 0.0
    with contextlib.suppress(ZeroDivisionError):
        scale = lengths.sum().item() / (lengths > 2).sum().item()
    return x @ W * scale


def quotient_of_activations(x: Tensor, lengths: Tensor) -> Tensor:
    h = x @ W
    try:
        scale = 1 / (h[:, 0] > 9).sum().item()
    except ZeroDivisionError:
        scale = 0.5
    return h * scale


def read_before(x: Tensor, lengths: Tensor) -> Tensor:
    n = lengths.max().item()
    try:
        scale = 20 // (n - 3)
    except ZeroDivisionError:
        scale = 7
    return x @ W * scale


def helper(n: int) -> float:
    return 20 / (n - 3)


def in_a_callee(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = helper(lengths.max().item())
    except ZeroDivisionError:
        scale = 7
    return x @ W * scale


def catching(lengths: Tensor) -> float:
    try:
        return 20 / (lengths.max().item() - 3)
    except ZeroDivisionError:
        return 7.0


def by_a_callee(x: Tensor, lengths: Tensor) -> Tensor:
    return x @ W * catching(lengths)


def root(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = math.sqrt(lengths.min().item() - 2)
    except ValueError:
        scale = 5.0
    return x @ W * scale


def power(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = (lengths.min().item() - 1) ** -1
    except ZeroDivisionError:
        scale = 5.0
    return x @ W * scale


def integer_of_nan(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = int(lengths[lengths > 2].float().mean().item())
    except ValueError:
        scale = 7
    return x @ W * scale


def row(x: Tensor, lengths: Tensor) -> Tensor:
    n, h = lengths.max().item(), x @ W
    try:
        return h[n]
    except IndexError:
        return h.sum(0)


def rows(x: Tensor, lengths: Tensor) -> Tensor:
    h = x @ W
    try:
        return h[torch.arange(lengths.max()) + 1].sum(0)
    except IndexError:
        return h[0]


def largest_of_none(x: Tensor, lengths: Tensor) -> Tensor:
    try:
        scale = lengths[lengths > 2].max().item()
    except RuntimeError:
        scale = 1
    return x @ W * scale


def asserted(x: Tensor, lengths: Tensor) -> Tensor:
    n, h = lengths.max().item(), x @ W
    try:
        assert n <= 3
    except AssertionError:
        h = h * 2
    return h


def checked(x: Tensor, lengths: Tensor) -> Tensor:
    h = x @ W
    try:
        torch._check(lengths.max().item() < 4, lambda: "too long")
    except RuntimeError:
        h = h * 2
    return h


class Quiet:
    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is ZeroDivisionError


@contextlib.contextmanager
def quiet() -> Iterator[float]:
    try:
        yield 0.5
    except ZeroDivisionError:
        return


@contextlib.contextmanager
def quiet_inside() -> Iterator[None]:
    with contextlib.suppress(ZeroDivisionError):
        yield


def by_an_exit(x: Tensor, lengths: Tensor) -> Tensor:
    scale = 0.5
    with Quiet():
        scale = 1 / (lengths > 2).sum().item()
    return x @ W * scale


def by_a_generator(x: Tensor, lengths: Tensor) -> Tensor:
    with quiet() as scale:
        scale = 1 / (lengths > 2).sum().item()
    with quiet_inside():
        scale += 1 / (lengths > 1).sum().item()
    return x @ W * scale


def by_a_stack(x: Tensor, lengths: Tensor) -> Tensor:
    scale = 0.5
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.suppress(ZeroDivisionError))
        scale = 1 / (lengths > 2).sum().item()
    return x @ W * scale


def most_of_none(x: Tensor, lengths: Tensor) -> Tensor:
    found = lengths[lengths > 2]
    torch._dynamo.graph_break()
    try:
        return x @ W * max(found.tolist())
    except ValueError:
        return x @ W


CAUGHT: list[Callable[..., Tensor]] = [
    quotient, suppressed, quotient_of_activations, read_before, in_a_callee, by_a_callee, root, power, integer_of_nan,
    row, rows, largest_of_none, asserted, checked, by_an_exit, by_a_generator, by_a_stack, most_of_none,
]  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("program", CAUGHT)
def test_the_program_catches_its_errors(program: Any) -> None:
    step = compiled(program, "aot_eager")
    for given in BATCHES:
        torch.testing.assert_close(results(step, given), results(program, given))


def undefined(x: Tensor, lengths: Tensor) -> Tensor:
    return x @ W * math.sqrt(lengths.min().item() - 2) + math.acos(lengths.min().item() / 4)


def test_an_error_that_nobody_catches_is_eager_modes() -> None:
    """Before, NaN."""
    step = compiled(undefined, "aot_eager")
    for given in BATCHES:
        try:
            expected = undefined(*given)
        except ValueError:
            with pytest.raises(ValueError, match="math domain error"):
                step(*given)
        else:
            torch.testing.assert_close(step(*given), expected)


def test_what_is_not_a_number_is_not_equal_to_itself() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        mean = lengths[lengths > 2].float().mean().item()
        return x @ W * 2 if mean != mean else x @ W * mean

    step = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "aot_eager"})
    for given in BATCHES:
        torch.testing.assert_close(results(step, given), results(program, given))


def test_finally_catches_nothing() -> None:
    """As transformers' decorators restore a configuration behind the forward pass: one graph, slices included."""

    def decorated(x: Tensor, lengths: Tensor) -> Tensor:
        n, least, h = lengths.max().item(), lengths.min().item(), x @ W
        try:
            y = h[least - 1 : n] * (lengths.sum().item() / n)
        finally:
            h = h * 2
        return y.sum(0) + h

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return decorated(x, lengths) * 2

    record = assert_same(program, BATCHES, "aot_eager", tolerance=1e-5)
    assert all("program" in graph.function for graph in record.graphs)


def test_a_gradient_behind_a_read() -> None:
    """autograd takes two results of one graph for independent of each other; the read makes two graphs of it."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        h, n = x @ W, lengths.max().item()
        y = (h**2).sum() * n
        (gradient,) = torch.autograd.grad(y, h, retain_graph=True)
        return y + gradient.sum() + h.sum()

    step = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "aot_eager"})
    for given in BATCHES[:3]:
        torch.testing.assert_close(results(step, given), results(program, given))


def test_inductor_gets_no_integers_of_floats() -> None:
    """Before, a NameError from `.backward()`, in each batch: "name 'zuf0' is not defined"."""

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return (x @ W)[: int(lengths.float().mean().item())] * math.floor(lengths.float().mean().item())

    step = torch.compile(program, backend="fastpack")
    for given in BATCHES[:2]:
        torch.testing.assert_close(results(step, given), results(program, given))


def test_one_warning_for_a_function_whose_variants_fail_alike() -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return x @ W * float(lengths.max().item() % 7)  # which PyTorch's pass over floats does not compile

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = torch.compile(program, backend="fastpack", options={"fastpack.lowering": "aot_eager"})
        for given in BATCHES:
            torch.testing.assert_close(results(step, given), results(program, given))
    said = [str(warning.message).partition("(")[0] for warning in caught if "fxpasses:" in str(warning.message)]
    assert len(said) == len(set(said))
