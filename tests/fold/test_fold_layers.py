"""A layer that stands several times becomes calls of one body, which is compiled once; the numbers stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses
import fxpasses.inspect
from fxpasses.base import overrides
from fxpasses.fold.fold_layers import FoldLayers
from fxpasses.inspect import Record
from fxpasses.offload.runtime import chain
from fxpasses.options import Offload, Options
from fxpasses.passes.pipeline import run_passes
from fxpasses.report import Reason, Report
from tests.fold.programs import Block, Plan, Stack, report_on, tokens
from tests.support import captured, compiled, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

BLOCKS = Plan(("block",) * 4)
EVERY = frozenset(range(8))

FOLDED = {
    "blocks": (BLOCKS, [4]),
    "checkpointed": (Plan(("block",) * 4, checkpointed=EVERY), [4]),
    "two kinds in turn": (Plan(("attention", "routed") * 3), [3, 3]),
    "two kinds in any order": (Plan(("block", "attention", "attention", "block", "attention")), [3, 2]),
    "dense layers first": (Plan(("block", "block", *("routed",) * 4)), [4, 2]),
    "with dropout": (Plan(("dropout",) * 4), [4]),
    "with dropout, checkpointed": (Plan(("dropout",) * 4, checkpointed=EVERY), [4]),
    "one layer for all": (Plan(("view",) * 4, shared=True), [4]),
    "writes to buffers": (Plan(("counting",) * 4), [4]),
    "frozen weights": (Plan(("block",) * 4, frozen=frozenset({0, 1})), [2, 2]),
    "values between layers": (Plan(("block",) * 4, skip=True), [3]),  # the first layer's input has a third use
    "autocast": (Plan(("attention",) * 4, autocast=True), [4]),
    "one of another size": (Plan(("block", "block", "wide", "block", "block")), [4]),
    "another constant": (Plan(("block",) * 5, scales=(0.5, 0.5, 0.25, 0.5, 0.5)), [5]),
    "two calls behind each layer": (Plan(("attention",) * 4, scales=(0.5,) * 4, skip=True), [3]),
}


def step(model: nn.Module, program: Any, number: int = 0, length: int = 6) -> dict[str, Tensor]:
    """Loss, gradients and buffers of one step."""
    model.zero_grad()
    torch.manual_seed(number)
    logits, recorded = program(tokens(number, length))
    loss = logits.float().square().mean() + sum(value.float().sin().sum() for value in recorded)
    loss.backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **grads, **{name: b.clone() for name, b in model.named_buffers()}}


def assert_same_steps(plan: Plan, lowering: str = "aot_eager", tolerance: float = 0.0, **options: Any) -> Record:
    """Three steps, of two lengths, against eager mode."""
    torch.manual_seed(0)
    model = Stack(plan)
    twin = copy.deepcopy(model)
    with fxpasses.inspect.record() as record:
        program = compiled(model, lowering, **({"fold": "on"} | options))
        for number, length in ((0, 6), (1, 6), (2, 9)):
            expected, actual = step(twin, twin, number, length), step(model, program, number, length)
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    return record


def report_of(record: Record) -> Report:
    return reports_of(record, "fold_layers")[0]


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", FOLDED)
def test_equal_layers_become_one_body(name):
    plan, layers = FOLDED[name]
    report = report_of(assert_same_steps(plan))
    assert sorted((int(change.split("×")[1].split()[0]) for change in report.changes), reverse=True) == layers
    assert report.figures == {"layers": sum(layers), "kinds": len(layers), "pieces": sum(layers)}


def test_the_graph_before_and_after():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

        def forward(self, h):
            for layer in self.layers:
                h = torch.nn.functional.gelu(layer(h))
            return h.sum()

    gm = captured(Two(), torch.randn(3, 4, requires_grad=True))
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    result = run_passes([FoldLayers()], gm, examples, Options(fold="on", strict=True))
    names = [str(getattr(n.target, "__name__", n.target)) for n in result.gm.graph.nodes if n.op != "placeholder"]
    assert names == ["layer_0", "call_layer", "getitem", "call_layer", "getitem", "sum", "output"]
    body = [n.op + " " + str(getattr(n.target, "__name__", "")) for n in result.gm.layer_0.graph.nodes]
    assert body == ["placeholder "] * 3 + ["call_function linear", "call_function gelu", "output "]


def test_layers_that_are_no_modules_are_found_by_their_period():
    def program(x, weights):
        for w in weights:
            y = torch.nn.functional.layer_norm(x, (4,))
            x = x + torch.relu(y @ w) @ w.T
        return x.sum()

    gm = captured(program, torch.randn(3, 4), [torch.randn(4, 4) for _ in range(5)])
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    (report,) = run_passes([FoldLayers()], gm, examples, Options(fold="on", strict=True)).reports
    assert report.changes == [report.changes[0]]
    assert "×5" in report.changes[0]


def test_a_checkpoint_is_as_large_as_its_body():
    stack = Stack(Plan(("attention",) * 4, checkpointed=EVERY))

    class Scaled(nn.Module):
        """Its first part, without products, repeats in more calls than there are checkpoints."""

        def __init__(self):
            super().__init__()
            self.stack = stack

        def forward(self, ids):
            for _ in range(12):
                ids = (ids * 3 + 1) % 7
            return self.stack(ids)

    assert any("checkpoint" in change and "×4" in change for change in report_on(Scaled(), fold="on").changes)


class Written(nn.Module):
    """Each layer writes its result into memory that all share."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = torch.ones(2, 1, 8) * ids[..., None]
        out = torch.zeros(4, *x.shape)
        for number, layer in enumerate(self.layers):
            x = layer(x)
            out[number] = x
        return x, [out]


class NoGrad(nn.Module):
    """Gradients are off from the middle of the first layer to that of the last."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = torch.ones(2, 1, 8) * ids[..., None]
        with torch.no_grad():
            for layer in self.layers:
                x = layer(x)
        return x * self.layers[0].up.weight.sum(), []


REFUSED = {
    "in place": (lambda: Stack(Plan(("in_place",) * 4)), "inductor", Reason.WRITTEN_ACROSS),
    "shared memory": (Written, "inductor", Reason.WRITTEN_ACROSS),
    "no_grad around": (NoGrad, "inductor", Reason.CHANGES_MODE),
    "recorded": (lambda: Stack(Plan(("block",) * 4, recorded=frozenset({1, 2}))), "aot_eager", Reason.SUMS_REORDERED),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_crosses_layers_otherwise_is_refused(name):
    make, lowering, reason = REFUSED[name]
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(step(model, compiled(model, "aot_eager", fold="on")), step(twin, twin), rtol=0, atol=0)
    report = report_on(make(), fold="on", lowering=lowering)
    assert reason in [refusal.reason for refusal in report.refusals]
    assert report.figures.get("layers", 0) < 4


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lowering": "inductor", "mode": "reduce-overhead"}, Reason.WHOLE_GRAPH),
        ({"lowering": "inductor", "inductor": {"freezing": True}}, Reason.WHOLE_GRAPH),
    ],
)
def test_options_that_need_the_whole_graph(options, reason):
    report = report_on(Stack(BLOCKS), **({"fold": "on"} | options))
    assert [refusal.reason for refusal in report.refusals] == [reason]
    assert not report.changed


def test_verify_runs_a_folded_graph():
    assert report_of(assert_same_steps(BLOCKS, verify=True)).changed


@pytest.mark.quick(1)
@pytest.mark.parametrize(("changes", "folded"), [("fold_layers:0", 0), ("fold_layers:1", 1)])
def test_the_environment_limits_the_kinds(changes, folded, monkeypatch):
    """By which `fxpasses bisect` finds the kind that is to blame."""
    monkeypatch.setattr(overrides, "_changes", {})
    monkeypatch.setenv("FXPASSES_CHANGES", changes)
    report = report_of(assert_same_steps(Plan(("attention", "routed") * 3)))
    assert report.figures.get("kinds", 0) == folded
    assert Reason.LEFT_OUT in [refusal.reason for refusal in report.refusals]


def test_the_environment_leaves_the_pass_out(monkeypatch):
    monkeypatch.setenv("FXPASSES_PASSES", "hoist_metadata")
    assert not reports_of(assert_same_steps(BLOCKS), "fold_layers")


def test_a_new_length_is_a_symbol_of_the_body():
    record = assert_same_steps(Plan(("attention",) * 4), dynamic=True)
    assert all(report.changed for report in reports_of(record, "fold_layers"))


def test_off():
    assert not reports_of(assert_same_steps(BLOCKS, fold="off"), "fold_layers")


def test_where_a_piece_does_not_compile_the_graph_is_compiled_whole(monkeypatch):
    monkeypatch.setattr("fxpasses.compiler.backend.lower_segments", lambda *args: 1 / 0)
    torch.manual_seed(0)
    model = Stack(BLOCKS)
    program = compiled(model, "aot_eager", fold="on", strict=False)
    with pytest.warns(UserWarning, match="It is compiled whole"):
        actual = step(model, program)
    torch.testing.assert_close(actual, step(model, model), rtol=0, atol=0)


def test_without_gradients():
    model = Stack(BLOCKS)
    with torch.no_grad():
        expected, _ = model(tokens())
        actual, _ = compiled(model, "aot_eager", fold="on")(tokens())
    assert torch.equal(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan", [Plan(("dropout",) * 4, checkpointed=EVERY), Plan(("attention", "routed") * 4)], ids=["dropout", "kinds"]
)
def test_inductor_compiles_each_body_once(plan, monkeypatch):
    import fxpasses.compiler.backend as backend

    pieces: list[str] = []
    lower = backend.lower

    def counting(gm, *args):
        pieces.append(gm.__class__.__name__)
        return lower(gm, *args)

    monkeypatch.setattr(backend, "lower", counting)
    with torch._inductor.config.patch(fallback_random=True):  # to compare with eager mode
        record = assert_same_steps(plan, "inductor", tolerance=1e-5, fold="on", dynamic=False)
    assert report_of(record).changed
    kinds = len(set(plan.layers))
    lengths = 2
    assert len(pieces) == lengths * (kinds + 2)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_activations_of_each_call_leave_and_come_back(tmp_path, monkeypatch, checkpointed):
    plan = Plan(("attention",) * 4, checkpointed=EVERY if checkpointed else frozenset())
    options = {"offload": "disk", "offload.directory": str(tmp_path), "offload.min_bytes": 0}
    ahead, taken = [], chain._taken
    monkeypatch.setattr(chain, "_taken", lambda *args: ahead.append(taken(*args)) or ahead[-1])
    before = fxpasses.offload_stats()
    record = assert_same_steps(plan, dynamic=False, **options)
    after = fxpasses.offload_stats()
    assert report_of(record).changed
    moved = next(report for report in reports_of(record, "offload_activations") if report.summary)
    assert moved.summary.startswith("in each of 4 layers")
    per_layer, steps = moved.figures["tensors_moved"] // 4, 3
    assert after.tensors_out - before.tensors_out >= steps * 4 * per_layer
    assert after.tensors_in - before.tensors_in == after.tensors_out - before.tensors_out
    if checkpointed:  # while one layer runs backward, the input of the layer before comes back
        assert per_layer == 1
        assert [found is not None for found in ahead] == [False, True, True, True] * steps  # the head's has stayed


def test_a_budget_of_the_device_is_for_the_graph_of_all_layers():
    report = report_on(Stack(BLOCKS), fold="on", lowering="aot_eager", offload=Offload("disk", device_budget=0))
    assert [refusal.reason for refusal in report.refusals] == [Reason.BUDGETED]
