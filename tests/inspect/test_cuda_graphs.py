"""What the report says of CUDA graphs: for models as the passes leave them, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.base.cuda_graphs import Capturability, Obstruction
from fxpasses.inspect import Record
from fxpasses.inspect.model import Partition
from fxpasses.inspect.partition import partition
from fxpasses.inspect.text import Style, report
from tests.end_to_end import test_flash_path as flash_path
from tests.end_to_end import test_training_step as training_step
from tests.experts.models import HIDDEN, Moe
from tests.experts.spellings import SPELLINGS
from tests.inspect.programs import recorded, refused
from tests.support import assert_same, compiled

both_kinds = pytest.mark.parametrize("checkpointed", [False, True], ids=["plain", "checkpointed"])
WIDTH, HEADS = 16, 2


class Attention(nn.Module):
    """Packed attention: each layer reads the lengths and makes a mask of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        tokens = x.shape[0]
        q, k, v = self.qkv(x).view(tokens, 3, HEADS, WIDTH // HEADS).permute(1, 2, 0, 3)
        mask, start = torch.zeros(tokens, tokens, dtype=torch.bool), 0
        for length in lengths.tolist():
            mask[start : start + length, start : start + length] = True
            start += length
        attention = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(attention.transpose(0, 1).reshape(tokens, WIDTH))


class Decoder(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(Attention() for _ in range(2)), checkpointed

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, lengths, use_reentrant=False) if self.checkpointed else layer(x, lengths)
        return x


def packed_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, WIDTH, requires_grad=True), torch.tensor([5, 8, 3])


def graphs_of(record: Record) -> dict[str, Capturability]:
    (graph,) = record.graphs
    assert list(graph.cuda_graphs) == ["graph", "forward", "backward"]
    return graph.cuda_graphs


@both_kinds
def test_a_packed_decoder_can_be_recorded_whole(checkpointed: bool) -> None:
    record = assert_same(Decoder(checkpointed), [packed_batch()], "aot_eager", 1e-6)
    before = record.graphs[0].captured.cuda_graph
    assert before is not None and {o.reason for o in before.obstacles} == {Obstruction.HOST_READ}
    assert graphs_of(record) == dict.fromkeys(("graph", "forward", "backward"), Capturability())


@pytest.fixture
def whole_or_not() -> Iterator[None]:
    """Inductor records no pieces of a graph."""
    inductor: Any = torch._inductor.config
    with inductor.patch(graph_partition=False):
        yield


def test_a_graph_is_recorded_for_each_number_of_the_batch_in_its_layers() -> None:
    """Each layer scales by `lengths.max()`: the number is an input then, unbacked, and its place is named."""
    record = assert_same(training_step.Decoder(2), training_step.batches()[:1], "aot_eager", 1e-6)
    for found in graphs_of(record).values():
        (number,) = found.numbers
        assert found.whole and number.kind == "int" and not number.sizes
        assert number.where.startswith("test_training_step.py:")


def test_a_number_of_the_batch_is_in_the_way_of_a_graph_without_pieces(whole_or_not: None) -> None:
    record = assert_same(training_step.Decoder(2), training_step.batches()[:1], "aot_eager", 1e-6)
    for found in graphs_of(record).values():
        assert {obstacle.reason for obstacle in found.obstacles} <= {Obstruction.UNBACKED_NUMBER}
    (obstacle,) = record.graphs[0].cuda_graphs["graph"].obstacles
    (number,) = record.graphs[0].cuda_graphs["graph"].numbers
    assert obstacle.node == number.node and not number.sizes
    assert obstacle.where.startswith("test_training_step.py:")


@pytest.mark.parametrize("name", ["where_pairs", "nonzero_tuple"])
def test_a_grouped_mixture_can_be_recorded_whole(name: str) -> None:
    model = Moe(SPELLINGS[name], SPELLINGS[name].experts[0])
    record = assert_same(model, [(torch.randn(10, HIDDEN, requires_grad=True),)], "aot_eager", 1e-6)
    assert record.figures("group_experts")["loops_grouped"] == 1
    before = record.graphs[0].captured.cuda_graph
    assert before is not None and not before.whole
    assert graphs_of(record) == dict.fromkeys(("graph", "forward", "backward"), Capturability())


@pytest.mark.slow
@both_kinds
def test_the_flash_path_can_be_recorded_whole_for_each_two_numbers(checkpointed: bool) -> None:
    """The kernel takes as many ends as there are sequences, and the longest length as a Python number."""
    model = flash_path.new_model(layers=2, checkpointed=checkpointed)
    with fxpasses.inspect.record() as record:
        flash_path.loss_and_gradients(compiled(model, "aot_eager"), model, flash_path.packed([10, 14, 8]))
    for found in graphs_of(record).values():
        assert found.whole and sorted(number.sizes for number in found.numbers) == [False, True]
    longest = next(number for number in record.graphs[0].cuda_graphs["graph"].numbers if not number.sizes)
    assert longest.kind == "int" and longest.where.startswith("modeling_flash_attention_utils.py:")


@pytest.mark.usefixtures("whole_or_not")
def test_inductor_names_the_same_node_of_forward_and_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Private name, checked on torch 2.11, 2.13 and 2.15: `get_first_incompatible_cudagraph_node`."""
    from torch._inductor.utils import get_first_incompatible_cudagraph_node

    seen: list[Any] = []

    def see(forward: GraphModule, backward: GraphModule) -> Partition:
        found = partition(forward, backward)
        for gm, ours in ((forward, found.forward_cuda_graph), (backward, found.backward_cuda_graph)):
            assert ours is not None
            theirs = get_first_incompatible_cudagraph_node(gm)
            seen.append((ours.obstacles[0].node if ours.obstacles else None, theirs.name if theirs else None))
        return found

    monkeypatch.setattr("fxpasses.inspect.partition.partition", see)
    assert_same(Decoder(True), [packed_batch()], "aot_eager", 1e-6)
    assert_same(training_step.Decoder(2), training_step.batches()[:1], "aot_eager", 1e-6)
    assert [ours for ours, _ in seen[:2]] == [None, None] and None not in [ours for ours, _ in seen[2:]]
    assert len(seen) == 4 and all(ours == theirs for ours, theirs in seen)


# The report


def test_the_report_has_a_line_for_each_graph() -> None:
    text = report(assert_same(Decoder(True), [packed_batch()], "aot_eager", 1e-6), Style())
    for name in ("graph", "forward", "backward"):
        assert f"  {name}: can be recorded as one CUDA graph\n" in text


def test_the_report_names_the_first_node_in_the_way() -> None:
    x, lengths = torch.randn(8, 4), torch.tensor([3, 5])
    text = " ".join(report(recorded(refused, x, lengths, torch.rand(2)), Style()).split())
    assert "graph: cannot be recorded as one CUDA graph: 2 nodes in the way, first `item" in text


def test_a_record_keeps_it_as_data(tmp_path: Any) -> None:
    x, lengths = torch.randn(8, 4), torch.tensor([3, 5])
    record = recorded(refused, x, lengths, torch.rand(2))
    record.save(tmp_path / "record.jsonl")
    again = fxpasses.inspect.load(tmp_path / "record.jsonl")
    assert again == record and not again.graphs[0].cuda_graphs["graph"].whole
    found = again.graphs[0].cuda_graphs["graph"]
    assert {obstacle.reason for obstacle in found.obstacles} == {Obstruction.HOST_READ}
    assert [number.node for number in found.numbers] == ["packed_0"]


def test_a_record_without_it_says_nothing(tmp_path: Any) -> None:
    record = recorded()
    for stage in record.graphs[0].stages:
        stage.cuda_graph = None
    record.save(tmp_path / "record.jsonl")
    again = fxpasses.inspect.load(tmp_path / "record.jsonl")
    assert again.graphs[0].cuda_graphs == {} and "CUDA graph" not in report(again, Style())
