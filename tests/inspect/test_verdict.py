"""The verdict on a run comes first, on the terminal, in the summary, on the page and in the record's text."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import fxpasses.inspect
from fxpasses.inspect import end_of_run, html
from fxpasses.inspect.verdict import said, verdict
from fxpasses.report import Reason, Refusal, Report
from tests.support import compiled


def model(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = x + F.one_hot(torch.arange(8) // lengths[0], 8).float() * torch.where(x > 0)[0].numel()
        for part in x.split(lengths.tolist()):
            x = x + part.sum()
    return x


def test_it_comes_first_everywhere() -> None:
    with fxpasses.inspect.record() as record:
        compiled(model)(torch.randn(8, 8), torch.tensor([3, 5]))
    line = said(record)[0]
    assert line.startswith("what changed: ") and "host reads →" in line, line
    assert str(record).startswith(line)
    assert fxpasses.inspect.report(record).splitlines()[1] == line
    assert html.page_data(record)["said"][0] == line
    history = end_of_run.History(graphs=[end_of_run.Graph(0, "x.py:1", "rewritten", record.graphs[0].reports)])
    assert end_of_run.text(history).replace("\n      ", " ").splitlines()[2].strip() == line


def test_each_kind_of_saving_has_its_words() -> None:
    reports = [
        Report("live_rows", True, figures={"sets": 2}),
        Report("chunk_loss", True, figures={"logits_bytes": 3 << 20}),
        Report("fold_layers", True, figures={"layers": 12, "kinds": 1}),
        Report("group_experts", True, figures={"loops_grouped": 1}),
        Report("group_experts", True, figures={"loops_grouped": 2}),
        Report("offload_activations", True, figures={"bytes_moved": 5 << 20}),
        Report("offload_activations", False, figures={"bytes_moved": 1 << 40}),
    ]
    assert verdict(reports) == (
        "what changed: only rows that can reach the loss are computed; "
        "3 loops over experts → one product by groups each; 3.0 MiB of logits never stand in full; "
        "12 layers compiled as 1; 5.0 MiB of activations wait off the device"
    )


def test_why_nothing_changed() -> None:
    small, random = Refusal("a", Reason.SMALL), Refusal("b", Reason.RANDOM)
    reports = [Report("hoist_metadata", refusals=[small, random, small]), Report("live_rows")]
    assert verdict(reports) == "what changed: nothing: 2 × it is small (hoist_metadata)"
    assert verdict([Report("live_rows")]) == "what changed: nothing: no pass found what it could leave out"


def test_without_a_graph_there_is_none() -> None:
    with fxpasses.inspect.record() as record:
        pass
    assert said(record) == [] and str(record) == "no graph was compiled"
