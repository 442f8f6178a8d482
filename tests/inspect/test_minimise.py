"""Graphs made smaller: whatever `fails` asks for stays, what is not needed goes, and what is left is a graph."""

from __future__ import annotations

import random

import pytest

from fxpasses.inspect.codec import graph_line, header, parse
from fxpasses.inspect.minimise import minimise
from fxpasses.inspect.model import MAIN, Graph, Node, Run
from tests.inspect.stages import call, given, random_stage, ref, result, stage, tensor


def targets(graph: Graph) -> list[str]:
    return [node.target for region in graph.captured.regions for node in region.nodes if node.op.startswith("call")]


def relu(name: str, *inputs: str, target: str = "torch.relu") -> Node:
    return call(name, target, *map(ref, inputs), values=[tensor(4, storage=hash(name) % 1000)])


def is_a_graph(graph: Graph) -> bool:
    """Reading a record checks that every argument stands before its use."""
    return bool(parse([header(Run()), graph_line(graph)]).graphs)


def test_what_is_needed_stays_and_inputs_take_the_place_of_the_rest():
    nodes = [given("x", values=[tensor(4)])]
    for number in range(40):
        target = {13: "torch.first", 20: "torch.second"}.get(number, "torch.relu")
        nodes.append(relu(f"n{number}", nodes[-1].name, target=target))
    graph = Graph(stages=[stage(*nodes, result("n39", "n5"))])
    tried = []

    def fails(smaller: Graph) -> bool:
        assert is_a_graph(smaller)
        tried.append(smaller)
        return {"torch.first", "torch.second"} <= set(targets(smaller))

    found = minimise(graph, fails)
    assert targets(found) == ["torch.first", "torch.second"]
    assert len(tried) < 60
    tried.clear()
    assert targets(minimise(graph, fails, suspects=["n20"])) == ["torch.first", "torch.second"]
    assert targets(tried[0])[-1] == "torch.second"  # the suspect was tried first


@pytest.mark.parametrize("target", ["_operator.setitem", "_operator.iadd", "torch.Tensor.add_"])
def test_what_writes_to_a_value_stays_with_it(target):
    memory = tensor(4, storage=7)
    nodes = [
        given("x", values=[tensor(4, storage=1)]),
        call("zeros", "torch.zeros", 4, values=[memory]),
        call("write", target, ref("zeros"), {"slice": [None, 2, None]}, 1),
        call("other", target, ref("x"), {"slice": [None, 2, None]}, 1),
        relu("bad", "zeros", target="torch.bad"),
        result("bad", "x"),
    ]
    graph = Graph(stages=[stage(*nodes)])
    found = minimise(graph, lambda smaller: {"torch.zeros", "torch.bad"} <= set(targets(smaller)))
    assert targets(found) == ["torch.zeros", target, "torch.bad"]


def test_operands_that_a_body_no_longer_takes_go_with_their_cause():
    path = f"{MAIN}/body"
    inner = [
        Node("p", "placeholder", "p", values=[tensor(4)]),
        Node("q", "placeholder", "q", values=[tensor(4)]),
        relu("bad", "p", target="torch.bad"),
        call("sum", "torch.add", ref("bad"), ref("q"), values=[tensor(4)]),
        result("sum"),
    ]
    nodes = [
        given("x", values=[tensor(4)]),
        given("y", values=[tensor(4)]),
        relu("a", "y"),
        call("run", "checkpoint", {"body": path}, ref("x"), ref("a")),
        call("get", "getitem", ref("run"), 0, values=[tensor(4)]),
        result("get"),
    ]
    graph = Graph(stages=[stage(*nodes, bodies={path: ("run", inner)})])
    found = minimise(graph, lambda smaller: is_a_graph(smaller) and "torch.bad" in targets(smaller))
    assert targets(found) == ["checkpoint", "getitem", "torch.bad"]
    assert [node.name for node in found.captured.regions[0].nodes if node.op == "placeholder"] == ["x"]


def test_an_assertion_stays_with_its_number():
    nodes = [
        given("x", values=[tensor(4)]),
        Node("i", "call_method", "item", [ref("x")], binds=["u0"], scalar="u0"),
        Node("ge", "call_function", "_operator.ge", [ref("i"), 0], scalar="u0 >= 0"),
        call("check", "torch._check", ref("ge")),
        call("bad", "torch.bad", ref("i"), values=[tensor("u0")]),
        relu("more", "bad"),
        result("more"),
    ]
    found = minimise(Graph(stages=[stage(*nodes)]), lambda smaller: "torch.bad" in targets(smaller))
    assert targets(found) == ["item", "_operator.ge", "torch._check", "torch.bad"]


@pytest.mark.parametrize("seed", range(30))
def test_every_candidate_is_a_graph(seed):
    graph = Graph(stages=[random_stage(random.Random(seed), size=20)])
    for node in graph.captured.regions[0].nodes:
        if node.op.startswith("call") and node.target in ("relu", "neg", "add"):
            node.values = [tensor(4)]
    wanted = "add" if "add" in targets(graph) else "relu"
    found = minimise(graph, lambda smaller: is_a_graph(smaller) and wanted in targets(smaller))
    assert wanted in targets(found) and found.nodes <= graph.nodes


def test_nothing_smaller_fails():
    graph = Graph(stages=[stage(given("x", values=[tensor(4)]), relu("a", "x"), result("a"))])
    assert minimise(graph, lambda smaller: False) is graph
