"""Reproductions made smaller: what the failure needs stays, and everything else goes."""

from __future__ import annotations

import pytest

from fxpasses.inspect import minimise
from fxpasses.inspect.minimise import Request, Search
from fxpasses.inspect.reproduction import AGREE, DISAGREE, reproduction
from tests.inspect.programs import recorded


@pytest.mark.parametrize(
    ("needed", "gone"),
    [
        (("torch.tanh(",), ("checkpoint(", "operator.matmul(", "] = 1")),
        (("checkpoint(", "torch.tanh("), ()),
        (("] = 1", "torch.tanh("), ("checkpoint(", ".max(")),
    ],
    ids=["an operator of a body", "a checkpoint", "a write"],
)
def test_what_a_failure_needs_stays(tmp_path, monkeypatch, capsys, needed, gone):
    def printed_by(file):
        program = file.read_text().partition("torch.manual_seed")[2].partition("INPUTS")[0]
        return DISAGREE if all(part in program for part in needed) else AGREE

    monkeypatch.setattr(minimise, "printed_by", printed_by)
    monkeypatch.setenv("FXPASSES_RECORD_VALUES", "1")
    graph, file = recorded().graphs[0], tmp_path / "reproduction.py"
    file.write_text(reproduction(graph, []))
    assert file.read_text().count("torch.tanh") == 3
    Search(Request(str(file), "disagree", graph.function, [], {"FXPASSES_CHANGES": "a:1"}, 60), str(tmp_path)).run()
    text = file.read_text()
    program = text.partition("torch.manual_seed")[2].partition("INPUTS")[0]
    assert program.count("torch.tanh(") == 1 and all(part in program for part in needed), program
    assert not any(part in program for part in gone) and "# programs.py:" in program, program
    assert "FXPASSES_CHANGES" not in text and "agree" not in program  # the limit was not needed
    nodes, trials = map(int, capsys.readouterr().out.splitlines()[-1].split())
    assert nodes < graph.nodes / 2 and trials < 60
