"""Who writes to which memory, and which nodes share some, as names, schemas, bodies and runs on fake tensors tell."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.utils.checkpoint import checkpoint

from fxpasses.graph.aliases import AliasAnalysis, AliasSets, written_operands
from fxpasses.graph.calls import operator_of
from tests.graph.nodes import call
from tests.support import captured


def of_the_user(x, y):
    return x


@pytest.mark.parametrize(
    ("node", "names"),
    [
        (call("add_", "x", "y"), ["x"]),
        (call(operator.iadd, "x", "y"), ["x"]),
        (call("__iadd__", "x", "y"), ["x"]),
        (call(operator.setitem, "x", 0, "y"), ["x"]),
        (call(torch.add, "x", "y", out="y"), ["y"]),
        (call(F.relu, "x", inplace=True), ["x"]),
        (call(F.relu, "x", True), ["x"]),
        (call(torch.ops.aten.add_.Tensor, "x", "y"), ["x"]),
        (call(torch.ops.aten.add.out, "x", "y", out="y"), ["y"]),
        (call(torch.ops.aten.add, "x", "y"), []),
        (call(torch.add, "x", "y"), []),
        (call(operator.and_, "x", "y"), []),
        (call("__and__", "x", "y"), []),
        (call(of_the_user, "x", "y"), ["x", "y"]),
    ],
)
def test_what_a_node_writes_to_by_its_name_and_schema(node, names):
    assert [operand.name for operand in written_operands(node)] == names


@pytest.mark.parametrize("is_packet", [False, True])
def test_an_operator_of_another_library_writes_to_what_its_schema_says(is_packet):
    with torch.library._scoped_library("fxpasses_test_aliases", "DEF") as library:
        library.define("fill(Tensor x, Tensor(a!) y) -> ()")
        packet = torch.ops.fxpasses_test_aliases.fill
        node = call(packet if is_packet else packet.default, "x", "y")
        assert [operand.name for operand in written_operands(node)] == ["y"]


def analysed(program, *inputs) -> tuple[AliasAnalysis, dict[str, Node]]:
    gm = captured(program, *inputs)
    placeholder = gm.graph.find_nodes(op="placeholder")[0]
    nodes = {operator_of(node): node for node in gm.graph.nodes}
    analysis = AliasAnalysis(gm.graph, placeholder.meta["example_value"].fake_mode)
    return analysis, nodes | {"x": placeholder}


def test_a_write_through_a_view_is_a_write_to_what_it_views():
    def program(x):
        y = x * 2
        y.view(-1).transpose(0, -1).add_(1)
        return y.sum()

    analysis, nodes = analysed(program, torch.ones(2, 3))
    assert analysis.writer(nodes["mul"], nodes["mul"], None) is nodes["add_"]
    assert not analysis.is_constant(nodes["view"])
    assert analysis.is_constant(nodes["x"])
    assert analysis.is_pure(nodes["view"])
    assert list(analysis.users(nodes["view"], nodes["add_"], None)) == [nodes["sum"]]


def test_a_write_that_only_a_run_shows():
    def program(x, mean, var):
        return F.batch_norm(x, mean, var, training=True)

    analysis, nodes = analysed(program, torch.ones(2, 3), torch.zeros(3), torch.ones(3))
    mean, var = (node for node in analysis.positions if node.name in ("l_mean_", "l_var_"))
    assert not analysis.is_constant(mean)
    assert not analysis.is_constant(var)
    assert analysis.is_constant(nodes["x"])


def body_that(writes=False, views=False):
    def body(x):
        if writes:
            x.add_(1)
        return x.view(-1) if views else x * 2

    return body


@pytest.mark.parametrize(("writes", "views"), [(False, False), (True, False), (False, True)])
def test_a_checkpoint_writes_and_returns_what_its_body_does(writes, views):
    def program(x):
        x = x.sin()
        y = checkpoint(body_that(writes, views), x, use_reentrant=False)
        z = y.cos()
        y.mul_(2)
        return x + 1, z

    gm = captured(program, torch.ones(2, 3))
    fake_mode = gm.graph.find_nodes(op="placeholder")[0].meta["example_value"].fake_mode
    analysis = AliasAnalysis(gm.graph, fake_mode)
    nodes = {operator_of(node): node for node in gm.graph.nodes}
    checkpointed = nodes["tag_activation_checkpoint"]
    assert analysis.is_pure(checkpointed) is not writes
    expected = checkpointed if writes else nodes["mul_"] if views else None
    assert analysis.writer(nodes["sin"], nodes["sin"], None) is expected


def test_a_checkpoint_does_not_write_to_what_its_body_only_reads():
    def body(x, w):
        w.detach().clamp_(-1, 1)
        return x * w

    gm = captured(lambda x, w: checkpoint(body, x, w, use_reentrant=False), torch.ones(2), torch.ones(2))
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.tag_activation_checkpoint)
    assert [operand.name for operand in written_operands(call)] == ["l_w_"]


def test_an_unknown_higher_order_operator_may_do_anything():
    graph = Graph()
    x = graph.placeholder("x")
    with FakeTensorMode():
        x.meta["example_value"] = torch.ones(2)
        node = graph.call_function(torch.ops.higher_order.cond, (x,))
        node.meta["example_value"] = torch.ones(2)
    assert written_operands(node) == [x]
    assert AliasSets(graph.nodes).meet([node], [x])


def test_a_result_that_is_put_into_an_operand_is_a_write():
    def program(x):
        y = x * 2
        torch.add(y, 1, out=y)
        return y.sum()

    analysis, nodes = analysed(program, torch.ones(3))
    assert analysis.writer(nodes["mul"], nodes["mul"], None) is nodes["add"]


def test_inputs_in_one_are_one_memory():
    def program(x, y):
        y.add_(1)
        return x.sum()

    gm = captured(program, torch.ones(2), torch.ones(2))
    y, x = gm.graph.find_nodes(op="placeholder")  # in the order in which the program asks for them
    fake_mode = x.meta["example_value"].fake_mode
    assert AliasAnalysis(gm.graph, fake_mode).is_constant(x)
    assert not AliasAnalysis(gm.graph, fake_mode, [x, y]).is_constant(x)
