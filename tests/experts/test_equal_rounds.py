"""Rounds of a loop over experts are traced once: graph, branches, places and guards are those of tracing each."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.output_graph import OutputGraph

from fxpasses.dynamo.trace import Trace
from fxpasses.experts.branches import marks
from fxpasses.experts.capture.equal_rounds import Rounds
from fxpasses.experts.group_experts import GroupExperts
from fxpasses.graph.aliases import written_operands
from tests.dynamo.test_equal_layers import value_of
from tests.experts.models import HIDDEN
from tests.experts.spellings import DECOYS, SPELLINGS, Moe, Spelling
from tests.support import compiled, results

pytestmark = pytest.mark.usefixtures("capture_flags")
EXPERTS, TOP, TOKENS = 6, 2, 12
LEFT = EXPERTS - 2  # rounds after the second, the first that may be copied


class Seen:
    """What traces have made, without the numbers in names, and how many rounds were copied."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.branches: list[tuple[Any, ...]] = []
        self.copies = 0


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    found = Seen()
    compile_graph, copy, speculated = OutputGraph.compile_and_call_fx_graph, Rounds._copy, Trace.speculated

    def note(self: Any, *given: Any, **named: Any) -> Any:
        found.made.append(_made(self))
        return compile_graph(self, *given, **named)

    def count(self: Any, *given: Any) -> bool:
        was_copied = copy(self, *given)
        found.copies += was_copied
        return was_copied

    def speculate(self: Any) -> Any:
        branches = speculated(self)
        found.branches = [tuple(vars(branch).values()) for branch in branches]
        return branches

    monkeypatch.setattr(OutputGraph, "compile_and_call_fx_graph", note)
    monkeypatch.setattr(Rounds, "_copy", count)
    monkeypatch.setattr(Trace, "speculated", speculate)
    return found


def _made(output: Any) -> Any:
    numbers = {node: f"%{place}" for place, node in enumerate(output.graph.nodes)}
    lines = []
    for node in numbers:
        arguments = torch.fx.node.map_arg((node.args, node.kwargs), lambda operand: numbers[operand])
        target = re.sub(r"_?\d+", "", str(node.target))
        bound = list(node.meta.get("unbacked_bindings") or ())
        stack = [(path, key.partition("@")[2]) for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]
        lines.append(f"{node.op} {target} {arguments} {value_of(node)} {_place(node)} {bound} {marks(node)} {stack}")
    guards = {(guard.create_fn_name(), guard.originating_source.name) for guard in output.guards}
    return "\n".join(lines), {(kind, re.sub(r"_\d+|0x\w+", "", name)) for kind, name in guards}


def _place(node: Any) -> Any:
    value = node.meta.get("example_value")
    return value.storage_offset() if isinstance(value, Tensor) else None


def assert_as_traced(model: nn.Module, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> int:
    """All that a trace makes, results and gradients are as if no round were copied; returns how many were copied."""
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).requires_grad_()
    runs = []
    for is_on in (True, False):
        torch._dynamo.reset()
        seen.made, seen.branches = [], []
        with monkeypatch.context() as patch:
            if not is_on:
                patch.setattr(Rounds, "ended", lambda *given: None)
            torch.manual_seed(2)
            found = results(compiled(model), [x])
        runs.append((found, seen.made, seen.branches))
    (ours, made, branches), (traced, expected, expected_branches) = runs
    torch.testing.assert_close(ours, traced, rtol=0, atol=0)
    torch.manual_seed(2)
    torch.testing.assert_close(ours, results(model, [x]), rtol=1e-4, atol=1e-4)
    assert made == expected
    assert branches == expected_branches
    return seen.copies


COPIED = {"hit_tensor": 2}  # of 4 rounds


@pytest.mark.parametrize("name", [*SPELLINGS, *DECOYS])
def test_spellings(name: str, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    spelling: Spelling = {**SPELLINGS, **DECOYS}[name]
    if spelling.dtype is not torch.float32:
        pytest.skip("compares results in one precision")
    torch.manual_seed(0)
    copies = assert_as_traced(Moe(spelling, spelling.experts[0]), seen, monkeypatch)
    assert copies == COPIED.get(name, copies)
    assert copies <= LEFT


Body = Callable[..., Any]


class Loop(nn.Module):
    """transformers' loop over the experts that have tokens; `body` is given what a round has, and returns its rows."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.act = body, nn.SiLU()
        self.gate = nn.Linear(HIDDEN, EXPERTS)
        self.w = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) * 0.3)
        self.lins = nn.ModuleList([nn.Linear(HIDDEN, HIDDEN) for _ in range(EXPERTS)])
        self.numbers = [0.5 + number for number in range(EXPERTS)]
        self.limit = 3

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = torch.topk(self.gate(x).softmax(-1), TOP)
        out = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(idx, num_classes=EXPERTS + 1).permute(2, 1, 0)
            hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for e in hit:
            e = e[0]
            if e == EXPERTS:
                continue
            slot, tok = torch.where(mask[e])
            rows = self.body(self, e, x[tok], out)
            out.index_add_(0, tok, rows * weights[tok, slot, None])
        return out


def of_experts(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e]


def calling_a_module(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return loop.act(loop.act(rows) @ loop.w[e])


def taking_a_part(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    left, right = (rows @ loop.w[e]).chunk(2, dim=-1)
    return torch.cat([right, left], -1)


def writing_to_a_part(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    y = rows @ loop.w[e]
    y[:, : HIDDEN // 2].mul_(2)
    return y


@pytest.mark.parametrize("body", [of_experts, calling_a_module, taking_a_part, writing_to_a_part])
def test_rounds_that_are_copied(body: Body, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_as_traced(Loop(body), seen, monkeypatch) == LEFT


# Rounds that depend on which expert it is, and are not copied where they do


def with_another_program(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] if e != loop.limit else rows * 2


def with_a_program_from_an_expert_on(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] if e < loop.limit else rows * 2


@pytest.mark.parametrize(
    ("body", "copies"),
    [
        (with_another_program, 1),  # for expert 2; and the third round that is traced is the last to be tried
        (with_a_program_from_an_expert_on, 3),  # for expert 2; expert 3 is traced, and copied for 4 and 5
    ],
)
def test_jumps_that_another_expert_decides_otherwise(
    body: Body, copies: int, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert assert_as_traced(Loop(body), seen, monkeypatch) == copies


def computing_with_the_number(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * (e.item() % 2 + 1)


def choosing_a_module(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return loop.lins[e](rows)


def choosing_a_number(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * loop.numbers[int(e)]


def indexing_by_several(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * loop.w[e, 0]


def comparing(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * (torch.arange(HIDDEN) == e)


def asking_for_the_place(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * (1 + loop.w[e].storage_offset() % 3)


def counting(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] * (1 + rows.shape[0] * 0)


def asking_for_tokens(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] if rows.shape[0] > 0 else rows


def drawing(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return F.dropout(rows @ loop.w[e], 0.5)


def drawing_in_python(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    import random

    random.seed(3)
    return rows @ loop.w[e] * random.random()


def changing_an_attribute(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    loop.limit = 3
    return rows @ loop.w[e]


def reading_the_sum(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    return rows @ loop.w[e] + out.sum()


def writing_to_the_sum(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    out.mul_(0.5)
    return rows @ loop.w[e]


def taking_one_part_twice(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Dynamo has one node for `parts[1]`, whatever names the part."""
    parts = loop.w.unbind(0)
    return rows @ parts[e] + rows @ parts[1]


def taking_all_parts(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    parts = [*loop.w]
    return rows @ (parts[e] - torch.stack(parts).mean(0))


def leaving_parts_behind(loop: Loop, e: Tensor, rows: Tensor, out: Tensor) -> Tensor:
    """Autograd refuses to tell of parts of a tensor that was written to."""
    y = rows @ loop.w[e]
    left, right = y.chunk(2, dim=-1)
    total = left.sum() + right.sum()
    return y.mul_(2) + total


UNLIKE = [
    computing_with_the_number, choosing_a_module, choosing_a_number, indexing_by_several, comparing,
    asking_for_the_place, taking_one_part_twice, taking_all_parts,
]  # fmt: skip
ALIKE = [
    counting, asking_for_tokens, drawing, drawing_in_python, changing_an_attribute, reading_the_sum, writing_to_the_sum,
    leaving_parts_behind,
]  # fmt: skip


@pytest.mark.parametrize("body", UNLIKE)
def test_numbers_used_in_other_ways(body: Body, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_as_traced(Loop(body), seen, monkeypatch) == 0


@pytest.mark.parametrize("body", ALIKE)
def test_other_effects(body: Body, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_as_traced(Loop(body), seen, monkeypatch)


class Carrying(Loop):
    """Each round uses what the one before has left: the rows' sum, and so the rounds differ."""

    def forward(self, x: Tensor) -> Tensor:
        idx = torch.topk(self.gate(x), TOP).indices
        mask = F.one_hot(idx, num_classes=EXPERTS).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        out, before, last = torch.zeros_like(x), x.new_zeros(()), hit
        for e in hit:
            _, tok = torch.where(mask[e[0]])
            rows = x[tok] @ self.w[e[0]] + before
            before, last = rows.sum() * 0.1, e
            out.index_add_(0, tok, rows)
        return out + last.sum()


def test_variables_that_later_rounds_use(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_as_traced(Carrying(of_experts), seen, monkeypatch) == 0


class Adding(Loop):
    """The sum is another tensor in each round."""

    def forward(self, x: Tensor) -> Tensor:
        idx = torch.topk(self.gate(x), TOP).indices
        mask = F.one_hot(idx, num_classes=EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            _, tok = torch.where(mask[e[0]])
            out = out.index_add(0, tok, x[tok] @ self.w[e[0]])
        return out


def test_sums_that_are_new_tensors(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_as_traced(Adding(of_experts), seen, monkeypatch) == 0


class Unweighted(Loop):
    """The sum has a gradient from the second round on, and so the third is the first that begins with one."""

    def forward(self, x: Tensor) -> Tensor:
        idx = torch.topk(self.gate(x), TOP).indices
        mask = F.one_hot(idx, num_classes=EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
            e = e[0]
            _, tok = torch.where(mask[e])
            y = x[tok] @ self.w[e]
            y = y if out.requires_grad else y * 2
            out.index_add_(0, tok, y.detach() if e < 1 else y)
        return out


def test_tensors_that_a_round_changes(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert assert_as_traced(Unweighted(of_experts), seen, monkeypatch) == LEFT - 1


def test_grouping_leaves_nothing_of_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """`if e == EXPERTS: continue` has asked for each expert: the graph must not grow with their number."""
    graphs: list[torch.fx.Graph] = []
    group = GroupExperts.__call__

    def note(self: Any, gm: torch.fx.GraphModule, context: Any) -> Any:
        report = group(self, gm, context)
        graphs.append(gm.graph)
        return report

    monkeypatch.setattr(GroupExperts, "__call__", note)
    x = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    compiled(Loop(of_experts))(x)
    (graph,) = graphs
    unused = [node for node in graph.nodes if node.op.startswith("call") and not node.users and not node.is_impure()]
    assert [node for node in unused if not written_operands(node)] == []
    assert not any(node.target in (operator.eq, operator.ne) for node in graph.nodes)
