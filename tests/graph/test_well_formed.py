"""What is found wrong with a graph that a pass leaves, in the graph itself and in the bodies of its checkpoints."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from fxpasses.errors import PassError
from fxpasses.graph.copying import copy_graph_module
from fxpasses.graph.regions import CHECKPOINT
from fxpasses.graph.well_formed import check_well_formed
from tests.support import captured

pytestmark = pytest.mark.usefixtures("capture_flags")


def layer(x: Tensor, lengths: Tensor) -> Tensor:
    rows = torch.ones(lengths.max().item(), x.shape[1])
    return x * torch.tanh(rows * 2).sum(0)


def program(x: Tensor, lengths: Tensor) -> Tensor:
    return checkpoint(layer, x, lengths, use_reentrant=False) + layer(x, lengths)


def body_of(gm: GraphModule) -> GraphModule:
    (call,) = gm.graph.find_nodes(op="call_function", target=CHECKPOINT)
    return getattr(gm, call.args[0].target)


def first_use_comes_last(gm: GraphModule) -> None:
    tanh = next(node for node in gm.graph.nodes if node.target is torch.tanh)
    tanh.append(tanh.args[0])


def size_is_read_last(gm: GraphModule) -> None:
    """No node has the number as an operand, so that only the tensor's size tells."""
    item = next(node for node in gm.graph.nodes if node.target == "item")
    for user in list(item.users):
        user.args, user.kwargs = torch.fx.map_arg((user.args, user.kwargs), lambda n: 4 if n is item else n)
    gm.graph.output_node().prepend(item)


@pytest.mark.parametrize("within", [lambda gm: gm, body_of], ids=["graph", "body"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (first_use_comes_last, "malformed.*before it has been defined"),
        (size_is_read_last, "with a size u.* that is read only later"),
    ],
)
def test_what_is_malformed(
    damage: Callable[[GraphModule], None], message: str, within: Callable[[GraphModule], GraphModule]
) -> None:
    before = captured(program, torch.randn(6, 4), torch.tensor([2, 4]))
    after = copy_graph_module(before)
    check_well_formed(after, before)
    damage(within(after))
    with pytest.raises(PassError, match=message):
        check_well_formed(after, before)


def test_an_operand_that_the_body_does_not_take() -> None:
    before = captured(program, torch.randn(6, 4), torch.tensor([2, 4]))
    after = copy_graph_module(before)
    (call,) = after.graph.find_nodes(op="call_function", target=CHECKPOINT)
    call.args = (*call.args, call.args[-1])
    with pytest.raises(PassError, match="with 3 operands for 2 placeholders"):
        check_well_formed(after, before)


def test_what_was_so_before_is_not_the_passs_fault() -> None:
    before = captured(program, torch.randn(6, 4), torch.tensor([2, 4]))
    size_is_read_last(before)
    check_well_formed(copy_graph_module(before), before)
