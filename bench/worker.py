"""The process of one contender: it answers each JSON line that it reads with one line. `bench.peer` starts it.

One process each keeps contenders apart: flags, caches and compiled code of one cannot help or hurt another, its memory
can be seen from outside, and it can be killed if it takes too long.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
import timeit
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.benchmark import Timer

from bench import counting
from bench.case import load


class Worker:
    """One method for each verb of a request."""

    def __init__(self, case: str, contender: str, parameters: Mapping[str, Any], device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.device = device
        self.case = load(case)
        self.contender = self.case.contender(contender)
        self.parameters = parameters

    def prepare(self) -> dict[str, Any]:
        """Build, compile, and see every batch once. compile_s: the extra time over the same steps when warm."""
        torch.manual_seed(0)
        self.program = self.contender.build(self.parameters, self.device)
        self._timed = self._timer()
        started = time.perf_counter()
        values = dict(self.program.values())
        for _ in range(self.program.batches):
            self.program.step()
        self._wait()
        warm_up = time.perf_counter() - started
        step = self._timed(1)
        compiling = max(0.0, warm_up - (self.program.batches + 1) * step) if self.contender.compiles else None
        costs = dict(self.program.compiling())
        self.rest()  # all of a group's processes are there at once
        return {"values": values, "step_s": step, "compile_s": compiling, "compiling": costs, **counting.graphs()}

    def time(self, number: int) -> dict[str, float]:
        return {"seconds": self._timed(number)}

    def _timer(self) -> Callable[[int], float]:
        """A function that returns the seconds of a step, measured over that many steps."""
        threads = torch.get_num_threads()
        if self.case.cpu_time and threads == 1 and self.device == "cpu":
            timer = timeit.Timer(self.program.step, timer=time.process_time)
            return lambda number: timer.timeit(number) / number
        measured = Timer("step()", globals={"step": self.program.step}, num_threads=threads)
        return lambda number: measured.timeit(number).median

    def count(self) -> dict[str, Any]:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self.program.step()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        found = {"page_faults": faults, **counting.counts(self.program.step), "figures": dict(self.program.figures())}
        if self.device == "cpu":
            found["allocated_bytes"] = counting.allocated_bytes(self.program.step)
        self.rest()
        return found

    def profile(self) -> dict[str, Any]:
        return {"top": counting.top_operators(self.program.step)}

    def timeline(self) -> dict[str, Any]:
        return {"spans": counting.timeline(self.program.step)}

    def rest(self) -> dict[str, Any]:
        """Return freed memory to the system, so that the parent sees only memory in use."""
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL(None).malloc_trim(0)
        return {}

    def steps(self) -> dict[str, Any]:
        """See every batch once more; on a device, return its memory at rest and the peak allocation."""
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        for _ in range(self.program.batches):
            self.program.step()
        self._wait()
        if self.device == "cuda":
            return {"rest_bytes": before, "peak_bytes": torch.cuda.max_memory_allocated()}
        # getrusage is for systems without /proc; it counts from the start of the process.
        unit = 1 if sys.platform == "darwin" else 1024
        return {"process_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {text}"[:300]


def main() -> None:
    # Output of libraries must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    if sys.platform == "linux":
        # Compiling a large graph may take all memory: then this process is to be killed, and no other.
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    worker: Worker | None = None
    for line in sys.stdin:
        request = json.loads(line)
        verb = request.pop("verb")
        try:
            if worker is None:
                worker = Worker(**json.loads(sys.argv[1]))
            answer = getattr(worker, verb)(**request)
        except Exception as error:
            import traceback

            traceback.print_exc()
            answer = {"error": first_line(error)}
        answers.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
