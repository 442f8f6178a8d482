"""The metadata closure: what belongs to it, who looks at it from outside, and why the rest does not belong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fxpasses.graph.calls import operator_of
from fxpasses.graph.regions import Region
from fxpasses.metadata.closure import find_closure
from fxpasses.report import Reason, Refusal
from tests.support import captured

pytestmark = pytest.mark.usefixtures("capture_flags")

X, LENGTHS = torch.ones(6, 6), torch.tensor([1, 2, 3])
Program = Callable[..., Any]


class Analysed:
    """The closure of a program's graph. Nodes are spoken of by their operators."""

    def __init__(self, program: Program, *inputs: Any, banned: str = "nothing") -> None:
        gm = captured(program, *(inputs or (X, LENGTHS)))
        self.main = Region(gm)
        self.nodes = [node for region in self.main.walk() for node in region.gm.graph.nodes]
        fake_mode = self.main.placeholders()[0].meta["example_value"].fake_mode
        refused = {node: Refusal(node.name, Reason.SMALL) for node in self.nodes if operator_of(node) == banned}
        self.closure = find_closure(self.main, fake_mode, refused)

    @property
    def inside(self) -> list[str]:
        return [operator_of(node) for node in self.nodes if node in self.closure.values and node.op.startswith("call")]

    @property
    def uses(self) -> list[tuple[str, str]]:
        """(user, what it looks at), in program order."""
        return [(operator_of(use.user), operator_of(use.operand)) for use in self.closure.uses]

    @property
    def reasons(self) -> dict[str, Reason]:
        """Why what nearly belonged does not."""
        return {operator_of(node): refusal.reason for node, refusal in self.closure.refusals.items()}


def mask_of(lengths: Any) -> Any:
    mask = torch.zeros(6, 6)
    mask[: lengths.max().item()] = 1
    return mask


def test_the_example_of_the_docstring() -> None:
    def program(x: Any, lengths: Any) -> Any:
        longest = lengths.max().item()
        mask = torch.full((6, 6), 0.0)
        mask[:longest] = 1
        return x + mask

    found = Analysed(program)
    assert found.inside == ["max", "item", "full", "setitem"]
    assert found.uses == [("add", "full")]
    (use,) = found.closure.uses
    ((memory, version),) = use.versions
    assert memory.version == version != memory.alloc  # after the write
    assert not found.closure.refusals


def test_values_of_a_checkpoints_body_belong_to_it_with_those_of_the_graph_around() -> None:
    def body(x: Any, mask: Any, lengths: Any) -> Any:
        return x * mask * lengths.max().item() + torch.arange(6)

    def program(x: Any, lengths: Any) -> Any:
        return checkpoint(body, x, mask_of(lengths), lengths, use_reentrant=False)

    found = Analysed(program)
    assert found.inside == ["max", "item", "arange", "zeros", "max", "item", "setitem"]  # the body's first
    assert all(use.region.parent is found.main for use in found.closure.uses)
    items = {found.closure.values[node].number for node in found.nodes if operator_of(node) == "item"}
    assert len(items) == 1  # the body asks again what the graph around it knows


def test_looks_at_an_activations_size_and_dtype_are_no_reads_of_it() -> None:
    def program(x: Any, lengths: Any) -> Any:
        y = x.sin()
        return y.new_zeros(3) + lengths, torch.arange(6).type_as(y) * y

    assert Analysed(program).inside == ["new_zeros", "add", "arange", "type_as"]


def test_assertions_of_metadata_are_collected() -> None:
    def program(x: Any, lengths: Any) -> Any:
        torch._check(lengths.sum().item() == 6)
        return x * lengths.max()

    asserted = [operator_of(node) for _, node in Analysed(program).closure.assertions]
    assert asserted and set(asserted) <= {"_check", "_assert_scalar", "sym_constrain_range_for_size"}


def test_what_the_graph_returns_is_a_copy() -> None:
    found = Analysed(lambda x, lengths: (x.sin(), lengths + 1))
    assert {operator_of(node) for node in found.closure.copied} == {"add"}
    assert found.uses == [("", "add")]


# Why not


def written_by_a_layer(x: Any, lengths: Any) -> Any:
    mask = mask_of(lengths)
    mask.add_(x)
    return mask.sum()


def read_before_its_last_write(x: Any, lengths: Any) -> Any:
    mask = mask_of(lengths)
    y = x * mask
    mask[0] = 7
    return y * mask


def returned_with_a_view(x: Any, lengths: Any) -> Any:
    mask = mask_of(lengths)
    return x.sin(), mask, mask[1:]


def returned_in_part(x: Any, lengths: Any) -> Any:
    return x.sin(), mask_of(lengths)[1:]


def returned_twice(x: Any, lengths: Any) -> Any:
    mask = mask_of(lengths)
    return x.sin(), mask, mask.contiguous()


def returned_by_a_body(x: Any, lengths: Any) -> Any:
    return checkpoint(lambda x, lengths: (x.sin(), mask_of(lengths)), x, lengths, use_reentrant=False)


def random(x: Any, lengths: Any) -> Any:
    return x * torch.rand(6) * lengths.max()


# The program, the operator that does not belong (or the input), and the reason.
LEFT: list[tuple[Program, str, Reason]] = [
    (written_by_a_layer, "zeros", Reason.WRITTEN_BY_LAYER),
    (read_before_its_last_write, "zeros", Reason.READ_BEFORE_WRITE),
    (returned_with_a_view, "zeros", Reason.ESCAPES),
    (returned_in_part, "zeros", Reason.ESCAPES),
    (returned_twice, "zeros", Reason.ESCAPES),
    (returned_by_a_body, "zeros", Reason.ESCAPES),
    (random, "rand", Reason.RANDOM),
]


@pytest.mark.parametrize(("program", "name", "reason"), LEFT, ids=lambda value: getattr(value, "__name__", ""))
def test_what_does_not_belong_and_why(program: Program, name: str, reason: Reason) -> None:
    found = Analysed(program, X, LENGTHS.clone())
    assert name not in found.inside
    assert found.reasons == {name: reason}


def test_an_input_that_is_written_is_no_root() -> None:
    def program(x: Any, lengths: Any) -> Any:
        longest = lengths.max()
        lengths.add_(1)
        return x * longest

    found = Analysed(program, X, LENGTHS.clone())
    assert found.inside == []
    (lengths,) = (node for node in found.main.placeholders() if node.name == "l_lengths_")
    assert found.closure.obstacles[lengths][0] is Reason.INPUT_WRITTEN


def test_nothing_in_a_function_that_is_mapped_belongs() -> None:
    def program(x: Any, lengths: Any) -> Any:
        return torch.vmap(lambda row: row + torch.arange(6))(x) * lengths.max()

    found = Analysed(program)
    assert found.inside == ["max"]
    (arange,) = (node for node in found.nodes if operator_of(node) == "arange")
    assert found.closure.obstacles[arange][0] is Reason.HIGHER_ORDER


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (torch.ones(3), Reason.ACTIVATION),
        (torch.nn.Parameter(torch.arange(3), requires_grad=False), Reason.PARAMETER),
    ],
)
def test_inputs_that_are_no_roots(given: Any, reason: Reason) -> None:
    found = Analysed(lambda x, other: x[:3, :3] * other.max(), X, given)
    obstacles = found.closure.obstacles
    assert found.inside == []
    assert reason in {obstacles[node][0] for node in found.main.placeholders()}


def test_a_node_that_may_not_belong_takes_with_it_what_is_made_of_it() -> None:
    def program(x: Any, lengths: Any) -> Any:
        return x * (lengths.cumsum(0) + 1).max() * lengths.max()

    assert Analysed(program).inside == ["cumsum", "add", "max", "max"]
    found = Analysed(program, banned="cumsum")
    assert found.inside == ["max"] and found.reasons == {"cumsum": Reason.SMALL}
