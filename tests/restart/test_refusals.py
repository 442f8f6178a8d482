"""What is not kept, what is damaged, and what fails while a trace is kept or restored: the frame is traced."""

from __future__ import annotations

import importlib
import os
import pickle
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpasses.compiler import backend
from fxpasses.restart import dynamo_state, pickling, program, recording, restoring
from fxpasses.restart.saved_trace import SavedTrace
from tests.restart.programs import BATCHES, WIDTH, Model, reads_variables
from tests.restart.restarting import forget, traced_from, traces_of
from tests.support import compiled, results

pytestmark = pytest.mark.skipif(torch.__version__ < "2.13", reason="traces are kept from torch 2.13 on")


@pytest.mark.parametrize("part", ["head", "body"])
def test_damaged_traces_are_left_alone(part: str) -> None:
    model = Model()
    (trace,) = traces_of(model, BATCHES, strict=False)
    whole = getattr(trace, part)
    for content in (b"", whole[: len(whole) // 2], b"x" * 100, pickle.dumps(None)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = traced_from([replace(trace, **{part: content})], model, BATCHES, strict=False)
        assert found == ["forward"]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (restoring, "_guards"),
        (restoring, "_check_batch"),
        (restoring, "_examples"),
        (restoring, "set_tracked_fakes"),
        (restoring, "RestoredFrame"),
        (restoring, "add_automatic_dynamic"),
        (dynamo_state, "CheckFunctionManager"),
        (pickling, "no_dispatch"),
        (backend, "lower"),
    ],
)
def test_what_fails_while_a_trace_is_restored_has_the_frame_traced(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model()
    traces = traces_of(model, BATCHES, strict=False)
    original, failures = getattr(owner, name), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        if not failures:
            failures.append(name)
            raise ZeroDivisionError("a defect")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, fails)
    with pytest.warns(UserWarning, match=r"taking a trace from a file failed \(ZeroDivisionError: a defect\)"):
        assert traced_from(traces, model, BATCHES, strict=False) == ["forward"]
    assert failures
    traces = traces_of(model, BATCHES)
    failures.clear()
    with pytest.raises(Exception, match="a defect"):
        traced_from(traces, model, BATCHES)


def test_what_fails_while_a_trace_is_kept_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> Any:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(program, "sources", fails)
    recording.start()
    assert results(compiled(Model()), BATCHES[0])
    assert [*recording.refusals().values()] == ["a defect"] and not recording.saved()


def test_frames_that_another_process_cannot_have_are_traced() -> None:
    class Breaks(Model):
        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            y = super().forward(x, lengths)
            torch._dynamo.graph_break()
            return y + 1

    recording.start()
    forget()
    model = Breaks()
    results(compiled(model), BATCHES[0])
    assert any("graph break" in why for why in recording.refusals().values())


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    forget()
    results(compiled(Model()), BATCHES[0])
    assert not recording.saved() and not recording.refusals()


@torch._dynamo.assume_constant_result
def constant_result() -> int:
    return 3


def reads_a_constant(x: Tensor) -> Tensor:
    return x * constant_result()


def reads_the_environment(x: Tensor) -> Tensor:
    return x * sum(len(os.getenv(f"A_{name}", "")) for name in "AB")


@pytest.mark.parametrize(
    ("function", "why"), [(reads_a_constant, "constant"), (reads_the_environment, "the environment")]
)
def test_what_dynamo_does_not_guard_is_not_kept(function: Any, why: str) -> None:
    recording.start()
    forget()
    compiled(function)(torch.ones(2))
    assert any(why in reason for reason in recording.refusals().values()), recording.refusals()


def test_a_file_that_was_written_to_while_the_process_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "a_module_of_this_test.py"
    path.write_text("def double(x): return x * 2\n")
    module = importlib.import_module(path.stem)
    os.utime(path, (1, 1))
    forget()
    traces = traces_of(module.double, [(torch.ones(2),)])
    assert traced_from(traces, module.double, [(torch.ones(2),)]) == []
    path.write_text("def double(x): return x * 3\n")
    recording.start()
    forget()
    compiled(module.double)(torch.ones(2))
    assert "was written to after the process had begun" in " ".join(recording.refusals().values())


_read = os.getenv


def reads_by_another_name(x: Tensor) -> Tensor:
    return reads_variables(x) * len(_read("FXPASSES_TEST_D", "abcd"))


def test_variables_that_are_read_by_another_name() -> None:
    recording.start()
    forget()
    compiled(reads_by_another_name)(torch.ones(2))
    assert recording.saved() or recording.refusals()
    assert not any("FXPASSES_TEST_D" not in head.environment for head in map(head_of, recording.saved()))


def head_of(trace: SavedTrace) -> Any:
    return pickle.loads(trace.head)


def test_a_plan_of_memory_for_any_size_is_not_saved() -> None:
    """It is for the batch that it was made for: another process may begin with a much larger one."""
    forget()
    recording.start()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    run = compiled(model, "aot_eager", memory=1 << 50)
    for rows in (4, 6):
        run(torch.randn(rows, WIDTH)).sum().backward()
    assert len(recording.saved()) == 1 and "its memory is planned" in str(recording.refusals())
