"""With `fastpack.start` "eager", steps run uncompiled until another process has compiled their graph."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect
from fxpasses.base import once
from fxpasses.compiler import backend, eager_start, forked_compiler, progress
from fxpasses.compiler.forked_compiler import Child
from fxpasses.dynamo import cache_entries
from tests.support import compiled, results

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork"),
    pytest.mark.filterwarnings("error:.*another process failed"),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


@pytest.fixture(autouse=True)
def nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    monkeypatch.setattr(eager_start, "_frames", {})
    yield
    for child in list(forked_compiler._running):
        child.end()


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lowerings that this process was asked for; none calls Inductor."""
    if why := forked_compiler.refusal():
        pytest.skip(why)
    found: list[str] = []
    original = backend.lower

    def lower(gm: Any, examples: Any, settings: Any, *rest: Any) -> Any:
        found.append(settings.lowering)
        if settings.lowering == "inductor":
            settings = replace(settings, lowering="aot_eager", inductor={})
        return original(gm, examples, settings, *rest)

    monkeypatch.setattr(backend, "lower", lower)
    return found


def ended(child: Child, seconds: float = 60.0) -> bool:
    until = time.monotonic() + seconds
    while not child.is_over() and time.monotonic() < until:
        time.sleep(0.01)
    return child.is_over()


def steps(program: Any, model: nn.Module, *rows: int) -> None:
    for count in rows:
        x = torch.randn(count, 8, requires_grad=True)
        torch.testing.assert_close(results(program, [x]), results(model, [x]))


def test_a_frame_is_compiled_again_when_its_child_is_over(
    lowered: list[str], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    model = Model()
    program = compiled(model, "inductor", start="eager")
    with fxpasses.inspect.record() as record:
        steps(program, model, 4)
        assert lowered == ["eager"]
        assert forked_compiler.wait(60.0)
        steps(program, model, 4, 4)
    assert lowered == ["eager", "inductor"]
    first, second = record.graphs
    assert first.outcome == "retraced" and second.outcome != "retraced"  # one graph, for a summary
    assert "Model.forward is compiled from its next call on, after 1 without" in capfd.readouterr().err
    if forked_compiler.refusal():  # autograd has threads by now, on torch 2.15
        return
    steps(program, model, 6, 7)  # other sizes, so another graph
    assert lowered == ["eager", "inductor", "eager"]
    assert forked_compiler.wait(60.0)
    steps(program, model, 5, 6, 7, 4)
    assert lowered == ["eager", "inductor", "eager", "inductor"]


def test_a_graph_that_the_frame_does_not_use_any_more_is_waited_for(lowered: list[str]) -> None:
    model = Model()
    program = compiled(model, "inductor", start="eager")
    steps(program, model, 4, 5, 6)
    assert lowered == ["eager"] * 2
    assert forked_compiler.wait(60.0)
    steps(program, model, 6, 7, 4)
    assert lowered == ["eager"] * 2 + ["inductor"]


def test_activations_move_from_the_first_step_on(lowered: list[str]) -> None:
    model = Model()
    steps(compiled(model, "inductor", start="eager", offload="disk"), model, 4)
    assert lowered == ["aot_eager"]


@pytest.mark.parametrize("is_first", [True, False])
def test_another_backends_graph_of_the_frame_stays(lowered: list[str], is_first: bool) -> None:
    """If it is there first, forgotten graphs would count for Dynamo's limit, beside it."""
    model, other = Model(), Model()
    calls: list[Any] = []

    def theirs(gm: Any, examples: Any) -> Callable[..., Any]:
        calls.append(gm)
        return gm.forward

    unrelated = torch.compile(other, backend=theirs)
    program = compiled(model, "inductor", start="eager")
    if is_first:
        steps(unrelated, other, 4)
        with pytest.warns(UserWarning, match="because another backend has graphs of it"):
            steps(program, model, 4)
    else:
        steps(program, model, 4)
        steps(unrelated, other, 4)
    assert forked_compiler.wait(60.0)
    steps(program, model, 4, 4)
    steps(unrelated, other, 4)
    assert lowered == (["inductor"] if is_first else ["eager", "inductor"])
    assert len(calls) == 1


def test_a_child_that_fails_costs_a_warning(lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    parent, original = os.getpid(), backend.lower

    def lower(*arguments: Any) -> Any:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    monkeypatch.setattr(backend, "lower", lower)
    model = Model()
    program = compiled(model, "inductor", start="eager", strict=False)
    with pytest.warns(UserWarning, match="another process failed. It is compiled in this one") as warned:
        steps(program, model, 4)
        assert forked_compiler.wait(60.0)
        steps(program, model, 4, 4, 4)
    assert len(warned) == 1
    assert lowered == ["eager", "inductor"]


def test_an_error_of_a_child_is_said() -> None:
    def compile() -> None:
        raise ValueError("on purpose")

    child = Child(compile)
    assert ended(child) and not child.succeeded
    assert child.error == "ValueError: on purpose"


def test_a_fork_that_fails_costs_a_warning(lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    model = Model()
    with pytest.warns(UserWarning, match="no more processes.*The first step waits for the compiler"):
        steps(compiled(model, "inductor", start="eager", strict=False), model, 4, 4)
    assert lowered == ["inductor"]


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("eager_start._identity", ["inductor"]),
        ("eager_start.refusal", ["inductor"]),
        ("eager_start.cache_entries.running", ["inductor"]),
        ("eager_start.cache_entries.may_not_recompile", ["eager"]),
        ("eager_start.cache_entries.forget", ["eager"]),
        ("eager_start.progress.say", ["eager", "inductor"]),
    ],
)
def test_an_error_costs_the_option_alone(
    where: str, expected: list[str], lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(once, "_given", set())
    monkeypatch.setattr(f"fxpasses.compiler.{where}", fail)
    model = Model()
    program = compiled(model, "inductor", start="eager", strict=False)
    with pytest.warns(UserWarning, match="on purpose") as warned:
        steps(program, model, 4)
        assert forked_compiler.wait(60.0)
        steps(program, model, 4, 4)
    assert len(warned) == 1
    assert lowered == expected


def test_it_is_refused_aloud_without_caches(lowered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "_given", set())
    model = Model()
    program = compiled(model, "inductor", start="eager")
    expected = pytest.warns(UserWarning, match="waits for the compiler, because PyTorch's caches")
    with inductor_config.patch(force_disable_caches=True), expected:
        steps(program, model, 4, 4)
    assert lowered == ["inductor"]


def test_a_child_is_ended_with_the_processes_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "ticks"

    def compile() -> None:
        subprocess.run(["sh", "-c", f"while true; do echo >> '{file}'; sleep 0.02; done"], check=True)

    child = Child(compile)
    until = time.monotonic() + 60
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert not child.is_over()
    child.end()
    assert child.is_over() and not child.succeeded
    time.sleep(0.1)
    size = file.stat().st_size
    time.sleep(0.3)
    assert file.stat().st_size == size > 0


def test_a_child_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    child = Child(lambda: time.sleep(600))
    assert not child.is_over()
    monkeypatch.setattr(forked_compiler, "LIMIT_S", 0.0)
    assert ended(child) and not child.succeeded


def test_a_child_sees_the_threads_of_its_parent() -> None:
    threads = torch.get_num_threads()

    def compile() -> None:
        assert torch.get_num_threads() == threads

    child = Child(compile)
    assert ended(child) and child.succeeded


@pytest.mark.parametrize("late_s", [0.0, 2.0], ids=["child runs first", "parent has ended first"])
def test_a_child_does_not_outlive_a_parent_that_is_killed(late_s: float, tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = f"""
import os, pathlib, time
from fxpasses.compiler.forked_compiler import Child
parent, started = os.getpid(), pathlib.Path({str(started)!r})
os.register_at_fork(after_in_child=lambda: time.sleep({late_s}))  # a core that is busy runs the child late
print(Child(lambda: (started.touch(), time.sleep(600))).pid, flush=True)
while not started.exists() and not {late_s}:
    time.sleep(0.01)
os.kill(parent, 9)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    child = int(done.stdout)
    until = time.monotonic() + 60
    while is_running(child) and time.monotonic() < until:
        time.sleep(0.1)
    assert not is_running(child)


def is_running(pid: int) -> bool:
    """Whether there is such a process, other than one that has ended and that nobody has waited for."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_only_the_graphs_that_are_named_are_forgotten() -> None:
    entries: list[str] = []

    def backend(gm: Any, examples: Any) -> Callable[..., Any]:
        entries.append(cache_entries.running())
        return gm.forward

    def function(x: Tensor) -> Tensor:
        return x.sin()

    compiled_function = torch.compile(function, backend=backend, dynamic=False)
    x, longer = torch.randn(3), torch.randn(4)
    for each in (x, longer, x, longer):
        compiled_function(each)
    assert len(entries) == 2
    cache_entries.forget(function.__code__, {entries[0]})
    compiled_function(longer)
    assert len(entries) == 2
    compiled_function(x)
    assert len(entries) == 3


def test_a_checkpoint_around_a_compiled_block_starts_compiled(
    lowered: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What backward repeats has to be the code that ran in forward."""
    monkeypatch.setattr(once, "_given", set())
    model = Model()
    program = compiled(model, "inductor", start="eager")

    x = torch.randn(4, 8, requires_grad=True)
    with pytest.warns(UserWarning, match="because a checkpoint runs it twice"):
        found = torch.autograd.grad(checkpoint(program, x, use_reentrant=False).sum(), x)
    torch.testing.assert_close(found, torch.autograd.grad(model(x).sum(), x))
    assert lowered == ["inductor"]


def test_nothing_changes_in_what_a_checkpoint_repeats(lowered: list[str]) -> None:
    model = Model()
    program = compiled(model, "inductor", start="eager")
    steps(program, model, 4)
    assert forked_compiler.wait(60.0)
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(program, x, use_reentrant=False)
    assert lowered == ["eager"]
    y.sum().backward()
    steps(program, model, 4, 4)
    assert lowered == ["eager", "inductor"]


def test_equal_functions_are_functions_of_their_own(lowered: list[str]) -> None:
    """As a cell of a notebook that is run again makes them."""
    for _ in range(2):
        scope: dict[str, Any] = {}
        exec(compile("def function(x): return (x.sin() * 2).sum()", "cell", "exec"), scope)
        program = compiled(scope["function"], "inductor", start="eager")
        program(torch.ones(3))
        assert forked_compiler.wait(60.0)
        for _ in range(2):
            program(torch.ones(3))
    assert lowered == ["eager", "inductor"] * 2


def test_evaluation_is_a_graph_of_its_own(lowered: list[str]) -> None:
    model = Model()
    program = compiled(model, "inductor", start="eager")
    steps(program, model, 4)
    with torch.no_grad():
        program(torch.randn(4, 8, requires_grad=True))
    assert lowered == ["eager", "eager"]
    assert forked_compiler.wait(60.0)
    steps(program, model, 4, 4)
    with torch.no_grad():
        program(torch.randn(4, 8, requires_grad=True))
    assert lowered == ["eager", "eager", "inductor", "inductor"]


def test_a_model_that_several_threads_call_stays_uncompiled(lowered: list[str]) -> None:
    model = Model()
    program = compiled(model, "inductor", start="eager")
    steps(program, model, 4)
    assert forked_compiler.wait(60.0)
    with pytest.warns(UserWarning, match="called by several threads"), ThreadPoolExecutor(1) as pool:
        pool.submit(program, torch.randn(4, 8, requires_grad=True)).result()
    steps(program, model, 4, 4)
    assert lowered == ["eager"]


def test_a_fork_of_the_program_has_no_part_in_a_child(tmp_path: Path) -> None:
    child = Child(lambda: time.sleep(600))
    pid = os.fork()
    if pid == 0:
        child.end()
        os._exit(int(child.is_over()))
    assert os.waitpid(pid, 0)[1] == 0
    assert not child.is_over()


def test_a_child_keeps_no_file_of_its_parent_open() -> None:
    reads, writes = os.pipe()
    child = Child(lambda: time.sleep(600))
    os.close(writes)
    os.set_blocking(reads, False)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            assert os.read(reads, 1) == b""  # the end of the pipe
            break
        except BlockingIOError:
            time.sleep(0.01)
    else:
        raise AssertionError("the child holds the pipe")
    os.close(reads)
    assert not child.is_over()


@pytest.mark.slow
def test_inductors_code_comes_from_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if why := forked_compiler.refusal():
        pytest.skip(why)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    model = Model()
    program = compiled(model, "inductor", start="eager")
    steps(program, model, 4)
    assert len(forked_compiler._running) == 1
    assert forked_compiler.wait(600.0)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.so")}
    assert files
    steps(program, model, 4, 4, 4)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert counters["inductor"]["fxgraph_cache_miss"] == 0
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*.so")} == files
