"""The table of what is asked in place of Dynamo's methods: in which order, and what a torch may lack."""

from __future__ import annotations

import contextlib
import dis
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import symbolic_convert, utils
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables import lists
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.tensor import NumpyNdarrayVariable

from fxpasses.dynamo import flags, interceptions
from fxpasses.dynamo.attempt import Attempt
from fxpasses.dynamo.features import Feature
from tests.support import assert_same, compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

X, LENGTHS = torch.linspace(-1, 1, 24).view(12, 2), torch.tensor([8, 4])
LOGITS, W = torch.eye(3).repeat(4, 1) * torch.tensor([1, 1, 0]), torch.linspace(-1, 1, 12).view(3, 2, 2)
# Speculation, and what needs it.
SPECULATIVE = {
    Feature.SPECULATION, Feature.NUMPY, Feature.LISTS, Feature.INDICES, Feature.ROUNDS, Feature.SEQUENCES,
}  # fmt: skip


def longest_decides(x: Tensor, lengths: Tensor) -> Tensor:
    return x.sin() if lengths.max().item() > 6 else x.cos()


def contains(x: Tensor, lengths: Tensor) -> Tensor:
    return x.sin() if 4 in lengths.tolist() else x.cos()


def skips(x: Tensor, logits: Tensor, w: Tensor) -> Tensor:
    ids, out = logits.argmax(-1), torch.zeros_like(x)
    for e in range(W.shape[0]):
        tok = torch.where(ids == e)[0]
        if tok.numel() > 0:
            out.index_add_(0, tok, x[tok] @ w[e])
    return out


def is_exactly_true(x: Tensor, lengths: Tensor) -> Tensor:
    return x.sin() if bool(lengths.max()) is True else x.cos()


def off_without(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> set[Feature]:
    """What a missing name switches off, besides what this torch is known to lack."""
    before = interceptions.off_in(interceptions.table())
    with monkeypatch.context() as patch:
        patch.delattr(owner, name)
        return set(interceptions.off_in(interceptions.table()) - before)


def test_the_handlers_of_a_place_have_an_order() -> None:
    found = [(id(place[0]), place[1], row.handler.order) for row in interceptions.table() for place in row.places]
    assert len(found) == len(set(found))


def test_this_torch_has_every_place() -> None:
    assert [row.missing for row in interceptions.table() if row.missing] == []


@pytest.mark.parametrize(
    ("handler", "fits"),
    [
        (lambda trace, proceed, tx, v, *args: None, False),  # `compare(tx, v, op="eq")` would raise
        (lambda trace, proceed, tx, v, *args, **kwargs: None, True),
        (lambda trace, proceed, tx, v, op: None, True),
        (lambda trace, proceed, tx, v, kind: None, False),
    ],
)
def test_a_handler_takes_what_its_method_may_be_given(handler: Any, fits: bool) -> None:
    def compare(tx: Any, v: Any, op: str) -> None: ...

    row = interceptions.Handler(interceptions.Site("compare", list), handler, 0, "")
    with contextlib.nullcontext() if fits else pytest.raises(TypeError, match="compare takes"):
        interceptions._check_parameters(row, compare)


def test_instructions_that_only_a_debugger_sees_are_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 and later have them, and Dynamo an entry that fails for each."""
    names = [*dis.opname]
    names[dis.opmap["NOP"]] = "INSTRUMENTED_POP_JUMP_IF_TRUE"
    monkeypatch.setattr(dis, "opname", names)
    site = interceptions.opcodes("conditional jump", "IF_TRUE", "IF_FALSE")
    assert dis.opmap["NOP"] not in {opcode for _, opcode in site.places()}


def test_a_missing_name_switches_off_its_own_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(lists, "iter_contains")
    with pytest.warns(
        UserWarning, match=r"lists.iter_contains \(checked .*: `3 in .* breaks the graph.*doctor"
    ) as said:
        torch.testing.assert_close(compiled(longest_decides)(X, LENGTHS), longest_decides(X, LENGTHS))
    assert len([each for each in said if str(each.message).startswith("fxpasses")]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch._dynamo.reset()
        record = assert_same(longest_decides, [(X, LENGTHS), (X, LENGTHS // 2)])
        assert [graph.reports[0].pass_name for graph in record.graphs] == ["capture"] * 2
        assert len(assert_same(skips, [(X, LOGITS, W)]).graphs) == 1


@pytest.mark.parametrize("first", ["another backend", "fastpack"])
def test_a_method_that_dynamo_keeps_is_that_of_the_running_trace(first: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps the bound method that it found when it first traced `bool` of a tensor."""
    kept: dict[Any, Any] = {}
    monkeypatch.setattr(BuiltinVariable, "call_function_handler_cache", kept)
    if first == "another backend":
        torch.compile(is_exactly_true, backend="eager")(X, LENGTHS)
        assert kept
        torch._dynamo.reset()
    assert len(assert_same(is_exactly_true, [(X, LENGTHS)]).graphs) == 1
    assert BuiltinVariable.call_function_handler_cache is kept and bool(kept) == (first == "another backend")


def test_what_a_feature_cannot_do_without_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    assert off_without(SideEffects, "store_global", monkeypatch) == {*SPECULATIVE, Feature.LAYERS}
    assert off_without(NumpyNdarrayVariable, "call_method", monkeypatch) == set()
    for owner, name in ((utils, "run_node"), (symbolic_convert.InstructionTranslatorBase, "step")):
        assert off_without(owner, name, monkeypatch) >= {*SPECULATIVE, Feature.HINTS, Feature.SLICES, Feature.OUTPUTS}


def test_a_feature_that_is_off_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a site at which Python's state is monitored, nothing is speculated, and numbers still have hints."""
    monkeypatch.delattr(SideEffects, "store_global")
    with pytest.warns(UserWarning, match="SideEffects.store_global .*loops that skip experts"):
        assert assert_same(skips, [(X, LOGITS, W)]).figures("group_experts") == {}
    record = assert_same(contains, [(X, LENGTHS), (X, LENGTHS // 2)])
    assert all("assumed" in str(graph.reports[0]) for graph in record.graphs)


def test_an_attempt_loses_what_needs_what_it_loses() -> None:
    attempt = Attempt(flags.Values(True, True), frozenset(Feature))
    assert attempt.without(Feature.SPECULATION).features == frozenset(Feature) - SPECULATIVE
    alone = frozenset({Feature.FLOATS, Feature.HOOKS, Feature.MEMBERS, Feature.STRINGS, Feature.WRITES})
    assert attempt.without(Feature.HINTS).features == alone
    fewer = attempt.with_fewer_flags()
    assert fewer is not None and fewer.flags == flags.Values(True, False) and fewer.features == attempt.features
    last = fewer.with_fewer_flags()
    assert last == Attempt(flags.Values(False, False), alone) and last.with_fewer_flags() is None
    assert Attempt(None).with_fewer_flags() is None
