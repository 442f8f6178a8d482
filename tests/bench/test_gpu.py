"""`make gpu`: what is run by a deadline, and what the page says of it. No device and no compiler is used."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench import results
from bench.case import CASES
from bench.gpu import __main__ as command
from bench.gpu import suite
from bench.gpu.page import page
from bench.gpu.pieces import NAMES, PIECES, Measured
from bench.gpu.running import Run
from bench.gpu.schedule import Outcome, Piece, run_by
from tests.bench.test_report import ENTRIES, RESULTS

# The schedule


class Clock:
    """A time that passes as work says."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def scheduled(
    seconds: float, pieces: list[Piece], work: Callable[[Clock, Piece, float], None]
) -> tuple[dict[str, Outcome], dict[str, float]]:
    """The outcome of each piece, in the order in which they ended, and the seconds that each was given."""
    clock, outcomes, given = Clock(), {}, {}

    def timed(piece: Piece, until: float) -> None:
        given[piece.name] = until - clock.now
        work(clock, piece, until)

    run_by(clock.now + seconds, pieces, timed, lambda piece, outcome: outcomes.update({piece.name: outcome}), clock)
    return outcomes, given


def takes(**seconds: float) -> Callable[[Clock, Piece, float], None]:
    def work(clock: Clock, piece: Piece, until: float) -> None:
        clock.now += seconds[piece.name]

    return work


def test_each_piece_has_its_share_of_the_time_that_is_left():
    pieces = [Piece("a", 2), Piece("b", 1), Piece("c", 1)]
    outcomes, given = scheduled(400, pieces, takes(a=100, b=50, c=10))
    assert given == {"a": 200, "b": 150, "c": 250}  # halves of 400 and of 300, and all of 250
    assert [outcome.outcome for outcome in outcomes.values()] == ["done"] * 3 and outcomes["a"].seconds == 100


def test_what_does_not_fit_is_said_in_order_and_what_is_shorter_still_runs():
    pieces = [Piece("a", 1, 10), Piece("b", 1, 50), Piece("c", 1, 50), Piece("d", 1, 5)]
    outcomes, given = scheduled(60, pieces, takes(a=40, d=5))
    assert list(given) == ["a", "d"] and list(outcomes) == ["a", "b", "c", "d"]
    assert outcomes["b"] == outcomes["c"] == Outcome("not run", "no time left")


def test_a_piece_may_take_what_is_enough_for_it_but_no_more_than_there_is():
    pieces = [Piece("a", 1, enough_s=40), Piece("b", 8), Piece("c", 1, enough_s=40)]
    _, given = scheduled(100, pieces, takes(a=1, b=79, c=1))
    assert given == {"a": 40, "b": 88, "c": 20}


def test_a_piece_that_fails_does_not_stop_the_others():
    def work(clock: Clock, piece: Piece, until: float) -> None:
        clock.now += 7
        if piece.name == "a":
            raise RuntimeError("broke\nand more")

    outcomes, _ = scheduled(100, [Piece("a", 1), Piece("b", 1)], work)
    assert outcomes == {"a": Outcome("failed", "RuntimeError: broke", 7), "b": Outcome("done", "", 7)}


def test_an_interrupted_run_says_what_became_of_each_piece():
    def work(clock: Clock, piece: Piece, until: float) -> None:
        if piece.name == "b":
            raise KeyboardInterrupt

    seen: list[tuple[str, str]] = []
    pieces = [Piece("a", 1), Piece("b", 1), Piece("c", 1)]
    clock = Clock()
    with pytest.raises(KeyboardInterrupt):
        run_by(
            200, pieces, lambda piece, until: work(clock, piece, until),
            lambda piece, outcome: seen.append((piece.name, outcome.outcome)), clock,
        )  # fmt: skip
    assert seen == [("a", "done"), ("b", "interrupted"), ("c", "not run")]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("piece", [piece for piece in PIECES if isinstance(piece, Measured)], ids=lambda p: p.name)
def test_a_piece_is_a_group_or_two_of_a_case_with_contenders_that_it_has(piece, device):
    case = piece.case(device)  # raises for a contender that is not there
    groups = case.groups(device, False)
    assert piece.name in CASES and 1 <= len(groups) <= 2 and json.dumps(groups)
    assert len(case.contenders) >= 3 and any(contender.ours for contender in case.contenders)
    assert case.contenders[0].name == case.baseline
    few, many = (piece.sized(device, at_once).enough_s for at_once in (1, 8))
    assert many == piece.wave_s * len(groups) < few


def test_the_first_contenders_to_compile_are_ours_and_one_that_is_not():
    (experts,) = [piece for piece in PIECES if piece.name == "experts"]
    names = [contender.name for contender in experts.case("cuda").contenders]
    assert names[:3] == ["eager", "fastpack", "Inductor, both flags"] and len(names) == 5
    assert [contender.name for contender in experts.case("cpu").contenders] == names[:3]


# The tests of a run


def run_of_suite(folder: Path, text: str, until: float) -> dict[str, Any]:
    file = folder / "test_toys.py"
    mark = suite.MARK  # spelled out, this file would be one with the mark
    file.write_text(f"import os, signal, pytest\npytestmark = pytest.{mark}\n{text}")
    kept: list[dict[str, Any]] = []
    suite.run([str(file)], until, 1, kept.append)
    (found,) = kept
    return {"ended": found["ended"], **{name.split("::")[1]: test for name, test in found["tests"].items()}}


def test_each_test_has_an_outcome_and_its_first_line(tmp_path):
    text = (
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2, 'no\\nyes'\n"
        "@pytest.mark.skip(reason='why not')\ndef test_other(): pass\n"
        "@pytest.fixture\ndef broken(): raise ValueError('of the fixture')\n"
        "def test_without(broken): pass\n"
    )
    found = run_of_suite(tmp_path, text, time.monotonic() + 600)
    assert found.pop("ended") == ""
    assert {name: (test["outcome"], test["why"]) for name, test in found.items()} == {
        "test_good": ("passed", ""),
        "test_bad": ("failed", "AssertionError: no"),
        "test_other": ("skipped", "why not"),
        "test_without": ("failed", "ValueError: of the fixture"),
    }


def test_a_suite_that_dies_keeps_what_it_found(tmp_path):
    text = "def test_a(): pass\ndef test_b(): os.kill(os.getpid(), signal.SIGKILL)\ndef test_c(): pass\n"
    found = run_of_suite(tmp_path, text, time.monotonic() + 600)
    assert found.pop("ended").startswith("pytest ended with code -9")
    assert [test["outcome"] for test in found.values()] == ["passed", "not run", "not run"]


def test_a_suite_that_takes_too_long_says_so(tmp_path):
    found = run_of_suite(tmp_path, "def test_a(): pass\n", until=0.0)
    assert found == {"ended": "the suite was ended after 0 s, when its time was over"}


def test_an_interrupted_suite_keeps_what_it_found(tmp_path, monkeypatch):
    kept: list[dict[str, Any]] = []

    class Interrupted(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            code = super().wait(timeout)
            if timeout is not None:  # the suite's own; not that for the end of its process
                raise KeyboardInterrupt
            return code

    monkeypatch.setattr(suite.subprocess, "Popen", Interrupted)
    file = tmp_path / "test_toys.py"
    file.write_text(f"import pytest\n@pytest.{suite.MARK}\ndef test_a(): pass\n")
    with pytest.raises(KeyboardInterrupt):
        suite.run([str(file)], time.monotonic() + 600, 1, kept.append)
    assert kept[0]["ended"] == "the suite was interrupted"
    assert [test["outcome"] for test in kept[0]["tests"].values()] == ["passed"]


def test_the_files_are_those_with_the_mark():
    found = suite.files()
    assert "tests/test_gpu.py" in found and "tests/bench/test_gpu.py" not in found


# The page

RUN: dict[str, Any] = {
    "device": "cuda",
    "machine": {
        "processor": "P", "cores": 16, "accelerator": "NVIDIA X", "accelerator_bytes": 80 << 30, "cuda": "13.0",
        "driver": "580.1",
    },
    "versions": {"python": "3.12.3", "torch": "2.13.0"},
    "commit": "abc",
    "started": "2026-01-02T00:00:00+00:00",
    "minutes": 10.0,
    "seconds": 330.0,
    "tests": {
        "ended": "the suite was ended after 90 s, when its time was over",
        "tests": {
            "tests/test_gpu.py::test_a": {"outcome": "passed", "why": "", "seconds": 1.0},
            "tests/test_gpu.py::test_b": {"outcome": "failed", "why": "AssertionError: loss: 0.5", "seconds": 2.0},
            "tests/other.py::test_c": {"outcome": "not run", "why": "", "seconds": 0.0},
        },
    },
    "pieces": {
        "tests": {"outcome": "done", "why": "", "seconds": 90.0},
        "experts": {"outcome": "failed", "why": "OSError: disk", "seconds": 3.0},
        "offload": {"outcome": "not run", "why": "no time left", "seconds": 0.0},
    },
}  # fmt: skip
LATE = {"parameters": {"size": 5}, "contender": "failing", "ours": False, "outcome": "no time", "why": "not ready"}


def squeezed(text: str) -> str:
    return "\n".join(" ".join(line.split()) for line in text.splitlines())


def test_the_page_says_where_it_comes_from_and_what_was_not_run():
    text = squeezed(page(RUN, {}))
    for line in (
        "# On NVIDIA X",
        "| memory of the device | 80 GiB |",
        "| driver, CUDA of PyTorch | 580.1, 13.0 |",
        "| commit | abc |",
        "| took | 5.5 of 10 minutes, set-up aside |",
        "- tests: no time for 1 test",
        "- experts: failed: OSError: disk",
        "- offload: not run: no time left",
        "- flash_path: not run: not asked for",
    ):
        assert line in text, line
    assert [text.index(f"- {name}:") for name in NAMES if f"- {name}:" in text] == sorted(
        text.index(f"- {name}:") for name in NAMES if f"- {name}:" in text
    )


def test_the_page_has_a_row_for_each_file_of_tests_and_names_those_that_failed():
    text = squeezed(page(RUN, {}))
    assert "`pytest -m gpu`: 1 passed, 1 failed, 0 skipped, 1 not run." in text
    assert "**The suite was ended after 90 s, when its time was over.**" in text
    assert "| tests/test_gpu.py | 1 | 1 | 0 | 0 | 3 |" in text and "| tests/other.py | 0 | 0 | 0 | 1 | 0 |" in text
    assert "- `tests/test_gpu.py::test_b`: AssertionError: loss: 0.5" in text and "- `tests/other.py::test_c`" in text


def test_figures_are_ratios_to_the_baseline():
    found = RESULTS | {"device": "cuda", "entries": [*ENTRIES, LATE]}
    text = squeezed(page(RUN, {"tests.bench.toy_case": found}))
    assert "| toy_case | cuda | ours | plain | 0.60 to 1.20 | 0.60 to 1.20 |" in text
    assert "| ours | 0.60 (0.60 to 0.61) | 1 | 12 |" in text
    assert "- failing: no time: not ready" in text


# A run


def test_the_page_is_written_after_each_piece_and_a_run_goes_on(tmp_path):
    run = Run(tmp_path, "cpu", 1, resume=False)
    run.ended(Piece("experts", 1), Outcome("not run", "no time left"))
    assert "- experts: not run: no time left" in (tmp_path / "GPU.md").read_text()
    file = results.path(tmp_path, "experts", "cpu")
    results.write(file, results.new("experts", "cpu", True, run.threads) | {"entries": []})
    run.ended(Piece("experts", 1), Outcome("done", "", 3.0))
    again = Run(tmp_path, "cpu", 1, resume=True)
    assert again.found["pieces"]["experts"]["outcome"] == "done" and list(again.measured()) == ["experts"]
    again.ended(Piece("experts", 1), Outcome("not run", "no time left"))
    assert again.found["pieces"]["experts"]["outcome"] == "done"
    assert Run(tmp_path, "cpu", 1, resume=False).found["pieces"] == {}


def test_results_of_another_commit_are_not_on_the_page(tmp_path):
    run = Run(tmp_path, "cpu", 1, resume=False)
    old = results.new("experts", "cpu", True, run.threads) | {"entries": [], "commit": "old"}
    results.write(results.path(tmp_path, "experts", "cpu"), old)
    run.ended(Piece("experts", 1), Outcome("failed", "before anything was measured"))
    assert run.measured() == {}


def test_a_failed_test_is_a_failed_run(tmp_path):
    run = Run(tmp_path, "cpu", 1, resume=False)
    assert run.all_is_well()
    run.found["tests"] = RUN["tests"]
    assert not run.all_is_well()


# The command line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--minutes", "0"], "--minutes is 0; it takes a number above 0"),
        (["--minutes", "ten"], "invalid float value: 'ten'"),
        (["--only", "tests,expert"], "--only names 'expert'; pieces: tests, packed_metadata, experts"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "built_for, driver, message",
    [
        (None, None, "is built without CUDA"),
        ("13.0", None, "there is no NVIDIA driver on this machine"),
        ("13.0", "nvidia-smi", "The driver may be too old"),
    ],
)
def test_without_a_device_it_says_what_is_missing(built_for, driver, message, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", built_for)
    monkeypatch.setattr(command.shutil, "which", lambda name: driver)
    assert command.main([]) == 2
    assert message in capsys.readouterr().err
