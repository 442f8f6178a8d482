"""The backend when something fails: the program goes on, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpasses.compiler.backend as backend
from fxpasses import fastpack_backend
from tests.support import assert_same, compiled, results


def program(x, lengths):
    return x * lengths.max().item() + lengths.max().item()


INPUTS = torch.randn(4), torch.tensor([1, 3])
OPTIONS = {"fastpack.lowering": "eager"}


def fail_for(monkeypatch, fails):
    stock = backend.lower

    def lower(gm, *arguments):
        if fails(gm):
            raise RuntimeError("no compiler")
        return stock(gm, *arguments)

    monkeypatch.setattr(backend, "lower", lower)


def is_rewritten(gm):
    return any(node.name.startswith("packed_") for node in gm.graph.nodes)


def test_a_rewritten_graph_that_does_not_compile_is_compiled_as_captured(monkeypatch):
    fail_for(monkeypatch, is_rewritten)
    with pytest.warns(UserWarning, match="as rewritten failed .*no compiler.*compiled as it was captured"):
        assert torch.equal(torch.compile(program, backend="fastpack", options=OPTIONS)(*INPUTS), program(*INPUTS))


def test_a_graph_that_does_not_compile_at_all_runs_uncompiled(monkeypatch):
    fail_for(monkeypatch, lambda gm: True)
    with pytest.warns(UserWarning, match="no compiler.*runs uncompiled"):
        compiled = torch.compile(program, backend="fastpack", options=OPTIONS)
        assert torch.equal(compiled(*INPUTS), program(*INPUTS))


def test_checkpoints_of_a_graph_that_runs_uncompiled_draw_the_random_numbers_of_forward_again():
    def dropped(x):
        return torch.nn.functional.dropout(torch.tanh(x), 0.5)

    def gradient(program):
        x = torch.linspace(-1, 1, 64).requires_grad_()
        torch.manual_seed(0)
        program(x).sum().backward()
        return x.grad

    def program(x):
        return checkpoint(dropped, checkpoint(dropped, x, use_reentrant=False), use_reentrant=False)

    assert torch.equal(gradient(torch.compile(program, backend="fastpack", options=OPTIONS)), gradient(program))


def test_strict_raises_what_the_compiler_raised(monkeypatch):
    fail_for(monkeypatch, lambda gm: True)
    compiled = torch.compile(program, backend="fastpack", options={**OPTIONS, "fastpack.strict": True})
    with pytest.raises(Exception, match="no compiler"):
        compiled(*INPUTS)


def test_nothing_is_said_where_nothing_fails():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.compile(program, backend=fastpack_backend, options=OPTIONS)(*INPUTS)


def test_a_view_of_strides_that_only_the_kernel_knows() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        # The kernel of its gradient, unlike its fake implementation, keeps the strides of the transposed operand.
        return torch.nn.functional.softplus(x.view(3, 16, 2)).transpose(1, 2) @ w

    assert_same(program, [(torch.ones(48, 2, requires_grad=True), torch.ones(16, 5))], "aot_eager")


@pytest.mark.parametrize("region", ["no_grad", "set_grad_enabled", "func.grad"])
def test_an_attempt_that_fails_leaves_no_mode_behind(capture_flags: None, region: str) -> None:
    """Compiling fails inside the region, since whether the slice is contiguous is not known without the batch."""

    def program(x: Tensor, w: Tensor, lengths: Tensor) -> Tensor:
        x = x[:, : lengths.max().item()]
        z = w.tanh() @ w
        if region == "func.grad":
            scale = torch.func.grad(lambda v: (x.reshape(-1).norm() * v).sum())(w).sum()
        else:
            with torch.no_grad() if region == "no_grad" else torch.set_grad_enabled(False):
                scale = x.reshape(-1).norm()
        return x[:, : lengths.min().item()] * (w.cos() @ z).sum() * scale

    step = compiled(program, "aot_eager", strict=False)
    for tokens, lengths in ((9, [6, 4]), (8, [8, 2]), (7, [7, 7])):
        x = torch.linspace(-1, 1, 8 * tokens).view(2, tokens, 4).requires_grad_()
        w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        batch = (x, w, torch.tensor(lengths))
        torch.testing.assert_close(results(step, batch), results(program, batch), rtol=1e-4, atol=1e-4)
