"""Records in other tools' forms: PyTorch's structured trace, Graphviz, a program that runs."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fxpasses.inspect.drawing import dot, svg
from fxpasses.inspect.reproduction import CannotReproduce, reproduction
from tests.inspect.programs import recorded
from tests.inspect.stages import call, given, ref, result, stage

ROOT = Path(__file__).parents[2]


ARTEFACTS = {
    "fxpasses_record": "json",
    "fxpasses_0_captured": "string",
    "fxpasses_7_hoist_metadata": "string",
    "fxpasses_report": "string",
}
TLPARSE = shutil.which("tlparse", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


@pytest.fixture
def trace(tmp_path):
    """The structured trace of a program."""
    program = (
        "from tests.inspect.programs import inputs, model\n"
        "from tests.support import compiled\n"
        "compiled(model)(*inputs())\n"
    )
    environment = {**os.environ, "TORCH_TRACE": str(tmp_path / "trace"), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], env=environment, cwd=ROOT, check=True)
    [log] = (tmp_path / "trace").glob("*.log")
    return log


@pytest.mark.slow
def test_the_structured_trace_holds_our_artefacts(trace):
    lines = [line for line in trace.read_text().splitlines() if '"artifact"' in line and "fxpasses" in line]
    events = [json.loads(line[line.index("{") :]) for line in lines]
    assert {event["artifact"]["name"]: event["artifact"]["encoding"] for event in events} == ARTEFACTS
    assert {event["frame_id"] for event in events} == {0}


@pytest.mark.slow
@pytest.mark.skipif(TLPARSE is None, reason="needs tlparse (pip install tlparse), not installed")
def test_tlparse_shows_our_artefacts(trace, tmp_path):
    out = tmp_path / "out"
    subprocess.run([str(TLPARSE), "--no-browser", "-o", str(out), str(trace)], check=True, capture_output=True)
    shown = (out / "index.html").read_text()
    for artefact in ARTEFACTS:
        [file] = out.glob(f"*/{artefact}_*")
        assert str(file.relative_to(out)) in shown
    assert "3 host reads became 1" in next(out.glob("*/fxpasses_report_*")).read_text()


def test_a_drawing_quotes_names():
    hostile = 'a"]; evil [label="\\'
    text = dot(stage(given("x"), call("n", hostile, ref("x")), result("n")), "n")
    assert '\\"]; evil [label=\\"\\\\' in text


@pytest.mark.skipif(shutil.which("dot") is None, reason="needs Graphviz (dot), which is not installed")
def test_a_drawing_as_svg():
    graph = recorded().graphs[0]
    assert "<svg" in svg(dot(graph.final, "matmul", before=graph.captured))


def written(tmp_path, graph):
    file = tmp_path / "reproduction.py"
    file.write_text(reproduction(graph, ["hoist_metadata"]))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, str(file)], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_a_reproduction_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPASSES_RECORD_VALUES", "1")
    done = written(tmp_path, recorded().graphs[0])
    assert "eager mode and the passes agree" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target", "os.system"),
        ("target", "torch.load"),
        ("target", "torch.relu(0); import os; os.system"),
        ("name", "x = __import__('os')"),
        ("args", [{"constant": "__import__('os').system('true')"}]),
    ],
)
def test_a_reproduction_holds_no_code_of_the_record(field, value):
    graph = copy.deepcopy(recorded().graphs[0])
    node = next(node for node in graph.captured.regions[1].nodes if node.target == "torch.tanh")
    setattr(node, field, value)
    with pytest.raises(CannotReproduce):
        reproduction(graph, [])
