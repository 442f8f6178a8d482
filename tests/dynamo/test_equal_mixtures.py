"""Layers of a mixture are traced once, with the branches for experts with tokens: as if each were traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.output_graph import OutputGraph
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from fxpasses.dynamo.rules.equal_layers import Layers
from fxpasses.dynamo.trace import Trace
from fxpasses.experts.branches import SpeculatedBranch, marks
from tests.dynamo.test_equal_layers import value_of
from tests.experts.models import HIDDEN
from tests.experts.spellings import DECOYS, SPELLINGS, Moe, Spelling
from tests.support import compiled, results

pytestmark = pytest.mark.usefixtures("capture_flags")
N = 3  # layers
HAS_COPIES = torch.__version__ >= "2.12"  # torch 2.11 follows loops over most lists by comparing objects
TOKENS = 12


class Model(nn.Module):
    def __init__(self, spelling: Spelling, call: Callable[..., Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Moe(spelling, spelling.experts[0]) for _ in range(N)])
        self.call, self.dtype = call, spelling.dtype

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        for layer in self.layers:
            x = x + (layer(x) if self.call is None else self.call(layer, x))
        return x


class Seen:
    """What traces have made: graphs with marks, and branches, without the numbers in names; and how many copies."""

    def __init__(self) -> None:
        self.graphs: list[str] = []
        self.branches: list[tuple[Any, ...]] = []
        self.copies = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    compile_graph, copied, speculated = OutputGraph.compile_and_call_fx_graph, Layers.copied, Trace.speculated

    def note(self: Any, *given: Any, **named: Any) -> Any:
        found.graphs.append(_text(self))
        return compile_graph(self, *given, **named)

    def count(self: Any, call: Any) -> Any:
        result = copied(self, call)
        found.copies += result is not None
        return result

    def speculate(self: Any) -> list[SpeculatedBranch]:
        branches = speculated(self)
        found.branches = [tuple(vars(branch).values()) for branch in branches]
        return branches

    monkeypatch.setattr(OutputGraph, "compile_and_call_fx_graph", note)
    monkeypatch.setattr(Layers, "copied", count)
    monkeypatch.setattr(Trace, "speculated", speculate)
    return found


def _text(output: Any) -> str:
    bodies = [node for gm in output.nn_modules.values() if isinstance(gm, GraphModule) for node in gm.graph.nodes]
    numbers = {node: f"%{place}" for place, node in enumerate([*output.graph.nodes, *bodies])}
    lines = []
    for node in numbers:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: numbers[operand])
        target = str(node.target).rstrip("0123456789_")
        bound = list(node.meta.get("unbacked_bindings") or ())
        lines.append(f"{node.op} {target} {arguments} {value_of(node)} {bound} {marks(node)}")
    return "\n".join(lines)


def assert_as_traced(model: Model, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> int:
    """Graphs, branches, results and gradients are those of a trace of all layers; returns how many were copied."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).to(model.dtype).requires_grad_()
    runs = []
    for is_on in (True, False):
        torch._dynamo.reset()
        seen.graphs, seen.branches = [], []
        with monkeypatch.context() as patch:
            if not is_on:
                patch.setattr(Layers, "may_copy", lambda *given: False)
            torch.manual_seed(2)
            found = results(compiled(model), [x])
        runs.append((found, seen.graphs, seen.branches))
    (ours, graphs, branches), (traced, expected_graphs, expected_branches) = runs
    torch.testing.assert_close(ours, traced, rtol=0, atol=0)
    torch.manual_seed(2)
    for one, other in zip(tree_leaves(ours), tree_leaves(results(model, [x])), strict=True):
        largest = 0 if other is None else float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=(1e-5 if x.dtype is torch.float32 else 0.02) * largest)
    assert graphs == expected_graphs
    assert branches == expected_branches
    return seen.copies


TRACED = {
    "split_bincount": "the graph breaks inside",
    "slices_of_counts": "sizes of slices, which no node binds",
    "numpy_ends": "numbers read from an array, which have no branch",
    "moe_infer": "the counts are written in place",
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_layers_are_copied(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = assert_as_traced(Model(SPELLINGS[name]), seen, monkeypatch)
    assert copies == (0 if name in TRACED else N - 1) or not HAS_COPIES


@pytest.mark.parametrize("name", DECOYS)
def test_loops_that_do_something_else(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_traced(Model(DECOYS[name]), seen, monkeypatch)


def test_checkpoints(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(SPELLINGS["skip_numel"], lambda layer, x: checkpoint(layer, x, use_reentrant=False))
    copies = assert_as_traced(model, seen, monkeypatch)
    assert copies == N - 1 or not HAS_COPIES


class Given(nn.Module):
    """An expert for each number below the count that its caller says; a longer `bincount` would have more."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count, self.lin = count, nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.lin(x) * torch.bincount(ids.flatten(), minlength=self.count).float().mean()


def test_ids_from_outside_of_which_less_is_known(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 0 is given ids of a router, all below 4, and layer 1 some of which nothing is known: up to 9."""

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.gate = nn.Linear(HIDDEN, 4)
            self.layers = nn.ModuleList([Given(4), Given(4)])

        def forward(self, x: Tensor) -> Tensor:
            known = self.gate(x).topk(1)[1]
            x = x * 2
            for layer, ids in zip(self.layers, (known, known * 3), strict=True):
                x = layer(x, ids)
            return x

    model, x = Routed(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    torch.testing.assert_close(compiled(model)(x), model(x))
    assert seen.copies == 0


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Sequential(nn.Linear(HIDDEN, HIDDEN))

    def forward(self, x: Tensor, own: Tensor, other: Tensor) -> Tensor:
        tok, count = other.nonzero()[:, 0], own.nonzero().sum()
        return x.index_add(0, tok, checkpoint(self.experts, x[tok], use_reentrant=False)) + count


@pytest.mark.parametrize("known", range(2))
def test_sizes_that_an_operand_remembers(known: int, seen: Seen) -> None:
    """The program has asked for the nonzero elements of one layer's mask before: that layer makes a size less."""

    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList([Counting(), Counting()])

        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            masks = [(x[:, place].cumsum(0).cos() > 0).float() for place in range(4)]
            masks[known].nonzero()
            for place, layer in enumerate(self.layers):
                x = layer(x, masks[place], masks[place + 2])
            return x

    model, x = Asking(), torch.randn(TOKENS, HIDDEN, requires_grad=True)
    torch.testing.assert_close(compiled(model, fullgraph=True)(x), model(x))
    assert seen.copies == 0
