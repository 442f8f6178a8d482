"""Tiles of rows: what is computed row by row is computed in parts, with the same results and less memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import fxpasses.inspect
from bench.counting import allocated_bytes as peak_of
from fxpasses import MemoryBudgetError
from fxpasses.compiler import backend
from fxpasses.graph.copying import copy_graph_module
from fxpasses.memory.step import Step
from fxpasses.memory.tiles import tile_rows
from tests.support import compiled, results

B, T, H = 2, 13, 8


class Mlp(nn.Module):
    """Applies a function of itself and of rows."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.rms = nn.LayerNorm(H), nn.RMSNorm(H)
        self.up, self.gate, self.down = nn.Linear(H, 4 * H), nn.Linear(H, 4 * H, bias=False), nn.Linear(4 * H, H)
        self.both, self.out, self.table = nn.Linear(H, 8 * H), nn.Linear(H, H), nn.Parameter(torch.randn(T, H))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x * 1)


def gelu(m: Mlp, x: Tensor) -> Tensor:
    return x + m.down(F.gelu(m.up(m.norm(x))))


def gated(m: Mlp, x: Tensor) -> Tensor:
    return x + m.down(F.silu(m.gate(m.rms(x))) * m.up(x))


def chunked(m: Mlp, x: Tensor) -> Tensor:
    gate, up = m.both(x).chunk(2, dim=-1)
    return x + m.down(F.silu(gate) * up)


def written_out(m: Mlp, x: Tensor) -> Tensor:
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
    return x + (m.gate.weight @ (x * scale).transpose(-1, -2)).transpose(-1, -2).relu() @ m.down.weight.T


def attending(m: Mlp, x: Tensor) -> Tensor:
    """Before attention, and after it, are regions of their own."""
    q = m.norm(x)
    y = F.scaled_dot_product_attention(q[:, None], q[:, None], x[:, None])[:, 0]
    return gelu(m, x + m.out(y))


def tokens_first(m: Mlp, x: Tensor) -> Tensor:
    """Where rows are not in order, what follows may be a view that tiles, put together in order, would not allow."""
    y = gelu(m, x.transpose(0, 1).contiguous().transpose(0, 1))
    return y.transpose(0, 1).view(T * B, H).cos()


def twice(m: Mlp, x: Tensor) -> Tensor:
    x = gelu(m, x)
    return gated(m, x - x.mean(1, keepdim=True))


def with_places(m: Mlp, x: Tensor) -> Tensor:
    return gelu(m, x + torch.arange(T * H, dtype=x.dtype).view(1, T, H) / 99)


def in_bfloat16(m: Mlp, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return gelu(m, x)


def reading_all(m: Mlp, x: Tensor) -> Tensor:
    """`h` is returned, and so is there anyway."""
    h = m.up(x)
    return torch.cat([m.down(h.relu()), h], -1)


def with_table(m: Mlp, x: Tensor) -> Tensor:
    """A row of the table for each place is added before the region."""
    return x + m.down(F.gelu(m.up(x + m.table)))


def with_tables(m: Mlp, x: Tensor) -> Tensor:
    """Inside, it is not cut."""
    return x + m.down(F.gelu(m.up(x)) * m.table.mean(-1, keepdim=True))


def viewing(m: Mlp, x: Tensor) -> Tensor:
    """A view of x is used outside."""
    v = x[..., :4]
    return torch.cat([m.down(F.gelu(m.up(x))) + v.repeat(1, 1, 2), v], -1)


def in_parts(m: Mlp, x: Tensor) -> Tensor:
    """A result and a view of it are used outside, where one may be written to."""
    y = gelu(m, x)
    return torch.cat([y.flip(1), y[..., :4].flip(1)], -1)


def tokens_in_front(m: Mlp, x: Tensor) -> Tensor:
    """[T, B, H]: rows are cut where there are more."""
    return gelu(m, x.transpose(0, 1).contiguous()).transpose(0, 1)


def dropping(m: Mlp, x: Tensor) -> Tensor:
    return x + m.down(F.dropout(m.up(x)))


def writing(m: Mlp, x: Tensor) -> Tensor:
    return x + m.down(m.up(x).relu_())


def summing(m: Mlp, x: Tensor) -> Tensor:
    """Each row of `down`'s operand is one of all rows."""
    return x + m.down(m.up(x).cumsum(-2))


def for_nothing(m: Mlp, x: Tensor) -> Tensor:
    """Nobody reads what the region computes."""
    m.up(x).relu()
    return x.cos()


REGIONS: dict[Callable[..., Tensor], int] = {
    gelu: 1,
    gated: 1,
    chunked: 1,
    attending: 1,
    twice: 2,
    with_places: 1,
    in_bfloat16: 1,
    written_out: 0,
    tokens_first: 0,
    reading_all: 0,
    with_table: 1,
    with_tables: 0,
    viewing: 0,
    in_parts: 0,
    tokens_in_front: 1,
    dropping: 0,
    writing: 0,
    summing: 0,
    for_nothing: 0,
}


def captured(program: Callable[..., Any], x: Tensor, dynamic: bool | None = None) -> tuple[GraphModule, Any]:
    found: list[Any] = []

    def capture(gm: GraphModule, inputs: Any) -> Any:
        found.append((copy_graph_module(gm), list(inputs)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(program, backend=capture, dynamic=dynamic)(x)
    (only,) = found
    return only


@pytest.mark.all_cases
@pytest.mark.parametrize("is_dynamic", [False, True], ids=["", "any size"])
@pytest.mark.parametrize("function", REGIONS, ids=lambda function: function.__name__)
def test_results_are_the_same(function: Callable[..., Tensor], is_dynamic: bool) -> None:
    model, x = Mlp(function), torch.randn(B, T, H, requires_grad=True)
    gm, inputs = captured(model, x, is_dynamic)
    tiled = copy_graph_module(gm)
    assert tile_rows(tiled, 4) == REGIONS[function]
    torch.manual_seed(1)
    expected = gradients(gm, inputs)
    torch.manual_seed(1)
    tolerance = 0.05 if function is in_bfloat16 else 1e-5
    torch.testing.assert_close(gradients(tiled, inputs), expected, rtol=tolerance, atol=tolerance)
    widest = max(value.numel() for value in values(tiled, inputs) if value.shape[-1] == 4 * H)
    assert REGIONS[function] == 0 or widest <= B * 4 * 4 * H


def gradients(gm: GraphModule, inputs: list[Any]) -> list[Any]:
    given = [value for value in inputs if isinstance(value, Tensor) and value.requires_grad]
    (result,) = gm(*inputs)
    return [result.detach(), *torch.autograd.grad(result.float().square().sum(), given, allow_unused=True)]


def values(gm: GraphModule, inputs: list[Any]) -> list[Tensor]:
    """All results of operators."""
    found: list[Tensor] = []

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> Any:
            result = super().run_node(n)
            found.extend([result] if isinstance(result, Tensor) and n.op.startswith("call") else [])
            return result

    Noting(gm).run(*inputs)
    return found


def test_another_size_of_a_batch() -> None:
    """What is compiled for any size is right for sizes that the tiles do not divide, and that have fewer rows."""
    model = Mlp(gated)
    gm, inputs = captured(model, torch.randn(B, T, H, requires_grad=True), dynamic=True)
    place = next(i for i, value in enumerate(inputs) if isinstance(value, Tensor) and value.shape == (B, T, H))
    sizes = {i: value for i, value in enumerate(inputs) if not isinstance(value, Tensor)}
    tiled = copy_graph_module(gm)
    assert tile_rows(tiled, 4) == 1
    for rows in (4, 5, 8, 3):
        x = torch.randn(B, rows, H, requires_grad=True)
        others = [rows if i in sizes and value == T else x if i == place else value for i, value in enumerate(inputs)]
        torch.testing.assert_close(gradients(tiled, others), gradients(gm, others))


# A step that fits with tiles alone

ROWS, WIDTH, LAYERS = 512, 16, 4


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)  # after which all layers are alike
        self.layers = nn.ModuleList(
            nn.ModuleList([nn.Linear(WIDTH, 256), nn.Linear(256, WIDTH)]) for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer[1](F.gelu(layer[0](x)))
        return x.square().mean()


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_step_fits_with_tiles_alone(lowering: str) -> None:
    model, x = Wide(), torch.randn(ROWS, WIDTH)
    budget = 2 * ROWS * 256 * 4  # of which forward alone needs that much without tiles, and backward more
    with fxpasses.inspect.record() as record:
        run = compiled(model, lowering, memory=budget, fold="on")
        torch.testing.assert_close(results(run, [x]), results(model, [x]), rtol=1e-5, atol=1e-6)
    figures = record.figures("memory")
    assert figures["tiles"] > 1
    model.zero_grad(set_to_none=True)
    taken = peak_of(lambda: run(x).backward())
    assert taken <= 1.05 * budget
    assert taken <= 1.05 * figures["peak_bytes"]


class TwoKinds(Wide):
    """Of which the second needs tiles, and the first is compiled before that is known."""

    def __init__(self) -> None:
        super().__init__()
        narrow = [nn.ModuleList([nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)]) for _ in range(2)]
        self.layers = nn.ModuleList([*narrow, *self.layers])


def test_a_report_is_of_the_plan_that_runs() -> None:
    """Before, those of tries that were given up were there as well, and peaks were added up."""
    model, x = TwoKinds(), torch.randn(ROWS, WIDTH)
    budget = 2 * ROWS * 256 * 4
    with fxpasses.inspect.record() as record:
        run = compiled(model, "aot_eager", memory=budget, fold="on")
        run(x).backward()
    reports = [each for graph in record.graphs for each in graph.reports if each.pass_name == "memory"]
    assert len(reports) == 2 and "tiles" in reports[-1].figures
    model.zero_grad(set_to_none=True)
    assert peak_of(lambda: run(x).backward()) == pytest.approx(record.figures("memory")["peak_bytes"], rel=0.05)
    assert {each.figures["peak_bytes"] for each in reports} == {record.figures("memory")["peak_bytes"]}


@pytest.mark.slow
def test_what_does_not_fit_with_tiles_is_refused() -> None:
    with pytest.raises(MemoryBudgetError, match=r"fastpack.memory is .* predicted to take"):
        compiled(Wide(), "aot_eager", memory=ROWS * 64, fold="on")(torch.randn(ROWS, WIDTH))


def test_tiles_that_cannot_be_made_cost_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: Any) -> int:
        raise RuntimeError("no tiles")

    monkeypatch.setattr(backend, "has_regions", fail)
    with pytest.raises(Exception, match="predicted to take"), pytest.warns(UserWarning, match="no tiles"):
        compiled(Wide(), "aot_eager", memory=2 * ROWS * 256 * 4, fold="on", strict=False)(torch.randn(ROWS, WIDTH))


class AlongRows(Wide):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer[1](F.gelu(layer[0](x).cumsum(-2)))  # type: ignore[index]
        return x.square().mean()


@pytest.mark.parametrize(("kind", "count"), [(AlongRows, 3), (Wide, 2 + 3)], ids=["none", "two tries"])
def test_pieces_are_compiled_once(kind: type[Wide], count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run once; and layers as often as the tiles are tried, which is never where there are none."""
    lowered: list[str] = []

    def lower(gm: GraphModule, inputs: Any, options: Any, salt: str, report: Any, place: Any, step: Any) -> Any:
        lowered.append(place.name)
        return original(gm, inputs, options, salt, report, place, step)

    original = backend.lower
    monkeypatch.setattr(backend, "lower", lower)
    with contextlib.suppress(MemoryBudgetError):
        compiled(kind(), "aot_eager", memory=700_000, fold="on")(torch.randn(ROWS, WIDTH))
    assert len(lowered) == count, lowered


def test_each_try_begins_with_the_graph_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's passes change the captured graph, and leave new nodes without the examples that tiles are made by."""

    def lower(gm: GraphModule, *given: Any) -> Any:
        try:
            return original(gm, *given)
        finally:
            for node in gm.graph.nodes:
                node.meta.pop("example_value", None)

    original = backend.lower
    monkeypatch.setattr(backend, "lower", lower)
    with fxpasses.inspect.record() as record:
        compiled(Wide(), "aot_eager", memory=2 * ROWS * 256 * 4, fold="on")(torch.randn(ROWS, WIDTH)).backward()
    assert record.figures("memory")["tiles"] > 1


def test_one_kind_of_layers_with_rows_suffices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the kind that was compiled last decided whether there could be tiles."""
    answers = iter([True, False])
    monkeypatch.setattr(backend, "has_regions", lambda piece: next(answers))
    step, piece = Step(budget=1, before=0), GraphModule({}, Graph())
    assert backend._tiled(piece, step) is piece and backend._tiled(piece, step) is piece
    assert step.could_tile
