"""Layers under checkpoints that select by operator what to save."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxpasses.inspect
from fxpasses.report import Reason, Report
from tests.fold.programs import WIDTH, Block
from tests.support import compiled, events, reports_of

pytestmark = [
    pytest.mark.usefixtures("capture_flags"),
    pytest.mark.filterwarnings("ignore:Detected that context_fn"),
]

LAYERS = 4


def keep_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def keep_products_from(first: int, number: int, context: Any, operator: Any, *args: Any, **kwargs: Any) -> Any:
    return keep_products(context, operator) if number >= first else CheckpointPolicy.PREFER_RECOMPUTE


def contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


def made_of(policy: Any) -> Any:
    return functools.partial(create_selective_checkpoint_contexts, policy)


ONCE = made_of(keep_products)
EQUAL: dict[str, Callable[[int], Any]] = {
    "a function": lambda number: contexts,
    "a partial": lambda number: ONCE,
    "a partial for each layer": lambda number: made_of(keep_products),
    "operators": lambda number: made_of([torch.ops.aten.mm.default, torch.ops.aten.addmm.default]),
    "a partial in a partial": lambda number: made_of(functools.partial(keep_products_from, 0, 0)),
}


class Checkpointed(nn.Module):
    def __init__(self, contexts_of: Callable[[int], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.contexts_of = contexts_of

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False, context_fn=self.contexts_of(number))
        return x


def products(model: nn.Module, program: Callable[[Tensor], Tensor]) -> tuple[int, list[Tensor]]:
    """The number of products in a warm step, and its gradients."""
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def step() -> None:
        model.zero_grad()
        program(x).square().sum().backward()

    step()
    counts = events(step)
    return counts["aten::mm"] + counts["aten::addmm"], [parameter.grad for parameter in model.parameters()]


def check(contexts_of: Callable[[int], Any]) -> tuple[int, Report]:
    """Gradients are bit for bit those of eager mode; returns the number of products in a step, and the report."""
    torch.manual_seed(0)
    model = Checkpointed(contexts_of)
    twin = copy.deepcopy(model)
    with fxpasses.inspect.record() as record:
        counted, gradients = products(model, compiled(model, "aot_eager", fold="on"))
    _, wanted = products(twin, twin)
    torch.testing.assert_close(gradients, wanted, rtol=0, atol=0)
    return counted, reports_of(record, "fold_layers")[0]


@pytest.mark.parametrize("name", EQUAL)
def test_layers_that_select_alike_are_one_body_and_save_what_they_select(name):
    counted, report = check(EQUAL[name])
    assert report.figures == {"layers": LAYERS, "kinds": 1, "pieces": LAYERS}
    assert not report.refusals
    assert counted == LAYERS * (2 + 4)  # forward and backward: no product is computed again


def test_layers_that_select_differently_are_kinds_of_their_own():
    counted, report = check(lambda number: made_of(functools.partial(keep_products_from, 2, number // 2 * 2)))
    assert report.figures == {"layers": LAYERS, "kinds": 2, "pieces": LAYERS}
    assert counted == LAYERS * (2 + 4) + 2  # two layers compute the first of their two products again


def test_where_no_layer_selects_as_another_the_report_says_so():
    _, report = check(lambda number: made_of(functools.partial(keep_products_from, 2, number)))
    assert not report.changed
    (refusal,) = report.refusals
    assert refusal.reason is Reason.SELECTIVE and refusal.where.startswith("test_selective.py:")
    assert refusal.text == "4 checkpoints are equal but for their `context_fn`"
