"""A patch of several threads is there from the first that enters to the last that leaves."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fxpasses.base.patching import Patch


def test_the_last_one_to_leave_restores_the_original() -> None:
    owner = SimpleNamespace(double=lambda x: 2 * x)
    original = owner.double
    patch = Patch("doubling", lambda: owner, double=lambda double: lambda x: double(x) + 1)
    first, second = patch(), patch()
    first.__enter__()
    second.__enter__()
    assert owner.double(3) == 7
    first.__exit__(None, None, None)
    assert owner.double(3) == 7
    second.__exit__(None, None, None)
    assert owner.double is original


def test_it_is_gone_after_an_error() -> None:
    owner = SimpleNamespace(value=1)
    patch = Patch("counting", lambda: owner, value=lambda value: value + 1)
    for _ in range(2):
        with pytest.raises(KeyError), patch():
            assert owner.value == 2
            raise KeyError
        assert owner.value == 1


def test_an_attribute_that_is_not_there_costs_a_warning_and_nothing_else() -> None:
    owner = SimpleNamespace(value=1)
    patch = Patch("what a later version lacks", lambda: owner, value=lambda value: value + 1, other=lambda value: value)
    expected = pytest.warns(UserWarning, match="what a later version lacks failed .*Graphs are compiled without it")
    with expected, patch():
        assert owner.value == 1
    with patch():
        assert owner.value == 1
    assert vars(owner) == {"value": 1}
