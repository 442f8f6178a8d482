"""Measure a group: prepare every contender, check it, then time all of them in turns.

    round 0:  eager  Inductor  fastpack      one figure each, by `torch.utils.benchmark.Timer`
    round 1:  Inductor  fastpack  eager      another order, so that none always follows the same
    ...
    and if asked for, half of the rounds in new processes, with the compile caches that the first ones filled

Ratios are taken within a round, so that what slows the machine down for a while slows all contenders: a shared machine
is slow for seconds at a time, hence many short rounds. One process is faster than the next by some per cent, for where
its memory happens to lie: several of each contender show by how much. A contender is timed only if its values are the
baseline's; one that fails or takes too long has an entry that says so.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.case import Case, Parameters, TooMuch, tolerance
from bench.peer import Peer, PeerFailed, PeerTooSlow
from bench.results import NO_TIME, Entry, find, spread

ROUNDS_AT_LEAST = 3
READY = 0.75  # of the time that a group has, if it has a deadline: until then contenders compile
SHORTEST_S = 10.0  # a contender that is ready is timed, even if that takes a little longer than there is time
FIGURES = ("rounds_s", "q1_s", "median_s", "q3_s", "against")


@dataclass(frozen=True)
class Settings:
    """rounds: at most, over all processes. round_s: how long a contender is timed in each. group_s: for all rounds.

    limit_s: for a contender to build, compile and see every batch once. processes: of each contender, one after the
    other; the first has empty compile caches. lock: a file that runs on the same device share. at_once: how many
    contenders compile side by side. until: when a group has to be over, as `time.monotonic()` has it; contenders that
    are not ready in time are left out.
    """

    device: str
    threads: int
    rounds: int = 20
    round_s: float = 0.3
    group_s: float = 60.0
    limit_s: float = 600.0
    processes: int = 1
    lock: Path | None = None
    at_once: int = 1
    until: float = math.inf

    @classmethod
    def quick(cls, device: str, threads: int) -> Settings:
        return cls(device, threads, rounds=5, round_s=0.2, group_s=10.0, limit_s=120.0, processes=1)


def processes_of(case: Case, settings: Settings) -> int:
    """One process per contender if nothing is compiled: there are no caches to fill."""
    return settings.processes if any(contender.compiles for contender in case.contenders) else 1


class OutOfTime(PeerFailed):
    """The group's time was over before the contender was ready."""


class Group:
    """Contenders of a case on one set of parameters.

    recorded: what is called with each entry when it is final. note: what is told what goes on.
    """

    def __init__(
        self,
        case: Case,
        parameters: Parameters,
        settings: Settings,
        recorded: Callable[[Entry], None],
        note: Callable[[str], None] = lambda text: None,
        start: Callable[..., Any] = Peer,
    ) -> None:
        self.case, self.parameters, self.settings = case, parameters, settings
        self.recorded, self.note, self.start = recorded, note, start
        self.processes = processes_of(case, settings)
        self.repeated: set[str] = set()
        self.peers: dict[str, Any] = {}
        self.entries: dict[str, Entry] = {}
        self.values: Mapping[str, float] | None = None
        self.ready_by = math.inf

    def measure(self, names: list[str]) -> None:
        """Measure the contenders of these names beside the baseline, which gets no second entry if it has one."""
        self.repeated = {self.case.baseline} - set(names)
        order = [self.case.baseline, *(name for name in names if name != self.case.baseline)]
        with tempfile.TemporaryDirectory(prefix="fxpasses-bench-", ignore_cleanup_errors=True) as folder:
            caches = {name: Path(folder) / str(number) for number, name in enumerate(order)}
            if self._left() < math.inf:
                self.ready_by = time.monotonic() + READY * self._left()
            for process in range(self.processes):
                try:
                    with self._others(fcntl.LOCK_SH):
                        answers = self._answers(order, caches, process)
                        for name in order:
                            if process > 0 or self._takes_part(name):
                                self._prepare(name, answers[name], "cold" if process == 0 else "warm")
                    with self._others(fcntl.LOCK_EX):
                        self._rounds(process)
                        order = list(self.peers)
                        if process == self.processes - 1:
                            self._compare()
                            self._look()
                            self._explain_losses()
                finally:
                    for name in list(self.peers):
                        self.peers.pop(name).close()
        for entry in self.entries.values():
            if entry["outcome"] == "measured":
                self._record(entry)

    @contextlib.contextmanager
    def _others(self, lock: int) -> Iterator[None]:
        """Runs that share `settings.lock` compile beside each other, and time one after the other."""
        if self.settings.lock is None:
            yield
            return
        with self.settings.lock.open("a") as file:
            fcntl.flock(file, lock)
            yield

    # One contender

    def _takes_part(self, name: str) -> bool:
        contender = self.case.contender(name)
        self.entries[name] = {"parameters": dict(self.parameters), "contender": name, "ours": contender.ours, "why": ""}
        missing = contender.unavailable(self.parameters, self.settings.device)
        if not missing and self.values is None and name != self.case.baseline:
            missing = f"there are no values of {self.case.baseline} to check it by"
        if missing:
            self._drop(name, "unavailable", missing)
        return not missing

    def _answers(
        self, names: list[str], caches: Mapping[str, Path], process: int
    ) -> dict[str, Callable[[], dict[str, Any]]]:
        """What gives each contender's answer to "prepare". With `at_once`, those that are available have answered."""
        asks: dict[str, Callable[[], dict[str, Any]]]
        asks = {name: functools.partial(self._ask_to_prepare, name, caches[name], process) for name in names}
        if self.settings.at_once == 1:
            return asks  # one after the other, as they are asked for
        contenders = {name: self.case.contender(name) for name in names}
        there = [
            name
            for name, contender in contenders.items()
            if process > 0 or not contender.unavailable(self.parameters, self.settings.device)
        ]
        with ThreadPoolExecutor(self.settings.at_once) as pool:
            futures = {name: pool.submit(asks[name]) for name in there}
            try:
                wait(futures.values())
            except KeyboardInterrupt:
                for future in futures.values():
                    future.cancel()
                for peer in list(self.peers.values()):
                    peer.process.kill()  # so that its thread gets an end, and no answer
                raise
        return asks | {name: future.result for name, future in futures.items()}

    def _ask_to_prepare(self, name: str, cache: Path, process: int) -> dict[str, Any]:
        """Start a new process, and have it build, compile and see every batch. Raises PeerFailed."""
        self.note(f"{name}: build and compile, {'warm' if process else 'cold'} caches")
        left = self.ready_by - time.monotonic()
        if left <= 0:
            raise OutOfTime("its turn came when the time of its group was over")
        peer = self.peers[name] = self._new_peer(name, cache)
        try:
            return dict(peer.ask("prepare", min(self.settings.limit_s, left)))
        except PeerTooSlow:
            if left < self.settings.limit_s:
                raise OutOfTime(f"not ready after {left:.0f} s, when the time of its group was over") from None
            raise

    def _prepare(self, name: str, answer: Callable[[], dict[str, Any]], caches: str) -> None:
        """Check what the contender's process computed. caches: whether the compilers' caches are "cold" or "warm"."""
        entry = self.entries[name]
        try:
            found = answer()
        except PeerFailed as error:
            self._failed(name, error)
            return
        peer = self.peers[name]
        if self.values is None:  # the baseline comes first
            self.values = found["values"]
        difference, where = disagreement(self.values, found["values"])
        if self.case.contender(name).bound:
            difference = 0.0
        allowed = tolerance(self.parameters)
        if not difference <= allowed:
            text = f"{where}: relative difference {difference:.2g} to {self.case.baseline}, tolerance {allowed:.2g}"
            self._drop(name, "wrong", text)
            return
        entry[f"compile_{caches}_s"] = found.pop("compile_s")
        if costs := found.pop("compiling", None):
            entry[f"compiling_{caches}"] = costs
        if caches == "cold":
            state = {"compile_peak_bytes": peer.peak_bytes(), "difference": difference, "outcome": "measured"}
            entry |= found | state | {"rounds_s": []}

    def _new_peer(self, name: str, cache: Path) -> Any:
        settings = self.settings
        return self.start(self.case.name, name, dict(self.parameters), settings.device, settings.threads, cache)

    def _record(self, entry: Entry) -> None:
        if entry["contender"] not in self.repeated:
            self.recorded(entry)

    def _drop(self, name: str, outcome: str, why: str) -> None:
        """End the contender's part, and drop its times."""
        if name in self.peers:
            self.peers.pop(name).close()
        self.entries[name] = entry = {key: value for key, value in self.entries[name].items() if key not in FIGURES}
        entry |= {"outcome": outcome, "why": why}
        self._record(entry)

    def _failed(self, name: str, error: PeerFailed) -> None:
        outcomes = {OutOfTime: NO_TIME, PeerTooSlow: "too slow"}
        self._drop(name, outcomes.get(type(error), "failed"), str(error))

    def _limit(self, name: str, steps: float) -> float:
        """A generous limit for that many steps, but little longer than the group has time."""
        return min(60 + 10 * steps * float(self.entries[name]["step_s"]), max(SHORTEST_S, self._left()))

    def _left(self) -> float:
        return self.settings.until - time.monotonic()

    # All of them

    def _rounds(self, process: int) -> None:
        """This process's share of the rounds."""
        if not self.peers:
            return
        settings = self.settings
        numbers = {name: max(1, round(settings.round_s / self.entries[name]["step_s"])) for name in self.peers}
        # Two more: `Timer.timeit` warms up with two steps.
        cost = sum((number + 2) * self.entries[name]["step_s"] for name, number in numbers.items())
        seconds = max(0.0, min(settings.group_s, self._left() / 2))
        rounds = min(settings.rounds, max(ROUNDS_AT_LEAST, int(seconds / cost)))
        for turn in range(process, rounds, self.processes):
            names = list(self.peers)
            first = turn % max(1, len(names))
            for name in names[first:] + names[:first]:
                self.note(f"{name}: round {turn + 1} of {rounds}")
                try:
                    answer = self.peers[name].ask("time", self._limit(name, numbers[name] + 2), number=numbers[name])
                    self.entries[name]["rounds_s"].append(answer["seconds"])
                except PeerFailed as error:
                    self._failed(name, error)

    def _compare(self) -> None:
        for name in self.peers:
            entry = self.entries[name]
            entry["q1_s"], entry["median_s"], entry["q3_s"] = spread(entry["rounds_s"])
            entry["against"] = {
                other: dict(zip(("q1", "median", "q3"), spread(ratios(entry, self.entries[other])), strict=True))
                for other in self.peers
            }

    def _look(self) -> None:
        """Memory and counts, once timing is over."""
        for name in list(self.peers):
            if self._left() <= 0:
                return
            self.note(f"{name}: memory and counts")
            peer, entry = self.peers[name], self.entries[name]
            try:
                entry |= self._memory(name, peer)
                entry |= peer.ask("count", self._limit(name, 100))
                if self.case.timeline and self.settings.device == "cuda":
                    entry["timeline"] = peer.ask("timeline", self._limit(name, 100))["spans"]
            except PeerFailed as error:
                self._failed(name, error)

    def _memory(self, name: str, peer: Any) -> dict[str, int]:
        peer.ask("rest", self._limit(name, 1))
        rest = peer.resident_bytes()
        peer.forget_peak()
        found = peer.ask("steps", self._limit(name, 10))
        if "peak_bytes" in found:  # the device knows
            return {"peak_bytes": found["peak_bytes"], "step_bytes": found["peak_bytes"] - found["rest_bytes"]}
        if rest is None:
            return {"peak_bytes": found["process_bytes"]}
        peak = peer.peak_bytes()
        return {"peak_bytes": peak, "step_bytes": peak - rest}

    def _explain_losses(self) -> None:
        """Profiles of each of our contenders and of those that are faster beyond the spread."""
        wanted = set()
        for name in self.peers:
            if self.case.contender(name).ours:
                faster = [other for other in losses(self.entries[name]) if not self.case.contender(other).ours]
                wanted.update([name, *faster] if faster else [])
        for name in wanted & set(self.peers):
            if self._left() <= 0:
                return
            self.note(f"{name}: profile")
            with contextlib.suppress(PeerFailed):  # it has its figures all the same
                self.entries[name]["top"] = self.peers[name].ask("profile", self._limit(name, 100))["top"]


def ratios(entry: Entry, other: Entry) -> list[float]:
    """The time relative to the other contender's, in each round."""
    return [mine / its for mine, its in zip(entry["rounds_s"], other["rounds_s"], strict=False)]


def losses(entry: Mapping[str, Any]) -> dict[str, float]:
    """The median factor of each contender that is faster in at least three quarters of the rounds."""
    return {name: ratio["median"] for name, ratio in entry.get("against", {}).items() if ratio["q1"] > 1}


def disagreement(expected: Mapping[str, float], actual: Mapping[str, float]) -> tuple[float, str]:
    """The largest relative difference, and the name of the value that has it; infinite where a value is missing."""
    if expected.keys() != actual.keys():
        return math.inf, f"values {sorted(actual)} where {sorted(expected)} are wanted"
    worst = (0.0, "")
    for name, wanted in expected.items():
        got = actual[name]
        scale = max(abs(wanted), 1e-12)
        apart = abs(got - wanted) / scale if math.isfinite(got) and math.isfinite(wanted) else math.inf
        worst = max(worst, (apart, name))
    return worst


def too_much_with_more(case: Case, entries: list[Entry], parameters: Parameters, contender: str) -> Entry | None:
    """The entry of a contender that has taken too much where there was more memory, and else the same parameters."""
    for entry in entries:
        others = dict(entry["parameters"])
        has_more = case.budget and others.pop(case.budget) > parameters[case.budget]
        if has_more and entry["contender"] == contender and entry["why"].startswith(f"{TooMuch.__name__}:"):
            if others.items() <= parameters.items():
                return entry
    return None


def run_case(
    case: Case,
    results: dict[str, Any],
    settings: Settings,
    save: Callable[[], None],
    note: Callable[[str], None] = lambda text: None,
    done: Callable[[], None] = lambda: None,
    start: Callable[..., Any] = Peer,
) -> None:
    """Measure what `results` does not hold yet, and save after each entry."""

    def record(entry: Entry) -> None:
        results["entries"].append(entry)
        save()
        done()

    for parameters in case.groups(settings.device, results["quick"]):
        names = [c.name for c in case.contenders if find(results["entries"], parameters, c.name) is None]
        for _ in range(len(case.contenders) - len(names)):
            done()
        for name in list(names):
            if known := too_much_with_more(case, results["entries"], parameters, name):
                names.remove(name)
                record({**known, "parameters": dict(parameters)})
        if names:
            label = " ".join(f"{key}={value}" for key, value in parameters.items())
            group = Group(case, parameters, settings, record, lambda text: note(f"{label}: {text}"), start)  # noqa: B023
            group.measure(names)
