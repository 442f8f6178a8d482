"""Contenders in real processes: what the results say of one that is measured, and of those that are not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from bench import cli, results
from bench.peer import Peer, PeerFailed, PeerTooSlow
from bench.worker import Worker


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("results")
    assert cli.main(["run", "tests.bench.toy_case", "--quick", "--threads", "1", "--out", str(folder)]) == 0
    return results.read(folder / "toy_case.cpu.json")


def entry(found: dict[str, Any], contender: str) -> dict[str, Any]:
    return next(entry for entry in found["entries"] if entry["contender"] == contender)


@pytest.mark.slow
def test_every_contender_has_an_entry(found):
    assert {entry["contender"]: entry["outcome"] for entry in found["entries"]} == {
        "plain": "measured",
        "ours": "measured",
        "wrong": "wrong",
        "failing": "failed",
        "compiling": "unavailable",
        "absent": "unavailable",
    }


def test_chosen_contenders_are_measured_beside_the_baseline(tmp_path, capsys):
    run = ["run", "tests.bench.toy_case", "--quick", "--threads", "1", "--out", str(tmp_path), "--contender"]
    assert cli.main([*run, "absent"]) == 0
    entries = results.read(tmp_path / "toy_case.cpu.json")["entries"]
    assert [entry["contender"] for entry in entries] == ["absent", "plain"]
    assert cli.main([*run, "abs"]) == 1
    assert "tests.bench.toy_case has no contender 'abs'" in capsys.readouterr().err


def test_a_wrong_contender_is_not_timed_and_says_what_is_wrong(found):
    wrong = entry(found, "wrong")
    assert "rounds_s" not in wrong and "median_s" not in wrong
    assert wrong["why"] == "sum: relative difference 0.5 to plain, tolerance 0.0001"


def test_a_failing_contender_shows_the_first_line_of_its_error(found):
    assert entry(found, "failing")["why"] == "RuntimeError: no such toy"
    assert entry(found, "absent")["why"] == "there is no cpu toy"


def test_a_measured_contender_has_times_memory_and_counts(found):
    for one in (entry(found, "plain"), entry(found, "ours")):
        assert len(one["rounds_s"]) == 5 and all(seconds > 0 for seconds in one["rounds_s"])
        assert one["q1_s"] <= one["median_s"] <= one["q3_s"]
        assert one["host_reads"] == 1  # the `.item()` of the step
        assert one["figures"] == {"numbers": 3}
        assert one["peak_bytes"] > 2**20
        assert one["allocated_bytes"] > 0
        assert one["compile_cold_s"] is None and "compile_warm_s" not in one


def test_a_contender_that_compiles_has_a_compile_time():
    prepared = Worker("tests.bench.toy_case", "compiling", {"size": 3}, "cpu", 1).prepare()
    assert prepared["compile_s"] >= 0 and prepared["step_s"] > 0 and prepared["values"] == {"sum": 3.0}


def test_the_file_says_where_it_comes_from(found):
    assert found["case"] == "tests.bench.toy_case" and found["quick"] is True and found["threads"] == 1
    assert set(found["versions"]) == {"python", "torch", "transformers", "fxpasses"}
    assert found["machine"]["cores"] and found["commit"] and found["started"]


def test_a_contender_that_takes_too_long_is_ended(tmp_path, monkeypatch):
    peer = Peer("tests.bench.toy_case", "plain", {"size": 3}, "cpu", 1, tmp_path)
    started = time.monotonic()
    with pytest.raises(PeerTooSlow, match=r"prepare took more than 0 s"):
        peer.ask("prepare", 0.05)  # less than its process needs to start
    assert time.monotonic() - started < 60
    assert peer.process.returncode is not None


def test_a_process_that_was_killed_says_so(tmp_path):
    peer = Peer("tests.bench.toy_case", "plain", {"size": 3}, "cpu", 1, tmp_path)
    peer.process.kill()
    peer.process.wait()
    with pytest.raises(PeerFailed, match="was killed by SIGKILL during prepare"):
        peer.ask("prepare", 10)


def test_the_report_of_a_run(found, tmp_path):
    pytest.importorskip("matplotlib")
    from bench import report

    (tmp_path / "toy_case.cpu.json").write_text(json.dumps(found))
    text = report.write(tmp_path, ["tests.bench.toy_case"]).read_text()
    assert "- wrong: wrong: sum: relative difference 0.5 to plain" in text
    assert "- failing: failed: RuntimeError: no such toy" in text
    assert "### CUDA\n\nnot measured" in text
    assert (tmp_path / "toy_case.cpu.times.svg").exists()
