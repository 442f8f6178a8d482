"""Value numbering: what is one value and what is another, in which memory it lies, and what may not be numbered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

from fxpasses.graph.refusals import Refused
from fxpasses.graph.values import Entry, Scalar, ValueTable
from fxpasses.report import Reason
from tests.support import captured

LENGTHS = torch.tensor([3, 5, 4])


class Numbered:
    """A program's graph, with numbers for what it computes of integers. `values` are those of its results."""

    def __init__(self, program: Callable[..., Any], *inputs: Any, autocast: Any = lambda node: ()) -> None:
        inputs = inputs or (LENGTHS,)
        gm = captured(lambda *given: (*program(*given), given[-1] + 0), *inputs)  # at least one input is used
        placeholders = gm.graph.find_nodes(op="placeholder")
        self.table = ValueTable(placeholders[0].meta["example_value"].fake_mode)
        self.by_node: dict[Node, Any] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder" and not node.meta["example_value"].is_floating_point():
                self.by_node[node] = self.table.root(node, node.meta["example_value"])
            elif node.op.startswith("call") and all(operand in self.by_node for operand in node.all_input_nodes):
                self.by_node[node] = self.table.apply(node, self.by_node.__getitem__, autocast(node))
        self.graph, self.results = gm.graph, list(gm.graph.output_node().args[0])[:-1]
        self.values = [self.by_node.get(node) for node in self.results]

    def entry(self, value: Any) -> Entry:
        return self.table.entries[value.number]


# The same or not. Each program returns two values.

SAME: dict[str, Callable[[Any], Any]] = {
    "one operator on one operand": lambda n: (n + 1, n + 1),
    "step by step": lambda n: ((n + 1).cumsum(0) * 2, (n + 1).cumsum(0) * 2),
    "factories": lambda n: (torch.zeros(4, 4), torch.zeros(4, 4)),
    "sizes and numbers": lambda n: (torch.arange(n.shape[0]), torch.arange(3)),
    "views": lambda n: (n[1:], n[1:]),
    "parts": lambda n: (n.sort()[1], n.sort()[1]),
    "written alike": lambda n: (torch.zeros(3).add_(n).sum(), torch.zeros(3).add_(n).sum()),
    "itself": lambda n: (n.contiguous() * 2, n * 2),
}
DIFFERENT: dict[str, Callable[[Any], Any]] = {
    "another operator": lambda n: (n + 1, n - 1),
    "another operand": lambda n: (n + 1, (n + 1) + 1),
    "another number": lambda n: (n + 1, n + 2),
    "1 and 1.0": lambda n: (n * 1, n * 1.0),
    "1 and True": lambda n: (n * 1, n * True),
    "0.0 and -0.0": lambda n: (n * 0.0, n * -0.0),
    "by keyword": lambda n: (n.sum(0), n.sum(0, dtype=torch.int32)),
    "another slice": lambda n: (n[1:], n[:1]),
    "another part": lambda n: (n.sort()[0], n.sort()[1]),
    "another order of operands": lambda n: (n - (n + 1), (n + 1) - n),
    "written otherwise": lambda n: (torch.zeros(3).add_(n).sum(), torch.zeros(3).sub_(n).sum()),
    "written once and twice": lambda n: (torch.zeros(3).add_(n).sum(), torch.zeros(3).add_(n).add_(n).sum()),
}


@pytest.mark.parametrize("name", SAME)
def test_what_is_one_value(name: str) -> None:
    one, other = Numbered(SAME[name]).values
    assert one.number == other.number


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_are_two_values(name: str) -> None:
    one, other = Numbered(DIFFERENT[name]).values
    assert one.number != other.number


def test_autocast_is_part_of_a_value() -> None:
    regions = iter([(), (("cpu", torch.bfloat16, True, True),), ()])
    one, other = Numbered(lambda n: (n.float(), n.float()), autocast=lambda node: next(regions)).values
    assert one.number != other.number


# Memory


def test_the_example_of_the_docstring() -> None:
    """Equal steps end at one version, in two places of memory."""

    def program(n: Any) -> Any:
        a, b = torch.full((4, 4), 0), torch.full((4, 4), 0)
        before = a.sum()
        a[2:] = 1
        b[2:] = 1
        return a, b, before, a.sum(), b.sum()

    a, b, before, *sums = Numbered(program).values
    assert a.number == b.number and a.memory is not b.memory
    assert a.memory.version == b.memory.version != a.memory.alloc
    assert sums[0].number == sums[1].number != before.number


def test_a_view_is_an_address_and_reading_it_is_not() -> None:
    def program(n: Any) -> Any:
        a = torch.zeros(4)
        early, read_early = a[1:], a[1:].sum()
        a.add_(n.sum())
        return a, early, a[1:], read_early, a[1:].sum()

    numbered = Numbered(program)
    a, early, late, read_early, read_late = numbered.values
    assert early.number == late.number != a.number and early.memory is late.memory is a.memory
    assert numbered.entry(early).base == a.memory.alloc
    assert read_early.number != read_late.number


def test_a_write_through_a_view_is_a_write_to_what_it_views() -> None:
    def program(n: Any) -> Any:
        a = torch.zeros(4)
        before = a.sum()
        a[1:].add_(n)
        return a, before, a.sum()

    numbered = Numbered(program)
    a, before, after = numbered.values
    assert before.number != after.number
    write = numbered.table.entries[a.memory.version]
    assert (write.kind, write.previous, write.base) == ("write", a.memory.alloc, a.memory.alloc)
    assert numbered.table.entries[write.target or 0].base == a.memory.alloc  # written through the view


def test_what_is_returned_in_place_is_the_operand_itself() -> None:
    a, b = Numbered(lambda n: (a := torch.zeros(3), a.add_(n))).values
    assert a.number == b.number and a.memory is b.memory


def test_operands_of_equal_value_in_one_memory_or_in_two() -> None:
    """It makes a difference to what is written."""

    def program(n: Any) -> Any:
        a, b, c = torch.zeros(3), torch.zeros(3), torch.zeros(3)
        return torch.add(a, 1, out=a).sum(), torch.add(b, 1, out=c).sum(), b.sum()

    itself, other, untouched = Numbered(program).values
    assert len({itself.number, other.number, untouched.number}) == 3


def test_parts_of_a_tuple_are_views_or_new_memory() -> None:
    def program(n: Any) -> Any:
        first, *_ = n.unbind()
        values, order = n.sort()
        return n[:], first, values, order

    numbered = Numbered(program)
    view, first, values, order = numbered.values
    assert first.memory is view.memory and numbered.entry(first).base == view.memory.alloc
    assert numbered.entry(values).base is None
    assert len({view.memory, values.memory, order.memory}) == 3


# What the rest wants to know of a value


def test_how_often_a_value_is_computed() -> None:
    numbered = Numbered(lambda n: (n + 1, n + 1, n + 1, n + 2, n.sort()[0], n.sort()[1]))
    found = [numbered.table.occurrences(numbered.entry(value)) for value in numbered.values]
    assert found == [3, 3, 3, 1, 2, 2]


def test_work_is_more_than_factories_and_views() -> None:
    numbered = Numbered(lambda n: (torch.zeros(4), torch.zeros(4)[1:], n.view(-1), n + 1, (n + 1)[1:]))
    assert [numbered.entry(value).work for value in numbered.values] == [False, False, False, True, False]


@pytest.mark.usefixtures("capture_flags")
def test_numbers_that_the_host_reads() -> None:
    """Two reads of one value are one entry; that their symbols are equal is noted."""

    numbered = Numbered(lambda x, n: (x * n.max().item(), x * n.max().item(), x), torch.ones(3), LENGTHS)
    reads = numbered.graph.find_nodes(op="call_method", target="item")
    one, other = (numbered.by_node[read] for read in reads)
    assert isinstance(one, Scalar) and one.number == other.number
    entry = numbered.entry(one)
    assert entry.read and entry.occurrences == 2
    assert any(pair[0] is entry.fake and pair[1] is reads[1].meta["example_value"] for pair in numbered.table.same)
    assert numbered.table.source_of(entry.fake.node.expr) == (entry.number, None)


@pytest.mark.usefixtures("capture_flags")
def test_sizes_that_the_device_decides() -> None:
    numbered = Numbered(lambda n: ((n > 3).nonzero(), n + 1))
    found = numbered.entry(numbered.values[0])
    assert found.read and found.work
    assert numbered.table.source_of(found.fake.shape[0].node.expr) == (found.number, 0)


def test_a_look_at_size_and_dtype_is_one_value_whatever_is_looked_at() -> None:
    numbered = Numbered(lambda n: (n + 1, n + 2, (n + 1).float()))
    one, other, third = (node for node in numbered.results)
    look = numbered.table.look
    examples = [node.meta["example_value"] for node in (one, other, third)]
    assert look(one, examples[0], [3]).number == look(other, examples[1], [3]).number
    assert look(one, examples[0], [3]).number != look(third, examples[2], [3]).number
    assert look(one, examples[0], [3]).number != look(one, examples[0], [Scalar(0)]).number


# What is refused


REFUSED: dict[str, tuple[Callable[[Any], Any], Reason, str]] = {
    "random": (lambda n: [torch.rand(3)], Reason.RANDOM, "draws"),
    "an input is written": (lambda n: [n.add_(1)], Reason.INPUT_WRITTEN, "writes `l_given_0_`"),
    "an input is written through a view": (lambda n: [n[1:].add_(1)], Reason.INPUT_WRITTEN, "writes `l_given_0_`"),
    "an operand beside a view": (
        lambda n: torch.broadcast_tensors(torch.zeros(3), torch.zeros(2, 3)), Reason.UNKNOWN_OPERATOR, "among other",
    ),
    "views of several": (
        lambda n: torch.meshgrid(n, torch.arange(2), indexing="ij"), Reason.UNKNOWN_OPERATOR, "views of several",
    ),
    "operands alone": (
        lambda n: torch.broadcast_tensors(n, n + 1), Reason.UNSUPPORTED_VALUE, "returns its arguments in a tuple",
    ),
    "two are written": (
        lambda n: [torch._foreach_add_([torch.zeros(3), torch.ones(3)], 1)], Reason.UNKNOWN_OPERATOR, "at once",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_numbered(name: str) -> None:
    program, reason, text = REFUSED[name]
    with pytest.raises(Refused, match=text) as refused:
        Numbered(program, LENGTHS.clone())
    assert refused.value.reason is reason


def test_what_was_refused_is_refused_again() -> None:
    """Without another run: the error is the same object."""
    gm = captured(lambda n: (n + 1, torch.rand(3), torch.rand(3)), LENGTHS)
    table = ValueTable(gm.graph.find_nodes(op="placeholder")[0].meta["example_value"].fake_mode)
    errors = []
    for node in gm.graph.find_nodes(op="call_function", target=torch.rand):
        with pytest.raises(Refused) as refused:
            table.apply(node, lambda operand: None, ())
        errors.append(refused.value)
    assert errors[0] is errors[1] and not table.entries
