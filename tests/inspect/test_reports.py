"""What is computed from a record and shown: figures, symbols, reasons, text."""

from __future__ import annotations

import io

import pytest
import torch

import fxpasses.inspect
from fxpasses.base.units import amount, duration, size
from fxpasses.inspect.dataflow import Dataflow
from fxpasses.inspect.figures import before_and_after, figures, saved_and_moved
from fxpasses.inspect.ledger import ledger
from fxpasses.inspect.memory import timeline
from fxpasses.inspect.model import Graph, Node, Partition, Run, Saved, Stage
from fxpasses.inspect.readable import readable
from fxpasses.inspect.text import Style, report, step_rows
from fxpasses.inspect.whynot import near_misses
from fxpasses.report import Reason, Refusal, Report, Transfer
from tests.inspect.programs import recorded, refused
from tests.inspect.stages import call, given, ref, result, stage, tensor


def test_figures_before_and_after():
    before, after = before_and_after(recorded().graphs[0])
    assert (before.host_reads, after.host_reads, after.prologue_reads) == (3, 0, 1)
    assert (before.inputs_from_prologue, after.inputs_from_prologue) == (0, 1)
    assert before.flops == after.flops == 3 * 2 * 8 * 8 * 4
    assert before.operators > after.operators


FLOPS = [
    (lambda x: torch.nn.functional.linear(x, torch.ones(5, 4)), 2 * 3 * 4 * 5),
    (lambda x: x @ torch.ones(4, 7), 2 * 3 * 4 * 7),
    (lambda x: torch.einsum("ab,bc->ac", x, torch.ones(4, 7)), 2 * 3 * 4 * 7),
    (lambda x: torch.addmm(torch.ones(7), x, torch.ones(4, 7)), 2 * 3 * 4 * 7),
    (lambda x: torch.nn.functional.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3), 2 * 2 * 3 * 3 * 4),
    (lambda x: torch.nn.functional.conv1d(x.view(1, 1, 12), torch.ones(2, 1, 3)), 2 * 2 * 10 * 3),
    (lambda x: x.sin(), 0),
]


@pytest.mark.all_cases
@pytest.mark.parametrize(("program", "expected"), FLOPS)
def test_flops_are_those_of_the_counter_of_torch(program, expected):
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.ones(3, 4)
    with FlopCounterMode(display=False) as counter:
        program(x)
    found = figures(recorded(program, x).graphs[0].captured).flops
    assert found == expected
    assert counter.get_total_flops() in (expected, 0)  # 0: attention without a fused kernel counts as its products


def test_memory_is_freed_after_its_last_use_and_views_are_free():
    mib = 1 << 20

    def value(storage):
        found = tensor(mib // 4, storage=storage)
        found.bytes = mib
        return [found]

    program = stage(
        given("x", values=value(0)),
        call("view", "view", ref("x"), values=value(0)),
        call("a", "relu", ref("view"), values=value(1)),
        call("b", "relu", ref("a"), values=value(2)),
        call("c", "relu", ref("b"), values=value(3)),
        result("c"),
    )
    points = timeline(Dataflow(program))
    assert [point.bytes // mib for point in points] == [1, 1, 2, 3, 3, 2]
    assert figures(program).bytes_moved == 3 * 2 * mib


def test_the_ledger_of_symbols():
    def item(name, symbol):
        return Node(name, "call_method", "item", [ref("x")], binds=[symbol], scalar=symbol)

    program = stage(
        given("x"),
        item("i", "u0"), item("unused", "u1"),
        Node("e", "call_function", "_operator.eq", [ref("i"), 4], scalar="Eq(u0, 4)"),
        call("check", "torch._check", ref("e")),
        call("f", "torch.full", ref("i"), values=[tensor("u0")]),
        call("g", "torch.relu", ref("f"), values=[tensor("u0 + u7")]),
        result("g"),
    )  # fmt: skip
    accounts = {account.symbol: account for account in ledger(program)}
    assert accounts["u0"].binders == ["i"] and accounts["u0"].users == ["e", "f"] and accounts["u0"].tensors == 2
    assert accounts["u0"].assertions == ["check"] and accounts["u0"].problem == ""
    assert accounts["u1"].problem == "bound, and never used"
    assert accounts["u7"].problem == "orphan: used, and bound nowhere"


def test_no_pass_leaves_an_orphan():
    assert not [a for a in ledger(recorded().graphs[0].final) if a.problem.startswith("orphan")]


def refusing():
    return recorded(refused, torch.randn(4), torch.tensor([3, 5]), torch.tensor(2.0))


def test_why_not_names_reason_line_and_cost():
    [miss] = [miss for miss in near_misses(refusing().graphs[0]) if miss.host_reads]
    assert miss.reason == Reason.ACTIVATION.value and miss.target == "item"
    assert miss.host_reads == miss.count == 2
    assert miss.where.startswith("programs.py:") and "(lengths * weight).sum().item()" in miss.code


def test_why_not_speaks_of_modules_and_inputs_and_not_of_nodes():
    body = [Node("p", "placeholder", "p"), call("t", "torch.tanh", ref("p"), module="layers.1.mlp"), result("t")]
    last = Node("item", "call_method", "item", [ref("got")], host_read=True, module="layers.2.mlp")
    before = stage(
        given("l_x_"), call("run_1", "checkpoint", {"body": "main/b"}, ref("l_x_")),
        call("got", "getitem", ref("run_1"), 0), last, result("item"), bodies={"main/b": ("run_1", body)},
    )  # fmt: skip
    before.regions[0].nodes[0].source_name = "L['x']"
    refusals = [Refusal("item", Reason.ACTIVATION, f"`{name}`", module="layers.2.mlp") for name in ("run_1", "l_x_")]
    graph = Graph(stages=[before, Stage("hoist_metadata", report=Report("hoist_metadata", refusals=refusals))])
    assert [miss.text for miss in near_misses(graph)] == ["what the checkpoint of `layers.*.mlp` returns", "`x`"]


def test_refusals_of_offload_are_of_its_own_graphs():
    """A node of the captured graph that has the same name has nothing to do with it."""
    before = stage(given("x"), call("mul", "torch.nonsense", ref("x"), values=[tensor(4)], line=9), result("mul"))
    report = Report("offload_activations", refusals=[Refusal("mul", Reason.NEEDED_SOON, "", "model.py:3")])
    graph = Graph(stages=[before, Stage("offload_activations", report=report, partitioned=True)])
    graph.partition = Partition([1], [1], [Saved("mul", 4096, False, 0, 0, 0)])
    [miss] = near_misses(graph)
    assert (miss.target, miss.bytes, miss.code, miss.where) == ("mul", 4096, "", "model.py:3")


def test_what_is_saved_on_the_device_and_off_it():
    graph = Graph(stages=[stage(given("x"), result("x"))])
    assert saved_and_moved(graph) == (0, 0) and step_rows(graph) == []
    graph.partition = Partition([1], [1], [Saved("a", 100, False, 0, 0, 0), Saved("b", 40, False, 0, 0, 0)])
    assert saved_and_moved(graph) == (140, 0)
    report = Report("offload_activations", transfers=[Transfer("a", 100, 0, 0, 0)])
    graph.stages.append(Stage("offload_activations", report=report, partitioned=True))
    assert saved_and_moved(graph) == (40, 100)
    assert step_rows(graph) == [
        ["saved for backward, on the device", "140 B", "40 B", ""],
        ["moved off the device and back", "0 B", "100 B", ""],
    ]


def test_what_forward_keeps_for_backward():
    """As many bytes as autograd's hooks see, without what is an input; and the counter's FLOPs."""
    from torch.utils.flop_counter import FlopCounterMode

    def program(x, w, v):
        return torch.tanh(torch.tanh(x @ w) @ v)

    given = [torch.randn(8, 4), torch.randn(4, 16, requires_grad=True), torch.randn(16, 4, requires_grad=True)]
    [graph] = recorded(program, *given, lowering="aot_eager").graphs
    partition, seen = graph.partition, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t):
        with FlopCounterMode(display=False) as counter:
            out = program(*given)
        forward = counter.get_total_flops()
        with FlopCounterMode(display=False) as counter:
            out.sum().backward()
    kept = {t.untyped_storage()._cdata: t.nbytes for t in seen if all(t is not given_ for given_ in given)}
    inputs = {t.untyped_storage()._cdata for t in given}
    assert partition.saved_bytes == sum(size for storage, size in kept.items() if storage not in inputs) == 640
    assert (sum(partition.forward), sum(partition.backward)) == (forward, counter.get_total_flops())
    line = program.__code__.co_firstlineno + 1
    assert {saved.where for saved in partition.saved if not saved.is_input} == {f"test_reports.py:{line}"}
    assert recorded(program, *given).graphs[0].partition is None  # nobody partitions for the eager lowering


def test_a_loop_over_experts_that_stays_costs_its_queries():
    def loop(x, idx, weight):
        out = torch.zeros_like(x)
        for e in range(3):
            token = torch.where(idx == e)[0]
            y = x[token] @ weight[e]
            out.index_add_(0, token, y - y.mean(0))
        return out

    given = torch.randn(6, 4), torch.randint(0, 3, (6,)), torch.randn(3, 4, 4)
    graph = recorded(loop, *given, passes=["group_experts"], experts="grouped").graphs[0]
    [miss] = near_misses(graph)
    assert (miss.reason, miss.host_reads, miss.bytes) == (Reason.NOT_ALIKE.value, 3, 0)
    assert "left alone: 1 candidate; 3 host reads a step stay" in report(Run(graphs=[graph]), Style())


def test_the_report_tells_a_newcomer_what_changed():
    text = report(recorded(), Style())
    assert "3 host reads became 1" in text
    assert "layers 0–2: the same changes ×3" in text
    assert "↑ to the prologue" in text and "programs.py" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_the_report_tells_what_was_left_alone():
    text = report(refusing(), Style())
    assert "left alone, and why" in text and "costs 2 host reads" in text
    assert "depends on a floating-point input" in text


def test_colour_is_for_terminals_alone(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Style.of(Terminal()).color and not Style.of(io.StringIO()).color
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Style.of(Terminal()).color
    assert "\x1b" not in report(recorded(), Style(color=False))


def test_a_stage_reads_like_the_program():
    text = readable(recorded().graphs[0].captured)
    assert "# main/wrap_body_0, run by tag_activation_checkpoint" in text
    assert "torch.tanh(matmul)  # programs.py:" in text


def test_words_for_numbers():
    assert [amount(n) for n in (12, 12_345, 4_560_000_000)] == ["12", "12.3 k", "4.56 G"]
    assert [size(n) for n in (12, 2048, 3 << 30)] == ["12 B", "2.0 KiB", "3.0 GiB"]
    assert [duration(s) for s in (0.0123, 2.34)] == ["12 ms", "2.3 s"]


def test_lazy_names_of_the_package():
    assert fxpasses.inspect.report is report
    with pytest.raises(AttributeError):
        fxpasses.inspect.nothing  # noqa: B018


def test_a_record_tells_what_attention_computed(tmp_path):
    """Of two documents of 256 tokens each, a half of all pairs or less."""

    def program(q, document):
        mask = (document[:, None] == document) & (torch.arange(512)[:, None] >= torch.arange(512))
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    query, documents = torch.randn(1, 2, 512, 8), torch.arange(512) // 256
    with fxpasses.inspect.record() as record:
        for _ in range(2):
            torch.compile(program, backend="fastpack", options={"fastpack.lowering": "eager"})(query, documents)
    taken = record.attention
    assert taken["calls"] == taken["tiled"] == 2 and taken["pairs"] == 2 * 2 * 512**2
    assert 0 < taken["pairs_computed"] <= taken["pairs"] / 2 and taken["flops"] == taken["pairs"] * 2 * (8 + 8)
    record.save(tmp_path / "record")
    for text in (str(record), fxpasses.inspect.report(fxpasses.inspect.load(tmp_path / "record"))):
        assert f"attention: {100 * taken['pairs_computed'] / taken['pairs']:.0f} % of 1.05 M pairs of tokens" in text
