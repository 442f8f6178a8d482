"""The diff by example: one kind of change a test, and what it says of it."""

from __future__ import annotations

import pytest

from fxpasses.inspect.changes import diff
from fxpasses.inspect.collapse import collapse, is_border, ranges
from fxpasses.inspect.model import MAIN, Node, Region, Stage
from fxpasses.inspect.readable import input_name
from tests.inspect.stages import call, given, ref, result, stage, tensor


def told(before: Stage, after: Stage) -> list[str]:
    changes = [change for change in diff(before, after).changes if not is_border(change)]
    return [f"{c.kind.value} {c.node.target}{': ' + c.detail if c.detail else ''}" for c in changes]


BEFORE = [given("x"), call("a", "torch.relu", ref("x"), line=1), call("b", "torch.neg", ref("a"), line=2), result("b")]


def checkpointed(*inner: Node, operands: list[str], main: list[Node] = BEFORE[:2], name: str = "captured") -> Stage:
    path = f"{MAIN}/body"
    run = call("run", "checkpoint", {"body": path}, *map(ref, operands), line=9)
    nodes = [*main, run, call("get", "getitem", ref("run"), 0), result("get")]
    return stage(*nodes, bodies={path: ("run", list(inner))}, name=name)


def operand(name: str) -> Node:
    return Node(name, "placeholder", name)


X, Y, TANH = given("x"), given("y"), call("t", "torch.tanh", ref("p"), line=3)


def layer(*operands: str) -> Stage:
    inputs = [given(name) for name in ("x", "y", "z", "w", "mask")]
    inner = [*(operand(f"p{name}") for name in operands), result(f"p{operands[-1]}")]
    return checkpointed(*inner, operands=list(operands), main=inputs)


CHANGES: dict[str, tuple[Stage, Stage, list[str]]] = {
    "removed": (
        stage(*BEFORE),
        stage(X, call("b", "torch.neg", ref("x"), line=2), result("b")),
        ["removed torch.relu", "rewired torch.neg: argument 0: relu → x"],
    ),
    "added": (
        stage(*BEFORE),
        stage(*BEFORE[:3], call("c", "torch.tanh", ref("b"), values=[tensor(4, "u0")]), result("c")),
        ["rewired output: argument 0.0: neg → tanh", "added torch.tanh: float32[4, u0]"],
    ),
    "rewired to another input": (
        stage(X, Y, call("a", "torch.relu", ref("x"), line=1), result("a")),
        stage(X, Y, call("a", "torch.relu", ref("y"), line=1), result("a")),
        ["rewired torch.relu: argument 0: x → y"],
    ),
    "rewired to another constant": (
        stage(X, call("a", "torch.add", ref("x"), 1, line=1), result("a")),
        stage(X, call("a", "torch.add", ref("x"), 2, line=1), result("a")),
        ["rewired torch.add: argument 1: 1 → 2"],
    ),
    "rewired to another slice": (
        stage(X, call("a", "_operator.getitem", ref("x"), {"slice": [1, None, None]}, line=1), result("a")),
        stage(X, call("a", "_operator.getitem", ref("x"), {"slice": [None, 2, None]}, line=1), result("a")),
        ["rewired _operator.getitem: argument 1: 1: → :2"],
    ),
    "one of two equal values goes, as in common subexpression elimination": (
        stage(
            X, call("a", "torch.relu", ref("x")), call("b", "torch.relu", ref("x")),
            call("c", "torch.neg", ref("a")), call("d", "torch.tanh", ref("b")), result("c", "d"),
        ),
        stage(
            X, call("a", "torch.relu", ref("x")),
            call("c", "torch.neg", ref("a")), call("d", "torch.tanh", ref("a")), result("c", "d"),
        ),
        ["removed torch.relu", "rewired torch.tanh: argument 0: relu → relu"],
    ),
    "inside a body": (
        checkpointed(operand("p"), TANH, result("t"), operands=["a"]),
        checkpointed(operand("p"), call("s", "torch.sin", ref("p"), line=4), result("s"), operands=["a"]),
        ["removed torch.tanh", "added torch.sin"],
    ),
    "one operand less in front is no change of those behind": (
        layer("mask", "x", "y", "z"), layer("x", "y", "z", "w"), ["rewired checkpoint: operands: −mask +w"],
    ),
    "moved into a body": (
        checkpointed(operand("p"), TANH, result("t"), operands=["a"]),
        checkpointed(
            operand("p"), call("a", "torch.relu", ref("p"), line=1), call("t", "torch.tanh", ref("a"), line=3),
            result("t"), operands=["x"], main=BEFORE[:1],
        ),
        ["moved torch.relu: from the main graph to the body body", "rewired checkpoint: argument 1: relu → x"],
    ),
}  # fmt: skip


@pytest.mark.all_cases
@pytest.mark.parametrize("name", CHANGES)
def test_one_kind_of_change(name: str) -> None:
    before, after, expected = CHANGES[name]
    assert told(before, after) == expected


def test_changed_metadata():
    def program(value):
        return stage(given("x"), call("a", "torch.relu", ref("x"), values=[value]), result("a"))

    shape = told(program(tensor(4, 8)), program(tensor(4, "u0")))
    assert shape == ["changed metadata torch.relu: shape [4, 8] → [4, u0]"]
    dtype = told(program(tensor(4)), program(tensor(4, dtype="bfloat16")))
    assert dtype == ["changed metadata torch.relu: dtype float32 → bfloat16"]


def test_another_numbering_of_symbols_is_no_change():
    def program(first, second):
        total = f"{min(first, second)} + {max(first, second)}"  # SymPy sorts the terms by name
        return stage(
            given("x"),
            Node("i", "call_method", "item", [ref("x")], binds=[first], scalar=first),
            Node("j", "call_method", "item", [ref("i")], binds=[second], scalar=second),
            call("a", "torch.full", ref("i"), values=[tensor(total, first)]),
            result("a", "j"),
        )

    assert told(program("u0", "u1"), program("u7", "u3")) == []
    swapped = program("u0", "u1")
    swapped.regions[0].nodes[3].values = [tensor("u0 + u1", "u1")]
    assert told(program("u0", "u1"), swapped) == ["changed metadata torch.full: shape [u0 + u1, u0] → [u0 + u1, u1]"]


def test_inputs_are_called_as_the_program_calls_them():
    weight = given("l_w")
    weight.source_name = "L['self']._modules['layers']._modules['0']._parameters['weight']"
    assert input_name(weight) == "layers.0.weight"
    weight.source_name = "L['batch']['lengths']"
    assert input_name(weight) == "batch['lengths']"


def test_moved_to_the_prologue():
    read = [Node("m", "call_method", "max", [ref("lengths")]), Node("i", "call_method", "item", [ref("m")])]
    body = [
        operand("p"),
        operand("q"),
        call("f", "torch.full", ref("q"), line=3),
        call("t", "torch.mul", ref("p"), ref("f"), line=4),
    ]
    inputs = [given("x"), given("lengths")]
    before = checkpointed(*body, result("t"), operands=["x", "i"], main=[*inputs, *read])
    packed = Node("packed_0", "placeholder", "packed_0", values=[tensor(8)])
    after_body = [operand("p"), operand("packed_0"), call("t", "torch.mul", ref("p"), ref("packed_0"), line=4)]
    after = checkpointed(*after_body, result("t"), operands=["x", "packed_0"], main=[*inputs, packed])
    moved = [Node("m", "call_method", "max", [ref("input_0")]), Node("i", "call_method", "item", [ref("m")])]
    full = call("f", "torch.full", ref("i"), line=3)
    after.regions.append(Region("prologue/host", [operand("input_0"), *moved, full, result("f")], inputs=[1]))
    assert told(before, after) == [
        "moved to the prologue max",
        "moved to the prologue item",
        "moved to the prologue torch.full",
        "rewired torch.mul: argument 1: full → packed_0",
        "rewired checkpoint: argument 2: item → packed_0",
        "added packed_0: float32[8] from the prologue",
    ]


def test_equal_layers_are_told_once():
    def layers(target):
        nodes = [given("x")]
        for layer in range(28):
            for line, name in ((1, "torch.relu"), (2, target)):
                nodes.append(
                    call(f"n{len(nodes)}", name, ref(nodes[-1].name), line=line, module=f"model.layers.{layer}.mlp")
                )
        return stage(*nodes, result(nodes[-1].name))

    before, after = layers("torch.gelu"), layers("torch.silu")
    sections = collapse(diff(before, after), before, after)
    assert [section.title for section in sections] == ["layers 0–27: the same changes ×28"]
    lines = [(line.kind.value, line.source, line.module, line.what, len(line.changes)) for line in sections[0].lines]
    what = "gelu: torch.gelu → torch.silu"
    assert lines == [("rewired", "model.py:2", "model.layers.*.mlp", what, 28)]


def test_ranges():
    assert ranges([0, 1, 2, 5, 7, 8]) == "0–2, 5, 7–8"


def test_layers_that_differ_in_the_names_of_their_symbols_are_told_once():
    def layers(*sizes):
        nodes = [given("x")]
        for i, size in enumerate(sizes):
            nodes.append(call(f"a{i}", "relu", ref(nodes[-1].name), module=f"layers.{i}", values=[tensor(size, 4)]))
        return stage(*nodes, result("a1"))

    before, after = layers("u7", "u10"), layers(32, 32)
    [section] = collapse(diff(before, after), before, after)
    assert section.layers == [0, 1] and [len(line.changes) for line in section.lines] == [2]
    assert len(collapse(diff(before, layers(32, 16)), before, layers(32, 16))) == 2  # but what they become must agree
