"""Loops over experts, in every spelling of the table, against eager mode: results, gradients, queries at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.inspect import Record
from tests.experts.models import HIDDEN, LoraLinears
from tests.experts.spellings import DECOYS, SPELLINGS, Moe, cases, name_of
from tests.support import ASSIGNS_SLICES, assert_same, compiled, events, reports_of

pytestmark = pytest.mark.usefixtures("capture_flags")

TOKENS = 24
# Not grouped: the branches differ.
SLICED = {"unequal_widths"}
# The loop adds (shared + e3) + e2 to the gradient of x, the grouped program shared + (e3 + e2).
OTHER_ORDER = {"shared_expert", "deepseek_v3", "identity_expert"}
CASES = cases(SPELLINGS)
BROKEN = set() if ASSIGNS_SLICES else {"slices_of_counts"}
GROUPED = [case for case in CASES if case[0].name not in SLICED | BROKEN]

BASIC = [case for case in GROUPED if name_of(case) in (
    "where_pairs-SwiGluStacked", "where_mask_slots_first-SwiGluLinears", "bool_mask_add-SwiGluStacked",
    "repeated_mask-SwiGluLinears", "split_counts-SwiGluLinears", "slices_of_counts-SwiGluStacked",
    "any_slot_flatten-SwiGluStacked", "gpt_oss-GptOss", "concatenated-SwiGluLinears", "masked_select-SwiGluStacked",
    "skip_count_slices-SwiGluStacked",
)]  # fmt: skip
UNEVEN = [
    *BASIC,
    *(case for case in GROUPED if name_of(case) in ("numpy_ends-SwiGluLinears", "moe_infer-SwiGluLinears")),
]


def model_of(case: Any, count: int = 4) -> Moe:
    torch.manual_seed(1)
    return Moe(case[0], case[1], count)


def tokens(case: Any, number: int = TOKENS) -> Tensor:
    torch.manual_seed(2)
    return torch.randn(number, HIDDEN).to(case[0].dtype).requires_grad_()


def run(program: Any, model: nn.Module, x: Tensor) -> dict[str, Any]:
    for parameter in (x, *model.parameters()):
        parameter.grad = None
    out = program(x)
    out.float().square().sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    # A loop leaves an expert that no token chose without a gradient where the grouped program gives zeros.
    return {"out": out.detach(), "x": x.grad, **{n: torch.zeros(()) if g is None else g for n, g in grads.items()}}


def assert_equal(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    for name, value in expected.items():
        if value.ndim == 0:
            assert not actual[name].any(), name
        else:
            torch.testing.assert_close(actual[name], value, rtol=tolerance, atol=tolerance)


def check(
    case: Any, model: nn.Module, x: Tensor, program: Any = None, lowering: str = "eager", **options: Any
) -> Record:
    program = program or model
    with fxpasses.inspect.record() as record:
        actual = run(compiled(program, lowering, **options), model, x)
    tolerance = 1e-6 if case[0].name in OTHER_ORDER else 0.0
    assert_equal(actual, run(program, model, x), tolerance)
    return record


@pytest.mark.parametrize("case", GROUPED, ids=name_of)
def test_grouped_equals_eager(case: Any) -> None:
    """Bit for bit in float32 on the CPU, gradients of the input, the experts and the router among them."""
    record = check(case, model_of(case), tokens(case), lowering="aot_eager" if case in BASIC else "eager")
    assert record.figures("group_experts")["loops_grouped"] >= 1, record


@pytest.mark.parametrize("case", [case for case in CASES if case not in GROUPED], ids=name_of)
def test_what_is_not_understood_runs_as_it_is_and_says_why(case: Any) -> None:
    record = check(case, model_of(case), tokens(case))
    assert record.figures("group_experts") == ({"loops_sliced": 1} if case[0].name in SLICED else {})
    assert ("not grouped:" if case[0].name in SLICED else "not:") in str(record)


REFUSED = [
    pytest.param(case, marks=() if case[1] is case[0].experts[0] else pytest.mark.slow)
    for case in cases(DECOYS)
    if case[0].name != "dropout"
]


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_decoys_are_not_grouped(case: Any) -> None:
    """But their queries are one, where they ask one routing in one graph; batch_norm breaks it by a question."""
    record = check(case, model_of(case), tokens(case))
    asks_one_routing = case[0].name not in ("overlapping", "reroutes", "batch_norm")
    figures = record.figures("group_experts")  # of several graphs, where autograd asks for an expert's number of tokens
    assert set(figures) == ({"loops_sliced"} if asks_one_routing else set()), record


def test_what_builds_a_mask_is_no_loop_over_experts() -> None:
    """A reader of the report of a dense model has nothing to look up."""

    def attention(x: Tensor, lengths: Tensor) -> Tensor:
        mask, start = torch.full((TOKENS, TOKENS), float("-inf")), 0
        positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
        for length in lengths.tolist():
            mask[start : start + length, start : start + length] = 0
            start += length
        return (mask.softmax(-1) @ x) * positions[: TOKENS // 2].sum()

    batch = (torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.tensor([5, 12, 7]))
    report = reports_of(assert_same(attention, [batch]), "group_experts")[0]
    assert not report.changes and not report.refusals


def test_a_mask_of_padding_in_each_layer_is_no_loop_over_experts() -> None:
    """Nor is the first token of each sequence, by which transformers' flash path cuts a packed batch."""

    def layers(x: Tensor, padding: Tensor, positions: Tensor) -> Tensor:
        for _ in range(3):
            seen, starts = padding.flatten().nonzero().flatten(), (positions == positions.min()).nonzero().view(-1)
            x = x.index_add(0, seen, torch.tanh(x[seen])) * len(starts)
        return x

    padding, positions = torch.tensor([[1] * 8 + [0] * 4] * 2), torch.arange(12)
    record = assert_same(layers, [(torch.randn(2 * 12, HIDDEN, requires_grad=True), padding, positions)])
    assert [report.refusals for report in reports_of(record, "group_experts")] == [[]]


def test_masks_of_a_router_that_are_not_known_are_named() -> None:
    def loop(x: Tensor, router: Tensor) -> Tensor:
        routed, scores = torch.zeros_like(x), (x @ router).cumsum(-1)
        for expert in range(3):
            rows = (scores[:, expert] > scores.mean()).nonzero().flatten()
            routed = routed.index_add(0, rows, torch.tanh(x[rows]))
        return routed

    record = assert_same(loop, [(torch.randn(TOKENS, HIDDEN, requires_grad=True), torch.randn(HIDDEN, 3))])
    [report] = reports_of(record, "group_experts")
    assert any("×3" in refusal.text for refusal in report.refusals), report


@pytest.mark.parametrize("case", BASIC, ids=name_of)
def test_no_query_at_run_time(case: Any) -> None:
    """But for assertions, which read on the CPU and do not wait on a device."""
    model, x = model_of(case), tokens(case)
    program = compiled(model, "aot_eager")
    run(program, model, x)
    counts = events(lambda: run(program, model, x))
    assert counts["aten::nonzero"] == counts["aten::masked_select"] == 0
    assert counts["aten::_local_scalar_dense"] == counts["aten::_assert_async"]
    if "slices" not in name_of(case):  # whose bounds are compared; the places that a query finds are not negative
        assert events(lambda: program(x))["aten::lt"] == 0  # that of clamps compares in backward on torch 2.15


@pytest.mark.parametrize("case", UNEVEN, ids=name_of)
@pytest.mark.parametrize("favour", ["one expert", "one token each"])
def test_uneven_choices(case: Any, favour: str) -> None:
    """All tokens on the same experts, so that others are empty; and an expert with one token."""
    model, x = model_of(case), tokens(case, 4 if favour == "one token each" else TOKENS)
    with torch.no_grad():
        if favour == "one expert":
            model.gate.weight.zero_()
            model.gate.weight[:2] = 0.01  # ties go to the first
        else:
            x.copy_(torch.eye(4, HIDDEN) * 4)
            model.gate.weight.copy_(torch.eye(4, HIDDEN) + torch.eye(4, HIDDEN).roll(1, 0) / 2)
    check(case, model, x)


MANY = ["where_pairs-SwiGluStacked", "repeated_mask-SwiGluLinears", "moe_infer-SwiGluLinears", "gpt_oss-GptOss"]
FEW = [
    *(pytest.param(case, 1, 4, marks=pytest.mark.slow if at % 3 else ()) for at, case in enumerate(UNEVEN)),
    *((case, 8, 16) for case in UNEVEN if name_of(case) in MANY),
    *(pytest.param(case, 8, 64, marks=pytest.mark.slow) for case in UNEVEN if name_of(case) in MANY),
]


@pytest.mark.parametrize(
    ("case", "number", "count"), FEW, ids=lambda value: value if isinstance(value, int) else name_of(value)
)
def test_few_tokens(case: Any, number: int, count: int) -> None:
    check(case, model_of(case, count), tokens(case, number))


@pytest.mark.parametrize("case", UNEVEN, ids=name_of)
def test_in_a_checkpoint(case: Any) -> None:
    model = model_of(case)

    def program(x: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False)

    assert check(case, model, tokens(case), program, "aot_eager").figures("group_experts")["loops_grouped"] == 1


@pytest.mark.parametrize("case", BASIC, ids=name_of)
def test_another_number_of_tokens(case: Any) -> None:
    model = model_of(case)
    program = compiled(model, "aot_eager", dynamic=True)
    with fxpasses.inspect.record() as record:
        for number in (24, 31, 8):
            x = tokens(case, number)
            assert_equal(run(program, model, x), run(model, model, x), 1e-6)
    assert record.figures("group_experts")["loops_grouped"] == len(record.graphs) == 1


@pytest.mark.parametrize("case", BASIC[:1], ids=name_of)
def test_autocast(case: Any) -> None:
    model, x = model_of(case), tokens(case)

    def program(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    record = check(case, model, x, program, "aot_eager")
    assert record.figures("group_experts").get("loops_grouped", 0) <= 1


def test_adapters_with_frozen_experts() -> None:
    case = next(case for case in GROUPED if case[1] is LoraLinears)
    model = model_of(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora" in name or "gate" in name)
    check(case, model, tokens(case))


def test_off_leaves_the_loop() -> None:
    case = GROUPED[0]
    record = check(case, model_of(case), tokens(case), experts="off")
    assert "loops_grouped" not in record.figures("group_experts")
