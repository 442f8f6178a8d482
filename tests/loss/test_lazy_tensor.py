"""Ways to touch a tensor that is computed when something reads it: each gives what a plain tensor gives."""

from __future__ import annotations

import copy
import gc
import io
import math
import operator
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
import torch.utils.dlpack
from torch import Tensor

from fxpasses.loss.lazy_tensor import LazyTensor, Source, lazy_output

pytestmark = pytest.mark.all_cases

SIZES = (2, 3, 4)


def made(requires_grad: bool = True) -> tuple[LazyTensor, Tensor, list[int]]:
    """A lazy tensor, the input it is computed from, and how often it was computed."""
    x = torch.arange(24.0).view(SIZES).requires_grad_(requires_grad)
    runs: list[int] = []

    def note(is_computed: bool) -> None:
        runs.extend([1] * is_computed)

    source = Source(lambda x: [x * 2], [x], [0], note)
    return lazy_output(SIZES, torch.float32, torch.device("cpu"), requires_grad, source, 0), x, runs


def saved(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    loaded: Tensor = torch.load(file)
    return loaded


READS: list[Callable[[Any], Any]] = [
    lambda x: x + 1,
    lambda x: 1 - x,
    lambda x: x @ torch.ones(4, 2),
    lambda x: torch.ones(2, 2, 3) @ x,
    lambda x: -x,
    lambda x: x > 3,
    lambda x: x == x,
    lambda x: x[0],
    lambda x: x[..., -1],
    lambda x: x[x > 4],
    lambda x: x[torch.tensor([1])],
    lambda x: list(x),
    lambda x: [row.sum() for row in x],
    lambda x: x.argmax(-1),
    lambda x: x.max(-1).values,
    lambda x: x.topk(2).indices,
    lambda x: x.softmax(-1),
    lambda x: torch.softmax(x, -1),
    lambda x: F.cross_entropy(x.view(-1, 4), torch.zeros(6, dtype=torch.long)),
    lambda x: torch.cat([x, x]),
    lambda x: torch.stack([x, x]),
    lambda x: torch.where(x > 2, x, 0.0),
    lambda x: torch.einsum("abc->ca", x),
    lambda x: torch.equal(x, x),
    lambda x: torch.allclose(x, x),
    lambda x: torch.isnan(x).any(),
    lambda x: x.sum().item(),
    lambda x: x.tolist(),
    lambda x: x.detach().numpy(),
    lambda x: x.detach().cpu().numpy().sum(),
    lambda x: __import__("numpy").asarray(x.detach()),
    lambda x: repr(x.detach()),
    lambda x: str(x.detach()),
    lambda x: f"{x.detach()}",
    lambda x: float(x[0, 0, 0]),
    lambda x: bool(x[0, 0, 1] > 0),
    lambda x: int(x[0, 0, 1]),
    lambda x: copy.deepcopy(x.detach()),
    lambda x: copy.copy(x) + 0,
    lambda x: pickle.loads(pickle.dumps(x.detach())),
    lambda x: saved(x.detach()),
    lambda x: x.clone(),
    lambda x: x.contiguous(),
    lambda x: x.view(-1),
    lambda x: x.reshape(6, 4),
    lambda x: x.transpose(0, 1),
    lambda x: x.mT,
    lambda x: x.T if x.ndim == 2 else x.permute(2, 1, 0),
    lambda x: x.unsqueeze(0),
    lambda x: x.expand(2, 2, 3, 4),
    lambda x: x.split(2, -1),
    lambda x: x.unbind(0),
    lambda x: x.stride(),
    lambda x: x.is_contiguous(),
    lambda x: x.storage_offset(),
    lambda x: x.new_zeros(2),
    lambda x: torch.zeros_like(x),
    lambda x: torch.empty_like(x).shape,
    lambda x: x.to(torch.bfloat16) + 0,
    lambda x: x.double().mean(),
    lambda x: x.half().float() * 2,
    lambda x: x.to(torch.zeros(1, dtype=torch.float64)),
    lambda x: x.type_as(torch.zeros(1, dtype=torch.float64)),
    lambda x: x.detach().add_(1),
    lambda x: torch.empty(SIZES).copy_(x.detach()),
    lambda x: torch.zeros(SIZES).add_(x.detach()),
    lambda x: torch.zeros(SIZES).index_copy(0, torch.tensor([0, 1]), x.detach()),
    lambda x: torch.autograd.grad(x.sum(), x)[0] if x.requires_grad else x,
    lambda x: operator.index(x.detach().sum().long()),
    lambda x: math.floor(x.detach().sum()),
    lambda x: torch.utils._pytree.tree_map(lambda each: each + 1, {"logits": x}),
    lambda x: {"a": x}["a"].mean(),
    lambda x: torch.func.vmap(lambda row: row * 2)(x.detach()),
    lambda x: torch.nn.Linear(4, 4).weight.detach().zero_() + x[0, 0],
    lambda x: x.__class__ is None,
    lambda x: sorted(x.detach().flatten().tolist()),
    lambda x: torch.nn.utils.rnn.pad_sequence(list(x.detach())),
    lambda x: x.untyped_storage().nbytes(),
    lambda x: x.data.sum(),
    lambda x: x.grad_fn is not None,
    lambda x: x.detach().__array__().sum(),
]

FORM: list[Callable[[Any], Any]] = [
    lambda x: x.shape,
    lambda x: tuple(x.size()),
    lambda x: x.size(-1),
    lambda x: x.dtype,
    lambda x: x.device,
    lambda x: x.ndim,
    lambda x: x.dim(),
    lambda x: x.numel(),
    lambda x: len(x),
    lambda x: x.is_floating_point(),
    lambda x: x.requires_grad,
    lambda x: x.is_leaf,
    lambda x: x.is_cuda,
    lambda x: x.element_size(),
    lambda x: x is None,
    lambda x: isinstance(x, Tensor) and torch.is_tensor(x),
    lambda x: x.float().dtype,
    lambda x: x.to(torch.bfloat16).dtype,
    lambda x: x.to("cpu").device,
    lambda x: x.detach().requires_grad,
    lambda x: x.half().detach().to(torch.float32).shape,
    lambda x: {id(x): x}[id(x)].shape,
    lambda x: hash(x) == hash(x),
    lambda x: hasattr(x, "dtype"),
    lambda x: torch.is_floating_point(x) and torch.numel(x),
]


@pytest.mark.parametrize("at", range(len(READS)))
def test_reading(at: int) -> None:
    lazy, x, runs = made()
    expected, found = READS[at](x * 2), READS[at](lazy)
    _assert_equal(found, expected)
    assert len(runs) <= 1


def _assert_equal(found: Any, expected: Any) -> None:
    if isinstance(expected, Tensor):
        assert type(found) is Tensor and found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found, expected, equal_nan=True)
    elif isinstance(expected, (list, tuple)):
        for one, other in zip(found, expected, strict=True):
            _assert_equal(one, other)
    elif isinstance(expected, dict):
        _assert_equal(list(found.values()), list(expected.values()))
    else:
        assert type(found) is type(expected) and (
            found == expected if not hasattr(expected, "shape") else (found == expected).all()
        )


@pytest.mark.parametrize("at", range(len(FORM)))
def test_asking_for_the_form_reads_nothing(at: int) -> None:
    lazy, x, runs = made()
    assert FORM[at](lazy) == FORM[at](x * 2)
    assert not runs


def test_gradients_flow_through_what_is_read() -> None:
    lazy, x, _ = made()
    (lazy.to(torch.float64).square().sum() + lazy.detach().sum()).backward()
    torch.testing.assert_close(x.grad, 8 * x.detach())


def test_hooks_and_kept_gradients() -> None:
    lazy, x, runs = made()
    seen: list[Tensor] = []
    handle = lazy.register_hook(lambda gradient: seen.append(gradient))
    lazy.register_hook(lambda gradient: gradient * 3)
    removed = lazy.register_hook(lambda gradient: gradient * 100)
    removed.remove()
    assert not runs
    lazy.sum().backward()
    assert len(seen) == 1 and handle is not None
    torch.testing.assert_close(x.grad, torch.full(SIZES, 6.0))


def test_it_is_computed_once_by_any_number_of_threads() -> None:
    lazy, x, runs = made(requires_grad=False)
    found: list[Tensor] = []
    threads = [threading.Thread(target=lambda: found.append(lazy + 1)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8 and len(runs) == 1
    assert all(torch.equal(each, x * 2 + 1) for each in found)


@pytest.mark.parametrize(
    "change", [lambda x: x.add_(1), lambda x: setattr(x, "data", x.data.clone()), lambda x: x.zero_()]
)
def test_what_has_changed_is_no_more_to_be_had(change: Any) -> None:
    lazy, x, runs = made()
    with torch.no_grad():
        change(x)
    with pytest.raises(RuntimeError, match=r"have changed .*read it before optimizer.step\(\)"):
        lazy.sum()
    assert not runs and lazy.shape == SIZES


def test_what_was_read_stays_as_it_was() -> None:
    lazy, x, _ = made()
    before = lazy + 0
    with torch.no_grad():
        x.add_(1)
    assert torch.equal(lazy + 0, before)


def test_writing_to_it_is_writing_to_its_value() -> None:
    lazy, _, _ = made(requires_grad=False)
    lazy.mul_(3)
    lazy[0] = 1
    assert torch.equal(lazy[0], torch.ones(3, 4)) and lazy[1, 0, 0] == 72


def test_an_error_while_it_is_computed_reaches_the_reader() -> None:
    def fails() -> Any:
        raise ValueError("on purpose")

    lazy = lazy_output(
        SIZES, torch.float32, torch.device("cpu"), True, Source(fails, [], [], lambda is_computed: None), 0
    )
    for _ in range(2):
        with pytest.raises(ValueError, match="on purpose"):
            lazy.sum()


def test_another_compiled_function_reads_it() -> None:
    for backend in ("eager", "fastpack"):
        lazy, x, _ = made()
        found = torch.compile(lambda y: y.softmax(-1) * 2, backend=backend)(lazy)
        torch.testing.assert_close(found, (x * 2).softmax(-1) * 2)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


def through_a_hook_of_a_module(x: Tensor) -> Tensor:
    module = torch.nn.Identity()
    module.register_full_backward_hook(lambda module, given, made: None)
    return module(x).square()


# Ways that do not ask `__torch_function__`, or in modes that a value must not be computed in.
BESIDE: list[Callable[[Any], Tensor]] = [
    Doubled.apply,
    lambda x: torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=True),
    lambda x: torch.utils.checkpoint.checkpoint(lambda y: y.sin() * y, x, use_reentrant=False),
    lambda x: torch.func.vmap(torch.sin)(x),
    lambda x: torch.func.vmap(lambda row: row * x[0])(torch.ones(2, 3, 4)),
    lambda x: torch.func.grad(lambda y: y.sin().sum())(x),
    lambda x: torch.jit.script(_scripted)(x),
    through_a_hook_of_a_module,
    lambda x: torch.ops.aten.sin(x),
    lambda x: torch._foreach_mul([x, x], 2.0)[0],
]


def _scripted(x: Tensor) -> Tensor:
    return x.sin() * 2


@pytest.mark.parametrize("read_before", [False, True])
@pytest.mark.parametrize("at", range(len(BESIDE)))
def test_gradients_of_code_that_does_not_ask_the_tensor(at: int, read_before: bool) -> None:
    lazy, x, _ = made()
    if read_before:
        lazy.sum()
    found, expected = BESIDE[at](lazy), BESIDE[at](x * 2)
    torch.testing.assert_close(found, expected)
    gradients = []
    for y in (found, expected):
        x.grad = None
        y.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_mode_of_the_first_reader_is_not_the_values(mode: Any) -> None:
    lazy, x, _ = made()
    with mode():
        assert not (lazy * 2).requires_grad
        constant = lazy.double()
    assert not constant.requires_grad
    lazy.sum().backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 2.0))


def test_a_cast_without_gradients_is_a_constant() -> None:
    lazy, x, _ = made()
    with torch.no_grad():
        constant = lazy.double()
    (lazy.sum() + constant.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 2.0))


def test_a_cast_keeps_the_value_that_it_had() -> None:
    lazy, x, _ = made(requires_grad=False)
    casts = [lazy.half(), lazy.to(torch.float32, copy=True), lazy.double().half()]
    alias = lazy.detach()
    lazy.zero_()
    for cast in casts:
        torch.testing.assert_close(cast.float() + 0, x * 2)
    assert not alias.any()


def test_hooks_run_where_a_cast_follows() -> None:
    lazy, x, runs = made()
    lazy.register_hook(lambda gradient: gradient * 3)
    lazy.retain_grad()
    cast = lazy.double()
    assert not runs
    cast.sum().backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 6.0))
    torch.testing.assert_close(lazy.grad, torch.full(SIZES, 3.0))


def test_gradients_of_gradients() -> None:
    x = torch.arange(24.0, dtype=torch.float64).view(SIZES).requires_grad_()
    lazy = lazy_output(SIZES, x.dtype, x.device, True, Source(lambda x: [x**3], [x], [0], lambda is_computed: None), 0)
    (first,) = torch.autograd.grad(lazy.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    torch.testing.assert_close(second, 30 * x.detach() ** 4)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_step_of_a_fused_optimizer_is_a_change(optimizer: Any) -> None:
    lazy, x, _ = made()
    other, _, _ = made()
    x.grad = torch.ones_like(x)
    optimizer([x], lr=0.1, fused=True).step()
    with pytest.raises(RuntimeError, match="have changed"):
        lazy.sum()
    other.sum()


COMPILED: list[Callable[[Any], Any]] = [
    lambda x: x.double().sum(),
    lambda x: x.detach().sum(),
    lambda x: x.float().mean(),
    lambda x: torch.sum(x.bfloat16()),
    lambda x: x.detach() * x.shape[0],
    lambda x: x.detach().requires_grad,
]


@pytest.mark.parametrize("at", range(len(COMPILED)))
def test_a_compiled_function_that_casts_it(at: int) -> None:
    lazy, x, _ = made()
    _assert_equal(torch.compile(COMPILED[at], backend="eager")(lazy), COMPILED[at](x * 2))


def test_its_memory_is_not_to_be_had() -> None:
    """Which was a segmentation fault."""
    lazy, _, _ = made()
    with pytest.raises(RuntimeError, match="data pointer"):
        torch.utils.dlpack.to_dlpack(lazy.detach())  # type: ignore[attr-defined]
    assert torch.from_dlpack(lazy.detach()).shape == SIZES


def test_a_parameter_of_its_value() -> None:
    lazy, x, _ = made()
    parameter = torch.nn.Parameter(lazy.detach())
    (parameter * 2).sum().backward()
    torch.testing.assert_close(parameter.grad, torch.full(SIZES, 2.0))
    assert x.grad is None


def test_a_gradient_may_come_before_any_reader() -> None:
    lazy, x, runs = made()
    lazy.backward(torch.ones(SIZES))
    (again,) = torch.autograd.grad(lazy.double(), x, torch.ones(SIZES, dtype=torch.float64))
    torch.testing.assert_close((x.grad, again), (torch.full(SIZES, 2.0),) * 2)
    lazy.square().sum().backward()
    assert len(runs) == 1


def test_a_gradient_that_is_none_reads_nothing() -> None:
    lazy, x, runs = made()

    class Passes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, loss: Tensor, unused: Tensor) -> Tensor:
            return loss.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            return gradient, None

    Passes.apply((x * 3).sum(), lazy).backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 3.0))
    assert not runs


def test_hooks_of_inputs_run_once() -> None:
    lazy, x, _ = made()
    calls: list[Tensor] = []
    x.register_hook(lambda gradient: calls.append(gradient) or gradient * 2)
    ((x * 3).sum() + lazy.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 10.0))
    assert len(calls) == 1


def test_backward_after_a_write_raises() -> None:
    x = torch.ones(SIZES, requires_grad=True)
    lazy = lazy_output(
        SIZES, x.dtype, x.device, True, Source(lambda x: [x.sin() * x], [x], [0], lambda is_computed: None), 0
    )
    total = lazy.sum()
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        total.backward()


def test_training_a_parameter_of_its_value() -> None:
    found = []
    for lazily in (False, True):
        lazy, x, _ = made()
        parameter = torch.nn.Parameter((lazy if lazily else x * 2).detach())
        optimizer = torch.optim.SGD([parameter], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = parameter.square().sum()
            loss.backward()
            optimizer.step()
        found.append(loss.item())
        with pytest.raises(RuntimeError, match="leaf"):
            parameter.mul_(2)
    assert found[0] == found[1]


def test_nothing_is_kept() -> None:
    """Neither what was read, nor a leaf, nor the values behind a detached cast."""
    lazy, x, _ = made()
    lazy.relu().softmax(-1).sum().backward()
    leaf = lazy.detach().requires_grad_()
    leaf.square().sum().backward()
    other, y, _ = made()
    cast = other.detach().double()
    cast.sum()
    alive = [weakref.ref(each) for each in (lazy, leaf, other, x, y)]
    gc.disable()
    try:
        del lazy, leaf, other, x, y, _
        assert [each() for each in alive] == [None] * 5
    finally:
        gc.enable()
    assert cast.dtype == torch.float64


def test_its_data_may_be_replaced() -> None:
    lazy, x, _ = made()
    cast = lazy.double()
    lazy.data = lazy.data * 0 + 5
    lazy.square().sum().backward()
    torch.testing.assert_close(x.grad, torch.full(SIZES, 20.0))
    torch.testing.assert_close(cast.detach() + 0, (x * 2).double().detach())


def test_an_input_that_was_frozen_since() -> None:
    lazy, x, _ = made()
    x.requires_grad_(False)
    total = lazy.sum()
    total.backward()
    assert total.item() == (x * 2).sum()
