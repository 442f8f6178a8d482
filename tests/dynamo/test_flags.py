"""The capture flags: on inside a scope, restored after, for every thread that is inside."""

import contextvars
import threading
import timeit
from collections.abc import Callable, Iterator

import pytest
import torch._dynamo.config as config

from fxpasses.dynamo import flags

OFF, ON = flags.Values(False, False), flags.ON


def values() -> flags.Values:
    return flags.Values(*(getattr(config, name) for name in flags.FLAGS))


@pytest.fixture(autouse=True)
def flags_start_off(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(flags.KEEP_CONFIG, raising=False)
    with config.patch(dict.fromkeys(flags.FLAGS, False)):
        yield


def in_thread(function: Callable[[], object]) -> object:
    result: list[object] = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def in_copied_context(function: Callable[[], object]) -> object:
    """So that what the function switches on for this context ends with it."""
    return contextvars.copy_context().run(function)


def test_a_scope_switches_both_flags_on_and_restores_them() -> None:
    with flags.scoped():
        assert values() == ON
    assert values() == OFF


def test_a_scope_restores_values_that_differ() -> None:
    config.capture_dynamic_output_shape_ops = True
    with flags.scoped():
        assert values() == ON
    assert values() == (False, True)


def test_a_scope_restores_after_an_error() -> None:
    with pytest.raises(KeyError), flags.scoped():
        raise KeyError
    assert values() == OFF


def test_scopes_nest() -> None:
    with flags.scoped():
        with flags.scoped():
            pass
        assert values() == ON
    assert values() == OFF


def test_a_held_value_goes_before_a_scope_and_a_scope_inside_does_not_undo_it_after() -> None:
    with flags.scoped():
        with flags.held_at(OFF):
            assert values() == OFF
            with flags.held_at(flags.Values(True, False)):
                assert values() == (True, False)
            assert values() == OFF
        assert values() == ON
    assert values() == OFF


def test_a_thread_that_leaves_does_not_switch_the_flags_off_for_another() -> None:
    first_is_inside, second_is_inside = threading.Event(), threading.Event()

    def first() -> None:
        with flags.scoped():
            first_is_inside.set()
            second_is_inside.wait(10)

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_inside.wait(10)
    with flags.scoped():
        second_is_inside.set()
        thread.join()
        assert values() == ON
    assert values() == OFF


def test_many_threads_inside_at_once_always_find_the_flags_on_and_leave_them_off() -> None:
    found: set[flags.Values] = set()

    def enter_often() -> None:
        for _ in range(200):
            with flags.scoped():
                found.add(values())

    threads = [threading.Thread(target=enter_often) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {ON}
    assert values() == OFF


def test_a_trace_holds_the_flags_and_what_another_backend_traces_inside_finds_those_of_the_process() -> None:
    with config.patch(capture_scalar_outputs=True):
        with flags.held_at(flags.Values(False, True)), flags.held_at(ON):
            assert values() == ON
            with flags.as_outside():
                assert values() == (True, False)
            assert values() == ON
        with flags.as_outside():
            assert values() == (True, False)


def test_every_trace_for_this_backend_wants_both_flags() -> None:
    assert flags.wanted() == ON and in_thread(flags.wanted) == ON
    with config.patch(capture_scalar_outputs=False):
        assert flags.wanted() == ON


def test_enabling_for_the_process_inside_a_scope_outlasts_it() -> None:
    def enable() -> None:
        with flags.scoped():
            flags.enable_for_process()
        assert flags.THREAD_LOCAL or values() == ON  # a scope restores its context's values
        flags.enable_for_process()
        assert values() == ON

    in_copied_context(enable)


def test_the_environment_keeps_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.KEEP_CONFIG, "1")
    in_copied_context(flags.enable_for_process)
    assert values() == OFF
    assert flags.wanted() == OFF and in_thread(flags.wanted) == OFF
    with config.patch(capture_scalar_outputs=True):
        assert flags.wanted() == (True, False)


def test_a_scope_costs_microseconds() -> None:
    def enter() -> None:
        with flags.scoped():
            pass

    seconds = min(timeit.repeat(enter, number=2000, repeat=5)) / 2000
    assert seconds < 50e-6  # 3 to 4 µs where it was measured; a bound that a busy machine keeps
