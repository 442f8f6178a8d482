"""`requires_grad_()` and `requires_grad = True` on an intermediate: one graph where nobody can tell, else as stock."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

IDS = torch.tensor([[1, 4, 2, 7, 0, 3]])
WIDTH = 4
Hook = Callable[[nn.Module, Any, Tensor], Any]


def asks(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad_(True)


def assigns(module: nn.Module, inputs: Any, output: Tensor) -> None:
    output.requires_grad = True


class Layer(nn.Module):
    """A frozen product and an adapter's."""

    def __init__(self, adapted: bool) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False) if adapted else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(x)
        return x + torch.tanh(y if self.adapter is None else y + self.adapter(x))


class Model(nn.Module):
    """Checkpointed layers over a frozen embedding, on whose output `hook` is called. adapted: of each layer."""

    def __init__(self, hook: Hook = asks, adapted: tuple[bool, ...] = (True, True), reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, WIDTH).requires_grad_(False)
        self.embedding.register_forward_hook(hook)
        self.layers = nn.ModuleList(map(Layer, adapted))
        self.reentrant = reentrant
        self.kept: Any = None

    def forward(self, ids: Tensor) -> Any:
        return self.through(self.embedding(ids)).square().mean()

    def through(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def step(program: Any, model: nn.Module) -> Any:
    """What the program returns, and the gradients of the parameters, of a float result that has one."""
    found = program(IDS)
    results = [found] if isinstance(found, Tensor) else list(found)
    if loss := [result.float().sum() for result in results if result.requires_grad]:
        sum(loss).backward()
    return [(r.detach(), r.requires_grad, r.is_leaf) for r in results], [p.grad for p in model.parameters()]


def is_one_graph(model: nn.Module, lowering: str = "aot_eager") -> bool:
    """Whether a step is captured whole. It is eager mode's, bit for bit, in any case."""
    torch._dynamo.reset()
    eager = copy.deepcopy(model)
    expected = step(eager, eager)
    with fxpasses.inspect.record() as record:
        actual = step(compiled(model, lowering), model)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    graphs = [graph for graph in record.graphs if graph.outcome != "retraced"]
    return len(graphs) == 1 and "torch_dynamo_resume" not in graphs[0].function


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_request_that_nobody_reads_leaves_one_graph(reentrant: bool, lowering: str) -> None:
    assert is_one_graph(Model(reentrant=reentrant), lowering)


def test_the_request_is_left_out_where_the_tensor_has_a_gradient_anyway() -> None:
    model = Model()
    model.embedding.requires_grad_(True)
    assert is_one_graph(model)


def test_a_request_made_twice_and_a_hook_that_returns_its_output() -> None:
    model = Model(lambda module, inputs, output: output.requires_grad_())
    model.embedding.register_forward_hook(asks)
    assert is_one_graph(model)


def test_a_request_after_detach_cuts_the_gradient_as_in_eager_mode() -> None:
    model = Model(lambda module, inputs, output: output.detach().requires_grad_())
    model.embedding.requires_grad_(True)
    assert is_one_graph(model)
    assert model.embedding.weight.grad is None


def test_only_later_layers_have_parameters_to_train() -> None:
    assert is_one_graph(Model(adapted=(False, False, True)))


def test_the_program_sees_that_the_tensor_requires_a_gradient() -> None:
    class Asking(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            y = x * (2 if x.requires_grad else 3)
            return self.through(y * (5 if y.requires_grad else 7)).mean()

    assert is_one_graph(Asking())


def test_under_autocast_and_without_gradients() -> None:
    model = Model()
    for around in (torch.autocast("cpu", torch.bfloat16), torch.no_grad()):
        with around:
            assert is_one_graph(model)
        model.zero_grad()


def test_writes_in_place_pass_gradients_on() -> None:
    class Writing(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            out = torch.zeros_like(x).flatten(0, 1)
            out.index_add_(0, torch.arange(6).flip(0), self.layers[0](x).flatten(0, 1))
            out[:2] = 0.5
            return out * 2

    assert is_one_graph(Writing())


def test_an_assignment_asks_as_the_method_does() -> None:
    model = Model(assigns)
    model.embedding.register_forward_hook(assigns)
    assert is_one_graph(model)


class Biased(Model):
    """T5's attention: the first checkpoint makes a table of zeros, asks for its gradient, and passes it on."""

    def forward(self, ids: Tensor) -> Any:
        return self.run(ids)[0].square().mean()

    def run(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x, table = nn.functional.embedding(ids, self.embedding.weight), None
        for layer in self.layers:
            x, table = checkpoint(self.biased, layer, x, table, use_reentrant=False)
        return x, table

    @staticmethod
    def biased(layer: nn.Module, x: Tensor, table: Tensor | None) -> tuple[Tensor, Tensor]:
        if table is None:
            table = torch.zeros(WIDTH)
            table.requires_grad = True
        return layer(x + table), table


def test_a_request_in_a_checkpoint_whose_result_the_next_one_takes() -> None:
    assert is_one_graph(Biased())
    assert is_one_graph(Biased(adapted=(False, True)))


def test_a_request_on_a_view_of_an_input_is_not_one_on_the_input() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = x[:, None]
        y.requires_grad = True
        return (y * w).sum() if y.requires_grad and not x.requires_grad else w.sum() * 7

    w = torch.arange(3.0, requires_grad=True)
    x = torch.ones(3)
    (expected,) = torch.autograd.grad(program(x, w), w)
    (actual,) = torch.autograd.grad(compiled(program, "aot_eager", fullgraph=True)(x, w), w)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert not x.requires_grad


# What stays as stock PyTorch has it. The graph breaks, or the frame is not captured: never another result.


def test_a_result_that_depends_on_the_request_alone() -> None:
    assert not is_one_graph(Model(adapted=(False, False)))

    class Both(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            return self.layers[1](x), self.layers[0](x)

    assert not is_one_graph(Both(adapted=(True, False)))
    assert is_one_graph(Both(adapted=(True, True)))


@pytest.mark.skipif(torch.__version__ >= "2.15", reason="the loss has no gradient there, under every backend")
def test_a_result_of_a_checkpoint_that_depends_on_the_request_alone() -> None:
    class Returning(Biased):
        def forward(self, ids: Tensor) -> Any:
            return self.run(ids)

    assert not is_one_graph(Biased(adapted=(False, False)))
    assert not is_one_graph(Returning())


def test_a_write_before_or_without_a_gradient_gives_none() -> None:
    class Writing(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            out = torch.zeros_like(x)
            early = x + out  # `out` requires a gradient only later
            out.add_(self.layers[0](x))
            shape = x.expand_as(self.layers[0].adapter(x))  # type: ignore[operator]  # uses a size alone
            return out, early, shape

    assert not is_one_graph(Writing())


def test_the_tensor_leaves_the_program() -> None:
    class Returning(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            return self.through(x), x

    class Storing(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            self.kept = x
            return self.through(x)

    assert not is_one_graph(Returning())
    model = Storing()
    assert not is_one_graph(model)
    assert model.kept.is_leaf and model.kept.grad is not None


def test_a_hook_on_the_gradient() -> None:
    seen: list[Tensor] = []

    def watches(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.requires_grad_().register_hook(seen.append)

    assert not is_one_graph(Model(watches))
    assert len(seen) == 2 and torch.equal(*seen)


def test_a_gradient_that_the_program_takes_itself() -> None:
    class Taking(Model):
        def forward(self, ids: Tensor) -> Any:
            x = self.embedding(ids)
            (gradient,) = torch.autograd.grad(self.through(x).square().sum(), x)
            return gradient

    model = Taking()
    torch.testing.assert_close(compiled(model, "aot_eager")(IDS), model(IDS), rtol=0, atol=0)


def test_a_tensor_that_may_be_an_input() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return (x.contiguous().requires_grad_() * w).sum()

    w = torch.ones(3, requires_grad=True)
    results = []
    for run in (program, compiled(program, "aot_eager")):
        x = torch.ones(3)
        run(x, w).backward()
        results.append((x.requires_grad, x.grad))
    assert results[0][0] and results[1][0]
    torch.testing.assert_close(results[0][1], results[1][1])


def test_a_write_to_the_tensor_is_eager_modes_error() -> None:
    def program(ids: Tensor, table: Tensor) -> Tensor:
        x = torch.nn.functional.embedding(ids, table).requires_grad_()
        x += 1
        return x

    for run in (program, compiled(program, "aot_eager")):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
            run(IDS, torch.ones(8, WIDTH))
