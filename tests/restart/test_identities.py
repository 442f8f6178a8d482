"""Traces of programs that compare objects by identity, or hold what belongs to a trace: another process takes them,
unless its objects are related in another way."""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import itertools
import re
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpasses.dynamo.equal_guards import Reader
from fxpasses.restart import program, recording
from fxpasses.restart.facts import Names
from fxpasses.restart.pickling import CannotPickle
from tests.restart.restarting import forget, traced_from, traces_of
from tests.support import compiled, results

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")
X = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_()


class Settings:
    def __init__(self, scale: float) -> None:
        self.scale, self.names = scale, {0: "a"}


class Model(nn.Module):
    """Asks whether its part has its own settings."""

    def __init__(self, part: Settings | None = None) -> None:
        super().__init__()
        self.linear, self.settings = nn.Linear(4, 4), Settings(0.5)
        self.part = part or self.settings

    def forward(self, x: Tensor) -> Tensor:
        found = self.linear(x)
        return found * self.settings.scale if self.part is self.settings else found * self.part.scale + 1


FUNCTIONS = frozenset({F.relu, F.gelu, Tensor, nn.Module})


def of_its_type(x: Tensor) -> Tensor:
    """Dynamo has a global of its own for torch, by which it reads a type that the program reads as well."""
    return x.sin() if issubclass(type(x + 1), torch.Tensor) else x.cos()


def signed(function: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(function)

    def call(x: Tensor) -> Tensor:
        return function(x, scale=len(signature.parameters))

    return call


@signed
def scaled(x: Tensor, scale: float = 1.0) -> Tensor:
    return x.sin() * scale


def calls(x: Tensor) -> Tensor:
    return scaled(x)


def over_rows(x: Tensor) -> Tensor:
    return torch.vmap(lambda row, other: row.sin() * other.sum(), in_dims=(0, None))(x, x) + x.cos()


PROGRAMS: dict[str, Any] = {
    "an object": Model(),
    "another object": Model(Settings(2.0)),
    "a type": of_its_type,
    "a signature": calls,
    "a transform": over_rows,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_compared_by_identity_is_found_again(name: str) -> None:
    program = PROGRAMS[name]
    assert traced_from(traces_of(program, [(X,)]), program, [(X,)], tolerance=1e-6) == []


@pytest.mark.parametrize(("saved", "now"), [(None, Settings(0.5)), (Settings(0.5), None), (None, Settings(0.25))])
def test_objects_that_are_related_in_another_way(saved: Settings | None, now: Settings | None) -> None:
    traces = traces_of(Model(saved), [(X,)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert traced_from(traces, Model(now), [(X,)]) == ["forward"]


def test_gradients_that_are_there_before_the_first_step() -> None:
    model = nn.Linear(4, 4)
    model(X).sum().backward()
    assert traced_from(traces_of(model, [(X,)]), model, [(X,)]) == []


class WithSlots:
    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


@dataclasses.dataclass
class Sizes:
    width: int
    depth: int = 2


def cached(function: Callable[..., Any]) -> Any:
    return functools.lru_cache(function)


OBJECTS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "object": (lambda: Settings(1.0), lambda: Settings(2.0)),
    "slots": (lambda: WithSlots(1), lambda: WithSlots(2)),
    "class": (lambda: Sizes(1), lambda: Settings(1.0)),
    "fields": (lambda: dataclasses.fields(Sizes), lambda: dataclasses.fields(Sizes)[::-1]),
    "signature": (lambda: inspect.signature(calls), lambda: inspect.signature(signed)),
    "cached": (lambda: cached(calls), lambda: cached(over_rows)),
    "set": (lambda: {F.relu, Tensor}, lambda: {F.gelu, Tensor}),
}


def named(value: Any) -> Any:
    return Names(Reader({}, {}))(value)


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_are_named_by_all_that_they_hold(name: str) -> None:
    one, other = OBJECTS[name]
    assert named(one()) == named(one()) != named(other())


@pytest.mark.parametrize("value", [threading.Lock(), re.compile("a"), itertools.count(), Settings(0.0)])
def test_objects_that_may_hold_more_have_no_name(value: Any) -> None:
    if isinstance(value, Settings):
        value.scale = iter(())
    with pytest.raises(CannotPickle, match="by identity"):
        named(value)


def in_order(x: Tensor) -> Tensor:
    for function in FUNCTIONS:
        x = x + 1 if function is F.relu else x * 2
    return x


def test_the_order_of_objects_in_a_set_is_the_processes() -> None:
    forget()
    recording.start()
    results(compiled(in_order), (X,))
    assert not recording.saved()
    assert "the order of a set of objects" in next(iter(recording.refusals().values()))


def part_of(kind: type) -> Any:
    class Part(kind):
        factor = kind.factor * 2

    return Part


class One:
    factor = 1.0


LOCAL = part_of(One), part_of(One)  # of one name, and of the same content


class OfClasses(nn.Module):
    """Asks which of two objects is of a class."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.parts, self.kind = [kind() for kind in LOCAL], LOCAL[place]

    def forward(self, x: Tensor) -> Tensor:
        return x * (2.0 if isinstance(self.parts[0], self.kind) else 3.0)


class Named(NamedTuple):
    factor: float


class OfTuples(nn.Module):
    def __init__(self, are_one: bool) -> None:
        super().__init__()
        self.part = Named(2.0)
        self.other = self.part if are_one else Named(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.part.factor if self.part is self.other else 3.0 * self.other.factor)


@pytest.mark.parametrize(
    ("saved", "now"),
    [(OfClasses(0), OfClasses(1)), (OfTuples(False), OfTuples(True)), (OfTuples(True), OfTuples(False))],
)
def test_what_is_one_in_another_process(saved: nn.Module, now: nn.Module) -> None:
    traces = traces_of(saved, [(X,)])
    assert traced_from(traces, saved, [(X,)]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert traced_from(traces, now, [(X,)]) == ["forward"]


def by_function(x: Tensor) -> Tensor:
    return x * (2.0 if F.relu in FUNCTIONS else 3.0)


def by_key(x: Tensor) -> Tensor:
    return x * {F.relu: 2.0, F.gelu: 3.0}.get(F.gelu, 1.0)


def by_identity(x: Tensor) -> Tensor:
    return x * float(id(LOCAL[0]) % 7 + 1)


def by_hash(x: Tensor) -> Tensor:
    return x * float(hash(LOCAL[0]) % 7 + 1)


@pytest.mark.parametrize(
    ("asks", "why"),
    [
        (by_function, "looks for an object"),
        (by_identity, "the identity of an object"),
        (by_hash, "the hash of an object"),
    ],
)
def test_what_each_process_answers_in_its_own_way(asks: Any, why: str) -> None:
    forget()
    recording.start()
    results(compiled(asks, strict=False), (X,))
    assert not recording.saved()
    assert why in next(iter(recording.refusals().values()))


def by_hash_of_text(x: Tensor) -> Tensor:
    return x * float(hash("abc") % 7 + 1)


def test_the_hash_of_a_text_is_that_of_processes_with_one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    traces = traces_of(by_hash_of_text, [(X,)])
    assert traced_from(traces, by_hash_of_text, [(X,)]) == []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setattr(program, "order_of_sets", lambda: "another")
        assert traced_from(traces, by_hash_of_text, [(X,)]) == ["by_hash_of_text"]


def test_parts_of_two_traces_are_no_trace() -> None:
    scale = [2.0]

    def scaled_by(x: Tensor) -> Tensor:
        return x * scale[0]

    one = traces_of(scaled_by, [(X,)])
    scale[0] = 3.0
    other = traces_of(scaled_by, [(X,)])
    mixed = [dataclasses.replace(one[0], body=other[0].body), dataclasses.replace(other[0], body=one[0].body)]
    with pytest.warns(UserWarning, match="a part of another trace"):
        assert traced_from(mixed, scaled_by, [(X,)]) == ["scaled_by"]


def test_very_many_objects_have_no_name() -> None:
    shared = [[[[0] * 40] * 40] * 40] * 40
    with pytest.raises(CannotPickle, match="more than 50000 objects"):
        named(shared)


def test_what_counts_as_a_subclass_of_a_class_of_python() -> None:
    before = program._registered(collections.abc.Reversible)
    collections.abc.Reversible.register(Settings)
    assert program._registered(collections.abc.Reversible) != before


NAMES = ["a", "bb"]


@pytest.mark.parametrize("grows", [False, True])
def test_a_set_of_a_list_has_the_order_of_the_list(grows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def loops(x: Tensor) -> Tensor:
        found = set(NAMES)
        if grows:
            found.update({"ccc", "dddd"})
        for name in found:
            x = x.sin() + len(name) if len(name) > 4 else x + len(name)
        return x

    traces = traces_of(loops, [(X,)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        monkeypatch.setattr(program, "order_of_sets", lambda: "another")
        assert traced_from(traces, loops, [(X,)], tolerance=1e-6) == (["loops"] if grows else [])
