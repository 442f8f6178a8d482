"""How contenders are measured: in turns, with ratios within rounds, and none twice. With peers that only pretend."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from bench import measuring, results
from bench.case import Case, Contender
from bench.measuring import Group, Settings, disagreement, losses, run_case
from bench.peer import PeerFailed, PeerTooSlow
from bench.results import Entry, spread

SETTINGS = Settings("cpu", threads=1, rounds=6, round_s=0.0, group_s=1e9, processes=2)


def can_lock(file: Path, lock: int) -> bool:
    """Whether another run could take the lock now."""
    with file.open("a") as other:
        try:
            fcntl.flock(other, lock | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


class Pretender:
    """A peer whose step takes a second, its number more in each round; ours takes 3 in all rounds, slow ones 100."""

    asked: list[tuple[str, str]] = []
    started: list[str] = []

    def __init__(self, case: str, contender: str, parameters: Mapping[str, Any], *_: Any) -> None:
        self.name, self.size = contender, parameters["size"]
        self.round = 0
        self.started.append(contender)

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        self.asked.append((self.name, verb))
        if verb == "prepare":
            return {
                "values": {"loss": 2.0 if self.name in ("other", "bound") else 1.0},
                "step_s": 1.0,
                "compile_s": 2.0,
                "compiling": {"cpu_s": 7.0 - self.started.count(self.name)} if self.name == "ours" else {},
                "graphs": 1,
                "graph_breaks": 0,
            }
        if verb == "time":
            self.round += 1
            if self.name == "breaking" and self.round == 2:
                raise PeerFailed("RuntimeError: broke")
            return {"seconds": 3.0 if self.name == "ours" else float(self.round)}
        if verb == "count":
            return {"host_reads": 1, "operators": 2, "figures": {}}
        return {"top": [{"operator": f"operator of {self.name}", "calls": 1, "ms": 1.0}]} if verb == "profile" else {}

    def resident_bytes(self) -> int:
        return 1000

    def peak_bytes(self) -> int:
        return 1500

    def forget_peak(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_asked() -> None:
    Pretender.asked.clear()
    Pretender.started.clear()


def case(*names: str) -> Case:
    contenders = [
        Contender(name, build=None, ours=name == "ours", bound=name == "bound")  # type: ignore[arg-type]
        for name in names
    ]
    groups = lambda device, quick: [{"size": 1}, {"size": 2}]  # noqa: E731
    return Case("toys", "Toys", groups, contenders, baseline=names[0], expected="")


def test_runs_that_share_a_device_compile_side_by_side_and_time_alone(tmp_path: Path) -> None:
    lock, seen = tmp_path / "lock", []

    class Watched(Pretender):
        def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
            seen.append((verb, can_lock(lock, fcntl.LOCK_SH), can_lock(lock, fcntl.LOCK_EX)))
            return super().ask(verb, limit_s, **arguments)

    settings = dataclasses.replace(SETTINGS, lock=lock)
    Group(case("eager", "ours"), {"size": 1}, settings, [].append, start=Watched).measure(["eager", "ours"])
    beside = {verb: (shared, alone) for verb, shared, alone in seen}
    assert beside["prepare"] == (True, False) and beside["time"] == (False, False) and can_lock(lock, fcntl.LOCK_EX)


def measured(*names: str) -> dict[str, Entry]:
    entries: list[Entry] = []
    Group(case(*names), {"size": 1}, SETTINGS, entries.append, start=Pretender).measure(list(names))
    return {entry["contender"]: entry for entry in entries}


def test_each_round_times_each_contender_once_in_a_changing_order():
    measured("a", "b", "c")
    timed = [name for name, verb in Pretender.asked if verb == "time"]
    rounds = ["".join(timed[at : at + 3]) for at in range(0, len(timed), 3)]
    assert sorted(rounds[:3]) == sorted(rounds[3:]) == ["abc", "bca", "cab"]  # in the first process, and in the second
    assert Pretender.started == [*"abc", *"abc"]


def test_all_are_prepared_before_any_is_timed():
    measured("a", "b")
    verbs = [verb for _, verb in Pretender.asked]
    assert verbs.index("time") == 2 and verbs[:2] == ["prepare", "prepare"]


def test_ratios_are_taken_within_rounds():
    entries = measured("a", "ours")
    assert entries["a"]["rounds_s"] == [1, 2, 3, 1, 2, 3]
    ratio = entries["ours"]["against"]["a"]
    lower, middle, upper = spread([3 / 1, 3 / 2, 3 / 3] * 2)
    assert ratio == {"q1": lower, "median": middle, "q3": upper}
    assert entries["a"]["against"]["a"] == {"q1": 1, "median": 1, "q3": 1}


def test_values_are_the_baselines_but_where_a_part_is_left_out_on_purpose():
    entries = measured("a", "other", "bound")
    assert entries["other"]["outcome"] == "wrong" and entries["bound"]["outcome"] == "measured"


def test_memory_of_a_step_is_its_peak_less_what_is_held_between_steps():
    entry = measured("a")["a"]
    assert (entry["peak_bytes"], entry["step_bytes"]) == (1500, 500)


def test_compile_time_is_taken_cold_and_with_the_caches_of_the_first_process():
    entry = measured("a")["a"]
    assert (entry["compile_cold_s"], entry["compile_warm_s"]) == (2.0, 2.0)
    assert Pretender.started == ["a", "a"]


def test_what_the_first_call_cost_is_kept_of_both_processes():
    entries = measured("a", "ours")
    assert (entries["ours"]["compiling_cold"], entries["ours"]["compiling_warm"]) == ({"cpu_s": 6.0}, {"cpu_s": 5.0})
    assert "compiling_cold" not in entries["a"] and "compiling" not in entries["a"]


def test_a_contender_that_breaks_while_it_is_timed_has_no_figures_and_the_others_do():
    entries = measured("a", "breaking")
    assert entries["breaking"]["outcome"] == "failed" and entries["breaking"]["why"] == "RuntimeError: broke"
    assert "rounds_s" not in entries["breaking"] and "median_s" not in entries["breaking"]
    assert len(entries["a"]["rounds_s"]) == 6 and entries["a"]["outcome"] == "measured"


class SecondProcess(Pretender):
    """Agrees in the first process; `broken` fails in the second, and `wrong` has another loss there."""

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        answer = super().ask(verb, limit_s, **arguments)
        if verb == "prepare" and self.started.count(self.name) == 2:
            if self.name == "broken":
                raise PeerFailed("RuntimeError: a cache")
            answer["values"] = {"loss": 1.5 if self.name == "wrong" else 1.0}
        return answer


def test_a_contender_that_warm_caches_break_or_make_wrong_has_no_figures():
    entries: list[Entry] = []
    names = ["a", "broken", "wrong"]
    Group(case(*names), {"size": 1}, SETTINGS, entries.append, start=SecondProcess).measure(names)
    by_name = {entry["contender"]: entry for entry in entries}
    assert [by_name[name]["outcome"] for name in names] == ["measured", "failed", "wrong"]
    assert by_name["wrong"]["why"] == "loss: relative difference 0.5 to a, tolerance 0.0001"
    assert "rounds_s" not in by_name["broken"] and set(by_name["a"]["against"]) == {"a"}


def test_where_ours_is_slower_beyond_the_spread_both_are_profiled():
    class Slow(Pretender):
        def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
            answer = super().ask(verb, limit_s, **arguments)
            return {"seconds": 100.0} if verb == "time" and self.name == "ours" else answer

    entries: list[Entry] = []
    Group(case("a", "ours"), {"size": 1}, SETTINGS, entries.append, start=Slow).measure(["a", "ours"])
    by_name = {entry["contender"]: entry for entry in entries}
    assert list(losses(by_name["ours"])) == ["a"]
    assert by_name["ours"]["top"][0]["operator"] == "operator of ours"
    assert by_name["a"]["top"][0]["operator"] == "operator of a"


def test_what_is_measured_is_not_measured_again(tmp_path):
    file = tmp_path / "toys.json"
    found = {"quick": False, "entries": []}
    saves: list[int] = []

    def save() -> None:
        saves.append(len(found["entries"]))
        results.write(file, found)

    run_case(case("a", "b"), found, SETTINGS, save, start=Pretender)
    assert saves == [1, 2, 3, 4]
    assert results.read(file) == found
    Pretender.started.clear()
    run_case(case("a", "b"), results.read(file), SETTINGS, save, start=Pretender)
    assert Pretender.started == []


def test_a_new_contender_is_measured_beside_the_baseline_which_keeps_its_entry():
    found: dict[str, Any] = {"quick": True, "entries": []}
    run_case(case("a", "b"), found, SETTINGS, lambda: None, start=Pretender)
    before = list(found["entries"])
    Pretender.started.clear()
    run_case(case("a", "b", "c"), found, SETTINGS, lambda: None, start=Pretender)
    assert set(Pretender.started) == {"a", "c"}
    assert found["entries"][:4] == before
    assert [entry["contender"] for entry in found["entries"][4:]] == ["c", "c"]
    assert set(found["entries"][4]["against"]) == {"a", "c"}


def test_what_takes_too_much_memory_is_not_tried_with_less() -> None:
    class Large(Pretender):
        """It takes 3, and each of the others 1."""

        def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
            if verb == "prepare" and self.name == "large" and self.size < 3:
                raise PeerFailed(f"TooMuch: 3 of {self.size}")
            return super().ask(verb, limit_s, **arguments)

    sizes = lambda device, quick: [{"size": size, "depth": d} for d in (1, 2) for size in (3, 2, 1)]  # noqa: E731
    shrinking = dataclasses.replace(case("a", "large", "small"), groups=sizes, budget="size")
    found: dict[str, Any] = {"quick": True, "entries": []}
    run_case(shrinking, found, SETTINGS, lambda: None, start=Large)
    assert Large.started.count("large") == 2 * (2 + 1)  # two processes where it fits, and one where it does not
    failed = [entry for entry in found["entries"] if entry["outcome"] == "failed"]
    assert [entry["parameters"]["size"] for entry in failed] == [2, 1, 2, 1]
    assert {entry["why"] for entry in failed} == {"TooMuch: 3 of 2"}
    assert len(found["entries"]) == 3 * 6


@pytest.mark.parametrize("key", results.IDENTITY)
def test_results_of_another_run_are_put_aside(key: str, tmp_path: Path):
    fresh = {name: "x" for name in results.IDENTITY} | {"entries": []}
    entries = [{"outcome": "measured"}]
    results.write(tmp_path / "r.json", fresh | {"entries": entries})
    assert results.begin(tmp_path / "r.json", fresh, resume=True)[0]["entries"] == entries
    assert results.begin(tmp_path / "r.json", fresh, resume=False) == (fresh, "")
    assert results.begin(tmp_path / "r.json", fresh | {key: "y"}, resume=True)[1] == f"of another {key}"


def test_values_that_differ_or_are_missing_or_not_finite():
    assert disagreement({"loss": 2.0, "norm": 1.0}, {"loss": 2.0, "norm": 1.1}) == (pytest.approx(0.1), "norm")
    assert disagreement({"loss": 2.0}, {"loss": float("nan")})[0] == float("inf")
    assert disagreement({"loss": 2.0}, {})[0] == float("inf")


# By a deadline


class Slow(Pretender):
    """Peers on a clock of their own: building takes "slow" longer than any limit, and others ten seconds."""

    now = 0.0

    def ask(self, verb: str, limit_s: float, **arguments: Any) -> dict[str, Any]:
        if verb == "prepare":
            Slow.now += min(10.0, limit_s) if self.name != "slow" else limit_s
            if self.name == "slow" or limit_s < 10:
                raise PeerTooSlow(f"prepare took more than {limit_s:.0f} s")
        return super().ask(verb, limit_s, **arguments)


@pytest.fixture
def by_deadline(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Entry]]:
    def measured(*names: str, until: float, at_once: int = 1) -> dict[str, Entry]:
        monkeypatch.setattr(Slow, "now", 0.0)
        monkeypatch.setattr(measuring.time, "monotonic", lambda: Slow.now)
        settings = dataclasses.replace(SETTINGS, until=until, at_once=at_once, processes=1)
        entries: list[Entry] = []
        Group(case(*names), {"size": 1}, settings, entries.append, start=Slow).measure(list(names))
        return {entry["contender"]: entry for entry in entries}

    return measured


def test_a_contender_that_is_not_ready_in_time_is_left_out_and_the_others_are_timed(by_deadline):
    entries = by_deadline("a", "b", "slow", "c", until=100.0)
    assert {name: entry["outcome"] for name, entry in entries.items()} == {
        "a": "measured", "b": "measured", "slow": "no time", "c": "no time",
    }  # fmt: skip
    assert entries["slow"]["why"] == "not ready after 55 s, when the time of its group was over"
    assert entries["c"]["why"] == "its turn came when the time of its group was over"


def test_what_is_over_the_limit_of_a_contender_is_too_slow_also_by_a_deadline(by_deadline):
    assert by_deadline("a", "slow", until=1e9)["slow"]["outcome"] == "too slow"


def test_side_by_side_contenders_are_checked_as_one_after_the_other(by_deadline):
    alone, together = (by_deadline("a", "other", "b", until=1e9, at_once=n) for n in (1, 3))
    assert alone.keys() == together.keys() and together["other"]["outcome"] == "wrong"
    assert together["b"]["outcome"] == "measured" and Pretender.started.count("b") == 2


def test_what_there_was_no_time_for_is_measured_by_a_run_that_goes_on(tmp_path: Path) -> None:
    fresh = results.new("toys", "cpu", True, 1)
    entries = [{"outcome": "no time", "contender": "b"}, {"outcome": "measured", "contender": "a"}]
    results.write(tmp_path / "toys.json", fresh | {"entries": entries})
    found, why = results.begin(tmp_path / "toys.json", fresh, resume=True)
    assert (found["entries"], why) == (entries[1:], "")
