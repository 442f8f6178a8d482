"""Level 1: the queries of a loop over experts become one sort; the branches stay, with every number as it was."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxpasses.inspect
from fxpasses.experts.group_experts import GroupExperts
from fxpasses.options import Options
from fxpasses.passes.pipeline import run_passes
from tests.experts.models import HIDDEN
from tests.experts.spellings import DECOYS, SPELLINGS, Moe, cases, name_of
from tests.experts.test_group_experts import TOKENS, assert_equal, model_of, run, tokens
from tests.support import compiled, events, host_reads, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

ROUTINGS = {"bool_mask_each_slot": 2, "where_each_slot": 2}  # one for each slot
FIRST = {case[0].name: case for case in reversed(cases(SPELLINGS | DECOYS))}
ASKING = [
    case
    for name, case in FIRST.items()
    if not case[0].skips_empty and name in {
        "where_pairs", "where_mask_slots_first", "where_mask_tokens_first", "nonzero_tuple", "nonzero_columns",
        "nonzero_unbind", "any_slot_squeeze", "any_slot_flatten", "bool_mask_add", "bool_mask_scores",
        "bool_mask_each_slot", "where_each_slot", "bool_mask_assign", "masked_select", "dense_scores",
        "dense_scores_mask", "repeated_mask", "repeated_where", "flat_pairs", "from_the_last", "local_slice",
        "unequal_widths", "concatenated", "centred_rows", "capacity_drop", "last_expert_wins",
    }
]  # fmt: skip
BASIC = [FIRST[name] for name in ("where_pairs", "bool_mask_scores", "dense_scores")]


def check(case: Any, model: nn.Module, x: Tensor, program: Any = None, lowering: str = "eager") -> Counter[str]:
    """Compare with eager mode, bit for bit; what ran in the second step."""
    program = program or model
    fast = compiled(program, lowering, experts="slices")
    assert_equal(run(fast, model, x), run(program, model, x))
    return events(lambda: run(fast, model, x))


@pytest.mark.parametrize("case", ASKING, ids=name_of)
def test_one_sort_in_place_of_all_queries(case: Any) -> None:
    model, x = model_of(case), tokens(case)
    with fxpasses.inspect.record() as record:
        counts = check(case, model, x)
    routings = ROUTINGS.get(case[0].name, 1)
    assert record.figures("group_experts") == {"loops_sliced": routings}, record
    assert counts["aten::nonzero"] == 0
    # The gradient of `masked_scatter`, which asks for no size in the graph, selects by the mask.
    assert counts["aten::masked_select"] == (4 if case[0].name == "masked_select" else 0)
    unsort = case[0].name == "concatenated"
    assert counts["aten::sort"] == routings + unsort


@pytest.mark.parametrize("case", BASIC, ids=name_of)
@pytest.mark.parametrize(("number", "count"), [(1, 4), (TOKENS, 2)])
def test_few_tokens(case: Any, number: int, count: int) -> None:
    check(case, model_of(case, count), tokens(case, number))


@pytest.mark.slow
def test_many_experts_without_tokens() -> None:
    case = FIRST["dense_scores"]
    check(case, model_of(case, 64), tokens(case, 8))


@pytest.mark.parametrize("case", BASIC, ids=name_of)
def test_all_tokens_on_the_same_experts(case: Any) -> None:
    model = model_of(case)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[:2] = 0.01
    check(case, model, tokens(case))


@pytest.mark.quick(1)
@pytest.mark.parametrize("case", BASIC, ids=name_of)
def test_another_number_of_tokens(case: Any) -> None:
    model = model_of(case)
    program = compiled(model, "aot_eager", dynamic=True, experts="slices")
    with fxpasses.inspect.record() as record:
        for number in (24, 31, 8):
            x = tokens(case, number)
            assert_equal(run(program, model, x), run(model, model, x), 1e-6)
    assert record.figures("group_experts")["loops_sliced"] == len(record.graphs) == 1


@pytest.mark.parametrize("level", ["slices", "grouped"])
def test_a_checkpoint_keeps_the_routing(level: str) -> None:
    """Backward does not choose or sort again; the rest it does recompute."""
    case = FIRST["where_pairs"]
    model, x = model_of(case), tokens(case)

    def program(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    fast = compiled(program, "aot_eager", experts=level)
    assert_equal(run(fast, model, x), run(program, model, x))
    counts = events(lambda: run(fast, model, x))
    assert counts["aten::sort"] == counts["aten::topk"] == counts["aten::searchsorted"] == 1
    assert counts["aten::_softmax"] == 2


def keep_softmax(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = function is torch.ops.aten._softmax.default
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def test_a_policy_of_the_user_is_kept() -> None:
    case = FIRST["where_pairs"]
    model, x = model_of(case), tokens(case)
    contexts = functools.partial(create_selective_checkpoint_contexts, keep_softmax)

    def program(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False, context_fn=contexts)

    fast = compiled(program, "aot_eager")
    assert_equal(run(fast, model, x), run(model, model, x))
    counts = events(lambda: run(fast, model, x))
    assert counts["aten::_softmax"] == 1 and counts["aten::sort"] == 2


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11's Inductor has no such slice: NotImplementedError")
def test_inductor() -> None:
    case = FIRST["capacity_drop"]
    model, x = model_of(case, 2), tokens(case)
    fast = compiled(model, "inductor", experts="slices")
    assert_equal(run(fast, model, x), run(model, model, x), 1e-5)
    assert host_reads(lambda: run(fast, model, x)) <= 2  # two elements of a tensor on the CPU


# Graphs


def rewritten(model: nn.Module, x: Tensor, level: str = "auto") -> tuple[torch.fx.Graph, Any]:
    found: list[Any] = []

    def backend(gm: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        found.append(run_passes([GroupExperts()], gm, inputs, Options(strict=True, experts=level)))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    return found[0].gm.graph, found[0].reports[0]


def test_the_graph_of_the_docstring() -> None:
    case = FIRST["where_pairs"]
    graph, _ = rewritten(model_of(case, 2), tokens(case), "slices")
    names = Counter(getattr(node.target, "__name__", node.target) for node in graph.nodes)
    assert names["where"] == names["eq"] == 0
    assert names["sort"] == names["searchsorted"] == names["to"] - 2 == 1  # each branch has a `to` of its own
    assert names["item"] == names["split"] == 2
    reads = [node for node in graph.nodes if node.target == "item"]
    assert len({read.args[0].args[0] for read in reads}) == 1  # one transfer for all
    assert [str(*read.meta["unbacked_bindings"]) for read in reads] == ["u0", "u1"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "counts"), [(0, (8, 48)), (1, (8, 16))], ids=["stacked", "list"])
def test_the_graph_does_not_grow_with_the_experts(kind: int, counts: tuple[int, int]) -> None:
    """But for the weights of a list, which are inputs of the graph, one by one."""
    spelling = SPELLINGS["where_pairs"]
    sizes, inputs = [], []
    for count in counts:
        torch.manual_seed(0)
        graph, report = rewritten(Moe(spelling, spelling.experts[kind], count), torch.randn(TOKENS, HIDDEN))
        assert report.figures == {"loops_grouped": 1}
        inputs.append(len(graph.find_nodes(op="placeholder")))
        sizes.append(len(graph.nodes) - inputs[-1])
    assert sizes[0] == sizes[1]
    assert inputs[1] - inputs[0] == (3 * (counts[1] - counts[0]) if kind else 0)


# Options and report


@pytest.mark.parametrize(
    ("level", "plain", "decoy"),
    [("auto", 2, 1), ("slices", 1, 1), ("grouped", 2, 0), ("off", 0, 0)],
)
def test_levels(level: str, plain: int, decoy: int) -> None:
    for name, expected in (("where_pairs", plain), ("centred_rows", decoy)):
        _, report = rewritten(model_of(FIRST[name]), tokens(FIRST[name]), level)
        assert report.figures == ({}, {"loops_sliced": 1}, {"loops_grouped": 1})[expected]


def test_the_report_names_spelling_level_size_and_reason() -> None:
    _, report = rewritten(model_of(FIRST["where_pairs"]), tokens(FIRST["where_pairs"]))
    [change] = report.changes
    assert change.startswith("torch.where(mask) … index_add_ ×4 at loops.py:")
    assert change.endswith("→ level 2, one grouped program (E = 4, top-2)")
    _, report = rewritten(model_of(FIRST["centred_rows"]), tokens(FIRST["centred_rows"]))
    [change] = report.changes
    assert change.startswith("torch.where(mask) ×4 at decoys.py:")
    assert "→ level 1, one sort and slices (E = 4, top-2); not grouped: `mean" in change
    assert not report.refusals and "level 1" in str(report)
    _, report = rewritten(model_of(FIRST["overlapping"]), tokens(FIRST["overlapping"]))
    assert any("×4" in str(refusal) for refusal in report.refusals), report


def test_a_change_shows_in_the_record() -> None:
    case = FIRST["centred_rows"]
    with fxpasses.inspect.record() as record:
        compiled(model_of(case))(tokens(case))
    assert "level 1, one sort and slices" in str(reports_of(record, "group_experts")[0])
    assert record.figures("group_experts") == {"loops_sliced": 1}
