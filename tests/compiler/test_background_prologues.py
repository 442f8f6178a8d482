"""When a prologue is compiled in the background, and what happens if that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fxpasses.compiler import background_prologues
from fxpasses.compiler.background_prologues import CompiledInBackground

SLOW, FAST = 1.0, 1e-6  # seconds of a batch


class Child:
    """Stands for another process."""

    made: list[Child] = []
    error = "OSError: no space"

    def __init__(self, compile: Callable[[], Any]) -> None:
        self.is_done, self.succeeded = False, True
        self.made.append(self)

    def is_over(self) -> bool:
        return self.is_done


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[Child]:
    monkeypatch.setattr(Child, "made", [])
    monkeypatch.setattr(background_prologues, "Child", Child)
    monkeypatch.setattr(background_prologues, "refusal", lambda traces_backward: "")
    return Child.made


def code(*inputs: Any) -> Any:
    return inputs


def after(seconds: float, compile: Callable[[], Any] = lambda: code, strict: bool = True) -> CompiledInBackground:
    """After as many batches as are measured."""
    later = CompiledInBackground(compile, strict)
    for _ in range(background_prologues._MEASURED):
        assert later.found() is None
        later.took(seconds)
    return later


def test_the_code_is_loaded_when_another_process_is_done(children: list[Child]) -> None:
    later = after(SLOW)
    assert not children
    assert later.found() is None and len(children) == 1
    later.took(SLOW)
    assert later.found() is None
    children[0].is_done = True
    assert later.found() is code
    assert later.found() is None and len(children) == 1


def test_what_gains_less_than_it_takes_is_not_compiled(children: list[Child]) -> None:
    later = after(FAST)
    for _ in range(3):
        assert later.found() is None
        later.took(SLOW)
    assert not children


def test_where_no_process_can_be_forked_this_one_compiles(
    children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_prologues, "refusal", lambda traces_backward: "of threads")
    later = after(SLOW)
    assert later.found() is code
    assert later.found() is None and not children


def test_a_process_that_fails_leaves_it_uncompiled(children: list[Child]) -> None:
    later = after(SLOW)
    assert later.found() is None
    children[0].is_done, children[0].succeeded = True, False
    with pytest.warns(
        UserWarning, match=r"in another process failed \(OSError: no space\). It runs operator by operator"
    ):
        assert later.found() is None
    assert later.found() is None and len(children) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_code_that_cannot_be_loaded_leaves_it_uncompiled(children: list[Child], strict: bool) -> None:
    def fail() -> Any:
        raise RuntimeError("no code")

    later = after(SLOW, fail, strict)
    assert later.found() is None
    children[0].is_done = True
    if strict:
        with pytest.raises(RuntimeError, match="no code"):
            later.found()
    else:
        with pytest.warns(UserWarning, match=r"compiling a prologue failed \(RuntimeError: no code\)"):
            assert later.found() is None
    assert later.found() is None


def test_nothing_is_compiled_inside_backward(children: list[Child], monkeypatch: pytest.MonkeyPatch) -> None:
    later = after(SLOW)
    monkeypatch.setattr(background_prologues, "is_repeated", lambda: True)
    assert later.found() is None and not children
