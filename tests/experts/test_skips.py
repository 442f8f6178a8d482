"""Loops that pass over experts without tokens: captured where the body does nothing without any, taken back where not.

Each program runs on routings with empty experts, against eager mode, with what it leaves in Python's state.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fxpasses.inspect
from fxpasses import fastpack_backend
from fxpasses.compiler import backend
from fxpasses.dynamo import retracing
from fxpasses.dynamo.attempt import Attempt
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.flags import Values
from fxpasses.experts.group_experts import GroupExperts
from tests.experts.skipping import CUT, EXPERTS, GROUPED, HIDDEN, TOKENS, Program, State, padded_hits
from tests.experts.skipping_decoys import NOT_SPECULATED, OTHER_MASKS, TAKEN_BACK, looks_at_hits
from tests.support import compiled, events

pytestmark = pytest.mark.usefixtures("capture_flags")


class Router(torch.nn.Module):
    """A program between a router and a result; `state` is what it may change."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.state = program, State()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN))

    def forward(self, x: Tensor, logits: Tensor) -> Any:
        weights, idx = torch.topk(logits.softmax(-1), 2, dim=-1)
        return self.program(x, idx, weights, self.w, self.state)


def routings() -> Iterator[Tensor]:
    """Logits with which the first expert has no tokens, and with which all have some."""
    torch.manual_seed(3)
    logits = torch.randn(TOKENS, EXPERTS)
    for empty in ((0,), ()):
        yield logits.index_fill(1, torch.tensor(empty, dtype=torch.long), -20.0)


def results_of(module: Router, program: Any, many: int) -> list[Any]:
    """For the first `many` routings: the results, the gradients and the state."""
    torch.manual_seed(4)
    random.seed(4)
    module.state = State()
    found = []
    for number, logits in enumerate(itertools.islice(routings(), many)):
        x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(number)).requires_grad_()
        module.w.grad = None
        out = program(x, logits)
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad:
            first.square().sum().backward()
        rest = list(out[1:]) if isinstance(out, tuple) else []
        found.append([first.detach(), x.grad, module.w.grad, *rest, dict(vars(module.state))])
    return found


def check(program: Program, many: int, **options: Any) -> tuple[fxpasses.inspect.Record, Any]:
    """The record, and what ran."""
    module, expected = Router(program), Router(program)
    ours = compiled(module, "eager", **options)
    with fxpasses.inspect.record() as record:
        found = results_of(module, ours, many)
    for actual, wanted in zip(found, results_of(expected, expected, many), strict=True):
        for one, other in zip(actual, wanted, strict=True):
            if isinstance(other, Tensor):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
            else:
                assert one == other
    return record, lambda: results_of(module, ours, many)


@pytest.mark.parametrize("program", GROUPED, ids=lambda program: program.__name__)
def test_experts_without_tokens_are_no_question(program: Program) -> None:
    """One graph for all routings, without a query."""
    record, step = check(program, 2)
    assert len(record.graphs) == 1
    assert record.figures("group_experts")["loops_grouped"] == 1
    counts = events(step)
    assert not any(counts[f"aten::{name}"] for name in ("nonzero", "unique", "_unique2", "bincount")), counts


def was_taken_back(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether a frame was traced again without speculation, or without NumPy's numbers, which are a part of it."""
    attempts: list[Attempt] = [log.args[1] for log in caplog.records if log.name == retracing.__name__]  # type: ignore
    return any(Feature.HINTS in attempt.features and Feature.NUMPY not in attempt.features for attempt in attempts)


@pytest.mark.quick(5)
@pytest.mark.parametrize("program", TAKEN_BACK, ids=lambda program: program.__name__)
def test_what_a_body_does_without_tokens_is_not_lost(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    """The trace goes through the branches, and is taken back. What Python then decides may well be one program."""
    caplog.set_level(logging.INFO, retracing.__name__)
    check(program, 1)
    assert was_taken_back(caplog)


class Around(torch.nn.Module):
    """A module that calls another, in a frame of its own where the other breaks the graph."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor, logits: Tensor) -> Any:
        return self.inner(x * 2, logits)


def speculated_in_vain(caplog: pytest.LogCaptureFixture) -> int:
    attempts: list[Attempt] = [log.args[1] for log in caplog.records if log.name == retracing.__name__]  # type: ignore
    return sum(attempt.flags == Values(True, True) for attempt in attempts)


def test_the_frames_around_a_loop_do_not_all_speculate_on_it(caplog: pytest.LogCaptureFixture) -> None:
    """Each would be traced twice, passes included: the model's, the layer's, the mixture's."""
    caplog.set_level(logging.INFO, retracing.__name__)
    router = Router(TAKEN_BACK[0])
    module = Around(Around(Around(Around(router))))
    ours, (logits, *_) = compiled(module, "eager"), routings()
    x = torch.randn(TOKENS, HIDDEN)
    torch.testing.assert_close(ours(x, logits), module(x, logits), rtol=0, atol=0)
    assert speculated_in_vain(caplog) == 2
    caplog.clear()
    torch._dynamo.reset()
    compiled(module, "eager")(x, logits)  # another program, whose experts may be others
    assert speculated_in_vain(caplog) == 2


@pytest.mark.parametrize("program", NOT_SPECULATED, ids=lambda program: program.__name__)
def test_questions_about_something_else_are_left_to_the_program(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, retracing.__name__)
    check(program, 1)
    assert not was_taken_back(caplog)


@pytest.mark.parametrize("program", OTHER_MASKS, ids=lambda program: program.__name__)
def test_masks_of_another_kind_make_no_loop(program: Program) -> None:
    record, _ = check(program, 1)
    assert "loops_grouped" not in record.figures("group_experts")


def test_what_the_program_asks_is_its_own_to_look_at() -> None:
    record, _ = check(looks_at_hits, 1)
    assert record.figures("group_experts")["loops_grouped"] == 1


def test_a_pass_that_is_dropped_takes_its_proofs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branches that it had proved are unproved again: the frame is traced anew, without them."""
    rewrite = GroupExperts.__call__

    def fails(self: GroupExperts, gm: Any, context: Any) -> Any:
        rewrite(self, gm, context)
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(GroupExperts, "__call__", fails)
    module, (logits, *_) = Router(GROUPED[0]), routings()
    x = torch.randn(TOKENS, HIDDEN)
    with pytest.warns(UserWarning, match="group_experts failed"), fxpasses.inspect.record() as record:
        ours = torch.compile(module, backend=fastpack_backend, options={"fastpack.lowering": "eager"})
        torch.testing.assert_close(ours(x, logits), module(x, logits), rtol=0, atol=0)
    assert [graph.outcome for graph in record.graphs[:2]] == ["retraced", "captured"]


@pytest.mark.parametrize("program", [GROUPED[0], CUT[0]], ids=lambda program: program.__name__)
def test_proofs_hold_for_the_captured_graph(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs if the rewritten graph does not compile: every branch, without tokens too, and Python's integers."""
    lower = backend._lower

    def fails(result: Any, gm: Any, *arguments: Any) -> Any:
        if result.gm is not gm:
            raise ZeroDivisionError("a defect")
        return lower(result, gm, *arguments)

    monkeypatch.setattr(backend, "_lower", fails)
    with pytest.warns(UserWarning, match="compiling a graph as rewritten failed"):
        record, _ = check(program, 2, strict=False)
    assert [graph.outcome for graph in record.graphs] == ["captured"]
    assert record.figures("group_experts")["loops_grouped"] == 1


def test_fake_results_with_the_sizes_of_one_expert_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch computes what it keeps twice, and would find none of it again."""
    inside = []
    kept = FakeTensorMode._make_cache_entry

    def make(mode: Any, state: Any, key: Any, operator: Any, *given: Any) -> Any:
        inside.append(operator)
        return kept(mode, state, key, operator, *given)

    monkeypatch.setattr(FakeTensorMode, "_make_cache_entry", make)
    FakeTensorMode.cache_clear()
    check(padded_hits, 1)
    assert inside and torch.ops.aten.mm.default not in inside  # the experts' own products, before they are grouped
