"""A run: each piece measured until its time is over, and the page written after each."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench import results
from bench.gpu import suite
from bench.gpu.page import page
from bench.gpu.pieces import Measured
from bench.gpu.schedule import FAILED, NOT_RUN, Outcome, Piece
from bench.measuring import Settings, run_case
from bench.peer import ROOT

MOST_AT_ONCE = 8  # contenders that compile side by side, each with compile workers of its own
TEST_PROCESSES = 4
SCRATCH = ROOT / "bench" / "scratch" / "gpu"
SAME = tuple(key for key in results.IDENTITY if key not in ("case", "quick"))


class Run:
    """What is known of a run, in `FOLDER/gpu.DEVICE.json`, and its page beside it.

    resume: go on with what the folder holds of the same commit, versions and machine. say: is told what goes on.
    """

    def __init__(
        self, folder: Path, device: str, minutes: float, resume: bool, say: Callable[[str], None] = lambda text: None
    ) -> None:
        self.folder, self.device, self.resume, self.say = folder, device, resume, say
        self.threads = min(4, torch.get_num_threads())
        self.file = folder / f"gpu.{device}.json"
        # Of pytest, with each traceback: beside the results, unless these are the committed ones.
        self.log = (SCRATCH if folder.resolve() == results.FOLDER else folder) / f"gpu.{device}.tests.log"
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.processes = max(2 if device == "cuda" else 1, min(MOST_AT_ONCE, cores // 2))
        fresh = results.new("gpu", device, device != "cuda", self.threads)
        fresh |= {"tests": None, "pieces": {}, "seconds": 0.0}
        self.found, why = results.begin(self.file, fresh, resume)
        if why:
            say(f"{self.file.name} holds results {why}: everything is run again")
        self.before = self.found["seconds"]
        self.found["minutes"] = minutes + self.before / 60
        self.began = time.monotonic()

    @property
    def page_file(self) -> Path:
        """The page of the committed results lies in bench, as RESULTS.md does; any other folder has it inside."""
        return (self.folder.parent if self.folder.resolve() == results.FOLDER else self.folder) / "GPU.md"

    def sized(self, piece: Piece) -> Piece:
        return piece.sized(self.device, self.processes) if isinstance(piece, Measured) else piece

    def work(self, piece: Piece, until: float) -> None:
        self.say(f"{piece.name}: up to {until - time.monotonic():.0f} s")
        if isinstance(piece, Measured):
            self.measure(piece, until)
        else:
            self.test(until)

    def ended(self, piece: Piece, outcome: Outcome) -> None:
        self.say(f"{piece.name}: {': '.join(filter(None, [outcome.outcome, outcome.why]))}, {outcome.seconds:.0f} s")
        earlier = self.found["pieces"].get(piece.name)
        if not (outcome.outcome == NOT_RUN and earlier and earlier["outcome"] != NOT_RUN):
            self.found["pieces"][piece.name] = dataclasses.asdict(outcome)
        self.write()

    def write(self) -> None:
        self.found["seconds"] = self.before + time.monotonic() - self.began
        results.write(self.file, self.found)
        self.page_file.write_text(page(self.found, self.measured()))

    def measured(self) -> dict[str, Mapping[str, Any]]:
        """The results of this run's cases; a file of another commit or machine is none of its."""
        found: dict[str, Mapping[str, Any]] = {}
        for name in self.found["pieces"]:
            file = results.path(self.folder, name, self.device)
            if file.exists():
                read = results.read(file)
                if all(read.get(key) == self.found[key] for key in SAME):
                    found[name] = read
        return found

    def test(self, until: float) -> None:
        earlier = self.found["tests"]
        targets = suite.not_run(earlier) if earlier else suite.files()
        if earlier and not targets and not earlier["ended"]:
            return

        def keep(found: suite.Found) -> None:
            if earlier:
                found["tests"] = earlier["tests"] | found["tests"]
            self.found["tests"] = found
            if found["ended"] or any(test["outcome"] == "failed" for test in found["tests"].values()):
                self.say(f"what pytest printed: {self.log}")

        suite.run(targets or suite.files(), until, min(TEST_PROCESSES, self.processes), keep, self.log)

    def measure(self, piece: Measured, until: float) -> None:
        """Each group has its part of the time, and what those before it left."""
        case = piece.case(self.device)
        settings = Settings.quick(self.device, self.threads)
        settings = dataclasses.replace(settings, at_once=self.processes, limit_s=math.inf)  # there is `until`
        fresh = results.new(case.name, self.device, self.device != "cuda", self.threads, settings.processes)
        fresh["at_once"] = settings.at_once
        file = results.path(self.folder, case.name, self.device)
        found, _ = results.begin(file, fresh, self.resume)
        groups = case.groups(self.device, False)
        for at, group in enumerate(groups):
            now = time.monotonic()
            its = dataclasses.replace(settings, until=now + (until - now) / (len(groups) - at))
            alone = dataclasses.replace(case, groups=functools.partial(_one, group))
            run_case(alone, found, its, functools.partial(results.write, file, found))
        for entry in found["entries"]:
            if entry["outcome"] in ("wrong", "failed"):
                self.say(f"{case.name}, {entry['contender']}: {entry['outcome']}: {entry['why']}")

    def all_is_well(self) -> bool:
        """Whether no piece failed, and no test that was run."""
        tests = (self.found["tests"] or {"tests": {}})["tests"].values()
        outcomes = [piece["outcome"] for piece in self.found["pieces"].values()]
        return FAILED not in outcomes and all(test["outcome"] != "failed" for test in tests)


def _one(group: Mapping[str, Any], device: str, quick: bool) -> list[Mapping[str, Any]]:
    return [group]
