"""A compilation that takes long says so on standard error, and how far it is."""

from __future__ import annotations

import io
import re
import sys
import time
import uuid

import pytest
import torch

from fxpasses.compiler import lowering_segments, progress
from tests.support import compiled


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch):
    """The code of a function that was never compiled before; everything takes long."""
    monkeypatch.setattr(progress, "AFTER", 0.0)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    name = f"step_{uuid.uuid4().hex}"
    scope: dict[str, object] = {}
    exec(f"def {name}(): pass", scope)
    return scope[name].__code__


def told(code, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is printed while three pieces are compiled."""
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.compiling(code):
        progress.expect(3)
        for _ in range(2):
            progress.piece_is_done()
        if stream.isatty():
            while "2 of 3" not in stream.getvalue():
                time.sleep(0.01)
    return stream.getvalue()


def test_a_log_gets_one_line_for_each_function(code, monkeypatch):
    first = told(code, io.StringIO(), monkeypatch)
    assert re.fullmatch(rf"fxpasses: compiling {code.co_name} \(0 s.*\) \.\.\. FXPASSES_QUIET=1 hides this\.\n", first)
    assert told(code, io.StringIO(), monkeypatch) == ""


def test_a_terminal_shows_how_far_it_is_and_is_cleared(code, monkeypatch):
    shown = told(code, _Terminal(), monkeypatch)
    assert f"compiling {code.co_name} (0 s, 2 of 3 pieces)" in shown
    assert shown.endswith("\r\x1b[K") and "\n" not in shown


@pytest.mark.parametrize(("name", "value"), [(progress.VARIABLE, "1"), ("RANK", "3")])
def test_silence(name, value, code, monkeypatch):
    monkeypatch.setenv(name, value)
    assert told(code, io.StringIO(), monkeypatch) == ""


def test_what_is_quick_is_not_told_of(code, monkeypatch):
    monkeypatch.setattr(progress, "AFTER", 60.0)
    assert told(code, io.StringIO(), monkeypatch) == ""


def test_a_closed_stream_stops_nothing(code, monkeypatch):
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    with progress.compiling(code):
        pass


def test_pieces_of_a_folded_graph_are_counted(monkeypatch):
    layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(4))
    expected, done = [], []
    monkeypatch.setattr(lowering_segments.progress, "expect", expected.append)
    monkeypatch.setattr(lowering_segments.progress, "piece_is_done", lambda: done.append(1))

    def step(x: torch.Tensor) -> torch.Tensor:
        x = x.sin()
        for layer in layers:
            x = layer(layer(layer(x)))
        return x.square().sum()

    compiled(step, "aot_eager", fold="on")(torch.randn(4, 8)).backward()
    assert expected == [len(done)] and len(done) > 1
