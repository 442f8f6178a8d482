"""The registry: a pass is one file and one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import fxpasses
from fxpasses import registry
from fxpasses.options import Options
from fxpasses.passes.pipeline import Context
from fxpasses.report import Report
from tests.support import reports_of


class SineForCosine:
    """A pass: cos(x) is sin(x + π/2)."""

    name = "test_registry"
    exact = False

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        report = Report(self.name)
        for node in gm.graph.find_nodes(op="call_function", target=torch.cos):
            with gm.graph.inserting_before(node):
                shifted = gm.graph.call_function(torch.add, (node.args[0], torch.pi / 2))
            shifted.meta["example_value"] = node.args[0].meta["example_value"]  # type: ignore[union-attr]
            node.target, node.args = torch.sin, (shifted,)
            report.changes.append("a sine for a cosine")
        report.changed = bool(report.changes)
        return report


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> None:
    line = registry.Entry(f"{SineForCosine.__module__}.SineForCosine")
    monkeypatch.setattr(registry, "PASSES", [*registry.PASSES, line])


def test_a_pass_is_added_by_a_line(added: Any) -> None:
    assert Options.parse({"fastpack.passes": ["test_registry"]}).passes == ("test_registry",)
    x = torch.randn(5)
    for run in (
        torch.compile(torch.cos, backend="fastpack", options={"fastpack.lowering": "eager"}),
        torch.compile(torch.cos, backend="inductor", options=fxpasses.inductor_options()),
    ):
        with fxpasses.inspect.record() as record, torch._inductor.config.patch(force_disable_caches=True):
            torch.testing.assert_close(run(x), x.cos())
        assert reports_of(record, "test_registry")[0].changed


def test_each_line_names_a_pass() -> None:
    for entry in registry.PASSES:
        kind = entry.load()
        assert kind.name == entry.name and set(entry.requires) < set(registry.names())


def test_a_pass_runs_only_with_those_that_it_requires() -> None:
    chosen = [entry.name for entry in registry.selected(["live_rows", "chunk_loss", "sparsify_attention"])]
    assert chosen == ["chunk_loss"]
    assert len(registry.selected(registry.names())) == len(registry.PASSES) - 2
