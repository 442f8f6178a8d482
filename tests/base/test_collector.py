"""While a graph is compiled, full collections leave out what was there before."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch

from fxpasses.base import collector
from fxpasses.base.collector import visiting_what_is_new
from tests.support import compiled


class Node:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_is_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(collector, "_is_left_alone", False)
    gc.unfreeze()
    yield
    assert gc.get_freeze_count() == 0
    gc.freeze()  # as in `little_garbage`


def test_old_objects_are_set_apart_and_new_ones_collected() -> None:
    old = weakref.ref(Node())
    with visiting_what_is_new():
        assert gc.get_freeze_count() > 0
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None and old() is not None
    gc.collect()
    assert old() is None


def test_a_part_of_compiling_sets_apart_what_is_there_at_its_beginning() -> None:
    with visiting_what_is_new():
        made = weakref.ref(Node())
        with visiting_what_is_new():
            gc.collect()
            assert made() is not None
        gc.collect()
        assert made() is not None
    gc.collect()
    assert made() is None


def test_the_last_of_several_threads_ends_it() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with visiting_what_is_new():
            entered.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with pytest.raises(ZeroDivisionError), visiting_what_is_new():
        thread.start()
        entered.wait()
        raise ZeroDivisionError
    assert gc.get_freeze_count() > 0
    leave.set()
    thread.join()


def test_a_program_that_freezes_or_disables_keeps_its_choice() -> None:
    gc.freeze()
    try:
        with visiting_what_is_new():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
    collector._is_left_alone = False
    gc.disable()
    try:
        with visiting_what_is_new():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()


def test_a_graph_is_compiled_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        counts.append(gc.get_freeze_count())
        return gm

    monkeypatch.setattr("fxpasses.compiler.backend.lower", lambda gm, *given, **named: backend(gm, []))
    compiled(function)(torch.ones(3))
    assert counts and counts[0] > 0
