"""Each way of running a program issues eager mode's collectives, in its order: captured, broken, given up, recomputed.

Ranks choose among these ways alone, so a difference pairs one rank's collective with another one of the other rank.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.fx import GraphModule

from fxpasses.collectives.eager_sequences import Sequences
from fxpasses.collectives.partitioner import CollectivePartitioner
from fxpasses.dynamo import variants
from fxpasses.errors import MetadataError
from fxpasses.inspect import record
from fxpasses.passes.pipeline import Context
from fxpasses.report import Report
from tests.distributed.breakable_programs import BREAKABLE
from tests.distributed.collective_programs import PROGRAMS, Program, gathered, of_numbers, reduced, twice
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recorded_group import Call, RecordedGroup, assert_same_calls, recorded_group
from tests.support import compiled

X = torch.tensor([0.5, -1.0, 2.0, 0.3])
LENGTHS = torch.tensor([2, 3])


@pytest.fixture
def group() -> Iterator[RecordedGroup]:
    with recorded_group(rank=0) as group:
        yield group


def run(group: RecordedGroup, program: Program, lengths: Tensor = LENGTHS) -> tuple[list[Call], list[Tensor]]:
    """One training step: what it issues, the end of forward among it, and its numbers."""
    x, lengths = X.clone().requires_grad_(), lengths.clone()
    group.calls.clear()
    outputs = program(x, lengths)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    group.calls.append(("end of forward", []))
    # Not from a sum, whose gradient is expanded: torch 2.11 gathers contiguous tensors alone.
    outputs[0].backward(torch.ones_like(outputs[0]))
    assert x.grad is not None
    return list(group.calls), [*(output.detach() for output in outputs), x.grad, lengths]


def assert_same_step(group: RecordedGroup, actual: Program, expected: Program, lengths: Tensor = LENGTHS) -> None:
    calls, numbers = run(group, actual, lengths)
    wanted_calls, wanted = run(group, expected, lengths)
    assert_same_calls(calls, wanted_calls)
    torch.testing.assert_close(numbers, wanted)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_captured_program_issues_what_eager_mode_issues(group: RecordedGroup, name: str, lowering: str) -> None:
    actual = compiled(PROGRAMS[name], lowering)
    for _ in range(2):
        assert_same_step(group, actual, PROGRAMS[name])


def test_as_many_rows_come_back_as_were_sent(group: RecordedGroup) -> None:
    program = PROGRAMS["sent_by_activations"]
    with record() as found:
        assert_same_step(group, compiled(program, "aot_eager"), program)
    assert len(found.graphs) == 1


def test_inductor_issues_what_eager_mode_issues(group: RecordedGroup) -> None:
    names = ["equal_in_each_layer", "checkpoint_with_a_result_that_is_not_used"]

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return sum(PROGRAMS[name](x, lengths) for name in names)

    assert_same_step(group, compiled(program, "inductor"), program)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_the_trace_does_not_issue_a_collective_of_a_number_nor_keep_its_result(
    group: RecordedGroup, lowering: str
) -> None:
    actual = compiled(of_numbers, lowering)
    for size in (2, 2, 3, 5):  # a size, and then any
        assert_same_step(group, actual, of_numbers, torch.ones(size, dtype=torch.int64))


def asks_in_each_layer(x: Tensor, lengths: Tensor) -> Tensor:
    for _ in range(3):
        for step in range(lengths.max().item()):
            x = x + 0.1 * step
        x = torch.tanh(x * reduced(lengths.max()) / 100)
    return x


def test_all_variants_of_a_frame_and_what_follows_the_last_issue_the_same(group: RecordedGroup) -> None:
    actual = compiled(asks_in_each_layer, "aot_eager")
    with warnings.catch_warnings(record=True) as caught:
        for longest in range(3, 12):
            assert_same_step(group, actual, asks_in_each_layer, torch.tensor([2, longest]))
    assert any("was compiled 6 times" in str(warning.message) for warning in caught)  # and so it is given up


def calls_up_to_the_error(
    group: RecordedGroup, program: Program, lengths: list[int], *errors: type[Exception]
) -> list[Call]:
    group.calls.clear()
    with pytest.raises(errors):
        program(X.clone().requires_grad_(), torch.tensor(lengths))
    gc.collect()  # on torch 2.11, a checkpoint that raised sees all that is saved until its frames are gone
    return list(group.calls)


@pytest.mark.parametrize("name", BREAKABLE)
def test_a_batch_that_breaks_an_assertion_raises_behind_the_collectives_before_it(
    group: RecordedGroup, name: str
) -> None:
    program = BREAKABLE[name]
    actual = compiled(program, "aot_eager")
    assert_same_step(group, actual, program, torch.tensor([2, 4]))
    wanted = calls_up_to_the_error(group, program, [2, 6], AssertionError, RuntimeError)
    assert_same_calls(calls_up_to_the_error(group, actual, [2, 6], MetadataError), wanted)
    assert len(wanted) == 1
    assert_same_step(group, actual, program, torch.tensor([3, 4]))


def has_two_texts(x: Tensor, lengths: Tensor) -> Tensor:
    y = x * reduced(x.detach().sum())
    return y.sin() + lengths.view(2).sum()


def has_two_texts_in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: has_two_texts(x, lengths), x)


@pytest.mark.parametrize("program", [has_two_texts, has_two_texts_in_a_checkpoint])
def test_a_batch_on_which_tracing_fails_raises_behind_the_collectives_before_it(
    group: RecordedGroup, program: Program
) -> None:
    actual = compiled(program, "aot_eager")
    wanted = calls_up_to_the_error(group, program, [1, 1, 2], RuntimeError)
    assert len(wanted) == 1
    with record() as found:
        for _ in range(2):
            assert_same_calls(calls_up_to_the_error(group, actual, [1, 1, 2], RuntimeError), wanted)
            assert_same_step(group, actual, program)
    assert any(graph.function.endswith(f" {program.__name__}") for graph in found.graphs)  # whole for other batches


def branches_in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    return twice(lambda x: x.cos() if reduced(x.detach().sum()).item() > 0 else x.sin(), x)


def test_a_branch_on_a_number_of_all_ranks_in_a_checkpoint_is_named(group: RecordedGroup) -> None:
    with pytest.warns(
        UserWarning, match=r"given up for (?s:.*)issues collectives: .*, at test_collectives.py:\d+"
    ) as given:
        for _ in range(2):
            actual = compiled(branches_in_a_checkpoint, "aot_eager", strict=False)
            assert_same_step(group, actual, branches_in_a_checkpoint)
    assert sum("issues collectives" in str(warning.message) for warning in given) == 1


def nobody_waits(x: Tensor, lengths: Tensor) -> Tensor:
    torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
    return x.sin()


def checkpoint_in_a_checkpoint(x: Tensor, lengths: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        y = gathered(x.sin())[2:6]
        reduced(y.detach().sum())
        return y.cos()

    return twice(lambda x: twice(inner, x).sin() * x, x)


@pytest.mark.parametrize("program", [nobody_waits, checkpoint_in_a_checkpoint])
def test_a_graph_whose_order_cannot_be_kept_runs_uncompiled(group: RecordedGroup, program: Program) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="OrderChanged"):
        compiled(program, "aot_eager")(X.clone().requires_grad_(), LENGTHS)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="OrderChanged"):
        assert_same_step(group, compiled(program, "aot_eager", strict=False), program)


def stops_before_its_end(x: Tensor) -> Tensor:
    y = gathered(x.sin())[2:6].cos()
    return y + reduced(y.detach().sum())


def recomputes_to_its_end(x: Tensor) -> Tensor:
    return (gathered(x.sin())[2:6] * reduced(x.detach().sum())).cos()


@pytest.mark.parametrize("body", [stops_before_its_end, recomputes_to_its_end])
@pytest.mark.filterwarnings("ignore:fxpasses")
def test_a_compiled_body_of_an_eager_checkpoint_issues_the_same(
    group: RecordedGroup, body: Callable[[Tensor], Tensor]
) -> None:
    actual = compiled(body, "aot_eager")
    for _ in range(2):
        assert_same_step(group, lambda x, lengths: twice(actual, x), lambda x, lengths: twice(body, x))


def test_a_program_that_comes_to_train_on_fewer_outputs_gets_an_error(group: RecordedGroup) -> None:
    actual = compiled(lambda x: (x.cos(), gathered(x.sin())), "aot_eager")
    for _ in range(2):
        y, both = actual(X.clone().requires_grad_())
        torch.autograd.backward([y, both], [torch.ones_like(y), torch.ones_like(both)])
    y, _ = actual(X.clone().requires_grad_())
    group.calls.clear()
    with pytest.raises(RuntimeError, match="trains on fewer outputs"):
        y.sum().backward()
    assert not group.calls


def test_nothing_is_issued_to_verify_a_pass(group: RecordedGroup) -> None:
    program = PROGRAMS["checkpoint_of_metadata"]
    assert_same_step(group, compiled(program, "aot_eager", verify=True), program)


class DropsCollectives:
    name = "drops_collectives"

    def __call__(self, gm: GraphModule, context: Context) -> Report:
        for node in reversed(gm.graph.nodes):
            if any(name in str(node.target) for name in ("all_reduce", "wait_tensor")):
                node.replace_all_uses_with(node.args[0])
                gm.graph.erase_node(node)
        return Report(self.name, changed=True)


def test_a_pass_that_changes_what_is_issued_is_left_out(group: RecordedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxpasses.metadata.hoist_metadata.HoistMetadata", DropsCollectives)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="which collectives the graph issues"):
        compiled(PROGRAMS["equal_in_each_layer"])(X, LENGTHS)
    torch._dynamo.reset()
    with pytest.warns(UserWarning, match="drops_collectives failed"):
        actual = compiled(PROGRAMS["equal_in_each_layer"], strict=False)
        assert_same_step(group, actual, PROGRAMS["equal_in_each_layer"])


def train(program: Program, rank: int, steps: int) -> list[Tensor]:
    """Losses and a gradient; rank 0 sees another longest sequence in each step."""
    x = X.clone().requires_grad_()
    losses = []
    for step in range(steps):
        loss = program(x, torch.tensor([1, 2 + step if rank == 0 else 2])).sum()
        loss.backward()
        losses.append(loss.detach())
    return [*losses, x.grad]


def train_both_ways(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    expected = train(asks_in_each_layer, rank, steps=4)
    with mock.patch.object(variants, "_MOST", 3):  # then rank 0 gives the frame up
        actual = train(compiled(asks_in_each_layer, "aot_eager"), rank, steps=4)
    for name in MIXED:  # one rank compiled, the other in eager mode
        expected += train(PROGRAMS[name], rank, steps=1)
        actual += train(compiled(PROGRAMS[name], "aot_eager") if rank == 0 else PROGRAMS[name], rank, steps=1)
    return expected, actual


MIXED = [
    "equal_in_each_layer",
    "gradients_of_branches",
    "checkpoint_behind_its_last_saved_tensor",
    "checkpoint_with_independent_branches",
    "checkpoint_with_functions_of_the_user",
]


@pytest.mark.filterwarnings("ignore")
def test_ranks_that_decide_differently_stay_in_step() -> None:
    for expected, actual in run_on_ranks(train_both_ways, seconds=200):
        torch.testing.assert_close(actual, expected)


class Block(torch.nn.Module):
    """One of tensor and sequence parallel: its collectives are no nodes of Dynamo's graph."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.norm, self.up, self.down = torch.nn.LayerNorm(4), torch.nn.Linear(4, 8), torch.nn.Linear(8, 4)
        split = Shard(1)
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split),
        }
        parallelize_module(self, mesh, plan)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def test_sequence_parallel_issues_what_eager_mode_issues(group: RecordedGroup) -> None:
    block = Block()

    def program(x: Tensor, lengths: Tensor) -> Tensor:
        return twice(block, x.expand(1, 3, 4).cumsum(1))

    assert_same_step(group, compiled(program, "aot_eager"), program)


def test_the_caches_key_tells_graphs_apart_whose_recomputation_differs() -> None:
    plain, other = CollectivePartitioner(None), CollectivePartitioner(Sequences(["all_reduce"]))
    assert plain.uuid() == CollectivePartitioner(None).uuid() != other.uuid()
