"""What a record holds, in memory and in a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch

import fxpasses.inspect
from fxpasses.base import once
from fxpasses.inspect import codec, recording
from fxpasses.inspect.codec import RecordError
from fxpasses.inspect.model import MAIN, Run
from tests.inspect.programs import inputs, model, recorded, refused
from tests.support import compiled


def regions(stage):
    return [region.path for region in stage.regions]


def test_a_graph_before_and_after_each_pass():
    graph = recorded().graphs[0]
    assert [stage.name for stage in graph.stages] == ["captured", "hoist_metadata"]
    bodies = [f"main/wrap_body_{i}" for i in range(3)]
    assert regions(graph.captured) == [MAIN, *bodies]
    assert regions(graph.final) == [MAIN, *bodies, "prologue/host"]
    assert (graph.compile_id, graph.frame, graph.recompile, graph.outcome) == ("0/0", 0, 0, "rewritten")
    assert graph.options["lowering"] == "eager"
    assert graph.reports[0].changed and graph.stages[1].seconds > 0


def test_a_node_tells_what_it_is_and_where_it_comes_from():
    body = recorded().graphs[0].captured.regions[1]
    nodes = {node.target: node for node in body.nodes}
    item, matmul = nodes["item"], nodes["_operator.matmul"]
    assert item.host_read and item.binds == ["u0"] and item.scalar == "u0"
    assert item.source.function == "layer" and item.source.code == "mask[:, : lengths.max().item()] = 1"
    assert matmul.values[0].shape == [8, 4] and matmul.values[0].bytes == 128 and matmul.flops == 2 * 8 * 8 * 4
    assert matmul.args[0] == {"node": "mask"}
    setitem = next(node for node in body.nodes if node.target == "_operator.setitem")
    assert setitem.args[1] == [{"slice": [None, None, None]}, {"slice": [None, {"node": item.name}, None]}]


def test_what_another_thread_left_behind_is_no_source(monkeypatch):
    """Two threads that run a checkpoint without a compiler can leave torch.fx in this state for good."""
    left = {"stack_trace": '  File "other.py", line 7, in other\n    other()\n', "recompute": 1, "custom": {"mine": 1}}
    monkeypatch.setattr(torch.fx.traceback, "current_meta", left)
    monkeypatch.setattr(torch.fx.traceback, "should_preserve_node_meta", True)
    sources = {str(node.source) for node in recorded().graphs[0].captured.regions[1].nodes if node.source}
    assert sources and all(source.startswith("programs.py:") for source in sources)
    assert torch.fx.traceback.current_meta == {"custom": {"mine": 1}}


def test_modules_have_paths():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])

        def forward(self, x):
            for inner in self.layers:
                x = inner(x)
            return x

    nodes = recorded(Block(), torch.randn(2, 4)).graphs[0].captured.regions[0].nodes
    found = [(node.module, node.module_class) for node in nodes if node.short_target == "linear"]
    assert found == [("layers.0", "Linear"), ("layers.1", "Linear")]


def test_recompilations_and_several_graphs():
    with fxpasses.inspect.record() as record:
        function = compiled(lambda x, lengths: x * lengths.tolist()[0], dynamic=False)
        for size in (2, 3):
            function(torch.ones(4), torch.ones(size, dtype=torch.int64))
    assert [(graph.compile_id, graph.recompile) for graph in record.graphs] == [("0/0", 0), ("0/1", 1)]


def test_a_warm_cache_compiles_nothing_and_records_nothing():
    function = compiled(model)
    function(*inputs())
    with fxpasses.inspect.record() as record:
        function(*inputs())
    assert record.graphs == [] and str(record) == "no graph was compiled"


def test_records_nest():
    with fxpasses.inspect.record() as outer, fxpasses.inspect.record() as inner:
        compiled(model)(*inputs())
    assert len(outer.graphs) == len(inner.graphs) == 1
    assert not recording._open


def test_nothing_is_looked_at_while_no_record_is_open(monkeypatch):
    def never(*args):
        raise AssertionError("a snapshot was taken")

    monkeypatch.setattr("fxpasses.inspect.snapshot.snapshot", never)
    once.forget("recording")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(model)(*inputs())


def test_a_failure_to_record_leaves_the_program_alone(monkeypatch):
    def fails(*args):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fxpasses.inspect.snapshot.snapshot", fails)
    once.forget("recording")
    x, lengths = inputs()
    with fxpasses.inspect.record() as record, pytest.warns(UserWarning, match="recording a graph failed.*on purpose"):
        assert torch.equal(compiled(model)(x, lengths), model(x, lengths))
    assert record.graphs == []


def test_a_pass_that_fails_is_in_the_record(monkeypatch):
    def fails(self, gm, context):
        raise RuntimeError("on purpose")

    monkeypatch.setattr("fxpasses.metadata.hoist_metadata.HoistMetadata.__call__", fails)
    with fxpasses.inspect.record() as record, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.compile(model, backend="fastpack", options={"fastpack.lowering": "eager"})(*inputs())
    assert record.graphs[0].stages[7].failure == "RuntimeError: on purpose"
    assert [report.pass_name for report in record.graphs[0].reports] == [
        "hoist_writes",
        "group_experts",
        "factor_adapters",
        "live_rows",
        "chunk_loss",
        "sparsify_attention",
        "omit_masks",
        "coalesce_reads",
        "split_topk",
    ]


# Files


def test_what_is_saved_is_loaded(tmp_path):
    record = recorded(refused, torch.randn(4), torch.tensor([3, 5]), torch.tensor(2.0))
    assert record.graphs[0].reports[0].refusals
    record.save(tmp_path / "record.jsonl")
    assert fxpasses.inspect.load(tmp_path / "record.jsonl") == record


def test_the_file_is_json_lines_with_a_version(tmp_path):
    recorded().save(tmp_path / "record.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    assert lines[0]["schema"] == "fxpasses.record" and lines[0]["version"] == 1
    assert [line["compile_id"] for line in lines[1:]] == ["0/0"]


def saved(tmp_path):
    recorded().save(tmp_path / "record.jsonl")
    return tmp_path / "record.jsonl"


def test_a_line_that_a_crash_cut_off_is_left_out(tmp_path):
    path = saved(tmp_path)
    text = path.read_text()
    path.write_text(text + text.splitlines()[1][:100])
    assert len(fxpasses.inspect.load(path).graphs) == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: "", "is not a record"),
        (lambda text: "\x00", "is not JSON"),
        (lambda text: '{"a": 1}\n', "is not a record"),
        (lambda text: text.replace('"version":1', '"version":99'), "has version 99"),
        (lambda text: text.replace('"args":[{"node"', '"args":7,"x":[{"node"', 1), "is not of type list"),
        (lambda text: text.replace('{"node":"l_lengths_"}', '{"node":"nobody"}'), "'nobody', which does not precede"),
        (lambda text: text.replace('{"node":"l_lengths_"}', '{"node":[]}'), "malformed"),
        (lambda text: text.replace('"frame":0', '"frame":"0"'), "frame: '0' is not of type int"),
        (lambda text: text.replace('"frame":0', '"frame":NaN'), "is not JSON"),
        (lambda text: text.replace('"frame":0', '"frame":' + "[" * 100_000), "is not JSON"),
        (lambda text: text.replace('"call":"tag_activation_checkpoint"', '"call":"nobody"'), "'nobody', which is"),
    ],
)
def test_what_is_no_record_is_refused_in_one_line(tmp_path, damage, message):
    path = saved(tmp_path)
    path.write_text(damage(path.read_text()))
    with pytest.raises(RecordError, match=message) as caught:
        fxpasses.inspect.load(path)
    assert "\n" not in str(caught.value)


def test_a_field_of_a_newer_writer_is_ignored(tmp_path):
    path = saved(tmp_path)
    path.write_text(path.read_text().replace('"frame":0', '"frame":0,"new_field":{"a":1}'))
    assert fxpasses.inspect.load(path).graphs[0].frame == 0


def test_a_reason_of_another_version_is_kept(tmp_path):
    recorded(refused, torch.randn(4), torch.tensor([3, 5]), torch.tensor(2.0)).save(tmp_path / "record.jsonl")
    path = tmp_path / "record.jsonl"
    path.write_text(path.read_text().replace('"name":"ACTIVATION"', '"name":"TOMORROW"'))
    reasons = {refusal.reason for refusal in fxpasses.inspect.load(path).graphs[0].reports[0].refusals}
    assert [(reason.name, isinstance(reason, codec.OtherReason)) for reason in reasons] == [("TOMORROW", True)]


PROGRAM = """
import torch, os, sys
sys.path.insert(0, {root!r})
from tests.inspect.programs import model, inputs
options = {{"fastpack.lowering": "eager"}}
torch.compile(model, backend="fastpack", options=options)(*inputs())
if "--kill" in sys.argv:
    os.kill(os.getpid(), 9)
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("arguments", [[], ["--kill"]])
def test_the_environment_records_a_process(tmp_path, arguments):
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    program = textwrap.dedent(PROGRAM).format(root=root)
    folder = tmp_path / "records" / "deep"
    environment = {**os.environ, "FXPASSES_RECORD": str(folder), "RANK": "3"}
    subprocess.run([sys.executable, "-c", program, *arguments], env=environment, check=not arguments)
    [file] = folder.iterdir()
    assert file.name.startswith("record-rank3-")
    record = fxpasses.inspect.load(file)
    assert record.rank == record.graphs[0].rank == 3 and record.graphs[0].outcome == "rewritten"


WORKERS = """
import os, sys
sys.path.insert(0, {root!r})
import torch
from tests.inspect.programs import inputs, model

def compile_one():
    torch._dynamo.reset()
    torch.compile(model, backend="fastpack", options={{"fastpack.lowering": "eager"}})(*inputs())

compile_one()
for _ in torch.utils.data.DataLoader(range(4), num_workers=1):
    pass
if os.fork() == 0:
    compile_one()
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
def test_each_process_that_compiles_has_its_own_file_and_no_other(tmp_path):
    """A worker of a data loader compiles and writes nothing; a forked process leaves its parent's file alone."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    environment = {**os.environ, "FXPASSES_RECORD": str(tmp_path / "records")}
    environment.pop("RANK", None)
    subprocess.run([sys.executable, "-c", WORKERS.format(root=root)], env=environment, check=True)
    records = [fxpasses.inspect.load(file) for file in (tmp_path / "records").iterdir()]
    assert len({record.pid for record in records}) == len(records) == 2
    assert [len(record.graphs) for record in records] == [1, 1]


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXPASSES_RECORD", str(tmp_path / "file" / "records"))
    once.forget("recording")
    x, lengths = inputs()
    with pytest.warns(UserWarning, match="recording a graph failed"):
        assert torch.equal(compiled(model)(x, lengths), model(x, lengths))


def test_a_process_appends_graph_by_graph(tmp_path, monkeypatch):
    monkeypatch.setenv("FXPASSES_RECORD", str(tmp_path))
    monkeypatch.delenv("RANK", raising=False)
    compiled(model)(*inputs())
    [file] = tmp_path.iterdir()
    assert len(fxpasses.inspect.load(file).graphs) == 1
    compiled(refused)(torch.randn(4), torch.tensor([3, 5]), torch.tensor(2.0))
    assert len(fxpasses.inspect.load(file).graphs) == 2 and list(tmp_path.iterdir()) == [file]


def test_data_is_recorded_only_when_asked_for(monkeypatch):
    def data(graph):
        return [node.data for node in graph.captured.regions[0].nodes if node.op == "placeholder"]

    assert data(recorded().graphs[0]) == [None, None]
    monkeypatch.setenv("FXPASSES_RECORD_VALUES", "1")
    torch._dynamo.reset()
    assert data(recorded().graphs[0]) == [None, [3, 5]]


def handing_on(function):
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


class Decorated(torch.nn.Module):
    @handing_on
    @handing_on
    def forward(self, x):
        if x.shape[0] > 1:
            x = x + 1
        return x.relu()


def test_a_graph_is_called_after_the_program_and_not_after_its_decorators():
    [graph] = recorded(Decorated(), torch.ones(2)).graphs
    line = Decorated.forward.__code__.co_firstlineno  # of the wrapper: the module's own lines follow it
    place, _, rest = graph.function.partition(" ")
    assert rest == "in forward (Decorated)" and int(place.removeprefix("test_record.py:")) > line + 3


def test_what_a_record_says_cannot_command_a_terminal():
    hostile = "a\x1b[2J\x07\x00\r\x9bm\x7f\b\n\tb \\u001b \\\\ é 漢 \u2028"
    lines = [codec.header(Run(program=hostile))]
    read = codec.parse(lines).program
    assert read == "a�[2J����m��\n\tb \\u001b \\\\ é 漢 \u2028"
