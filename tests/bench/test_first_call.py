"""What a first call costs, in CPU seconds: by phase, and with the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from torch._dynamo.utils import dynamo_timed, get_chromium_event_logger

from bench.cases import compile_time
from bench.first_call import AOT, CXX, DYNAMO, INDUCTOR, PASSES, PHASES, STEP, first_call


def compute(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


PROGRAM = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\n"
# The system counts user and system time in ticks of 10 ms, and may leave out one started tick of each.
LEAST = 0.3 - 0.03


def test_a_phase_has_the_time_in_which_it_is_the_innermost_one():
    def call() -> None:
        compute(0.05)
        with dynamo_timed("_compile.compile_inner", phase_name="entire_frame_compile"):
            compute(0.1)
            with dynamo_timed("an event that is not listed"):
                compute(0.1)
            with dynamo_timed("compile_fx_inner", phase_name="inductor_compile"):
                compute(0.15)

    call()  # what Dynamo imports for its first event is not measured
    cost = first_call(call)
    assert cost[f"{DYNAMO}_s"] == pytest.approx(0.2, abs=0.03)
    assert cost[f"{INDUCTOR}_s"] == pytest.approx(0.15, abs=0.03)
    assert cost[f"{STEP}_s"] == pytest.approx(0.05, abs=0.03)
    assert cost[f"{AOT}_s"] == 0
    assert sum(cost[f"{phase}_s"] for phase in PHASES) == pytest.approx(cost["cpu_s"], abs=0.03)


def test_processes_that_ended_count_and_so_do_those_that_still_run():
    ended = first_call(lambda: subprocess.run([sys.executable, "-c", PROGRAM], check=True))
    assert ended[f"{CXX}_s"] >= LEAST and ended["wall_s"] >= LEAST
    if sys.platform == "linux":
        running: list[Any] = []

        def start() -> None:
            stays = f"{PROGRAM}print(flush=True)\ninput()\n"
            running.append(
                subprocess.Popen([sys.executable, "-c", stays], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            )
            running[0].stdout.readline()

        cost = first_call(start)
        running[0].communicate(b"\n")
        assert cost[f"{CXX}_s"] >= LEAST and cost["cpu_s"] >= LEAST


def test_memory_is_the_largest_resident_set_until_the_calls_end():
    size = 64 << 20
    cost = first_call(lambda: torch.ones(size, dtype=torch.uint8).sum())
    assert cost["peak_bytes"] >= cost["rest_bytes"] > size / 2
    if sys.platform == "linux":
        held = torch.ones(size, dtype=torch.uint8)
        assert first_call(dict)["rest_bytes"] >= cost["rest_bytes"] + size / 2
        del held


def test_a_compilation_is_followed_through_its_phases_and_no_further():
    logger = get_chromium_event_logger()
    compiled = torch.compile(lambda x: x.sin().sum(), backend="fastpack", options={"fastpack.lowering": "aot_eager"})
    x = torch.ones(8, requires_grad=True)
    cost = first_call(lambda: compiled(x).backward())
    for phase in (DYNAMO, PASSES, AOT):
        assert cost[f"{phase}_s"] > 0
    assert cost[f"{INDUCTOR}_s"] == 0
    assert vars(logger).keys().isdisjoint({"log_event_start", "log_event_end"})


def test_a_call_that_fails_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError):
        first_call(lambda: 1 / 0)
    assert "log_event_start" not in vars(get_chromium_event_logger())


def test_gradients_differ_by_their_worst_parameter_and_one_without_differs_most():
    one = torch.ones(4)
    assert compile_time.error([one, one], [one, one]) == 0
    assert compile_time.error([one, one * 1.5], [one, one]) == pytest.approx(0.5)
    assert compile_time.error([one, None], [one, None]) == 0
    assert compile_time.error([None], [one]) == compile_time.error([one], [None]) == float("inf")
