"""The report holds the JSON's numbers, and no others."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from bench import report
from bench.case import CASES, load
from bench.cases import packed_metadata
from bench.cli import main

RESULTS: dict[str, Any] = {
    "case": "tests.bench.toy_case",
    "device": "cpu",
    "quick": False,
    "threads": 2,
    "machine": {"processor": "P", "cores": 2, "system": "Linux"},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0", "fxpasses": "0.1.0"},
    "commit": "abc",
    "started": "2026-01-02T00:00:00+00:00",
}


def measured(contender: str, size: int, seconds: float, ratio: float, **more: Any) -> dict[str, Any]:
    against = {"plain": {"q1": 0.99 * ratio, "median": ratio, "q3": 1.01 * ratio}}
    times = {"q1_s": 0.9 * seconds, "median_s": seconds, "q3_s": 1.1 * seconds}
    common = {"parameters": {"size": size}, "contender": contender, "outcome": "measured", "why": ""}
    return {**common, "ours": contender == "ours", "against": against, **times, **more}


ENTRIES = [
    measured("plain", 3, 0.0717, 1.0, host_reads=17, figures={"bytes": 321}),
    measured("ours", 3, 0.0433, 0.604, host_reads=1, compile_cold_s=12.4, compile_warm_s=3.1, step_bytes=7 << 20),
    measured("plain", 5, 0.0811, 1.0, host_reads=29, top=[{"operator": "aten::mm", "calls": 4, "ms": 66.5}]),
    measured("ours", 5, 0.0973, 1.2, host_reads=1, top=[{"operator": "aten::add", "calls": 5, "ms": 77.5}]),
]


def written(folder: Path, entries: list[dict[str, Any]]) -> str:
    (folder / "toy_case.cpu.json").write_text(json.dumps(RESULTS | {"entries": entries}))
    return report.write(folder, ["tests.bench.toy_case"]).read_text()


def numbers_in_tables(text: str) -> set[str]:
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|--")]
    return set(re.findall(r"\d+(?:\.\d+)?", "\n".join(rows)))


def allowed(entries: list[dict[str, Any]]) -> set[str]:
    """Every number of the JSON, in the units that the report uses; and half the distance of the quartiles."""
    found: list[float] = []

    def collect(thing: Any) -> None:
        if isinstance(thing, dict):
            for value in thing.values():
                collect(value)
        elif isinstance(thing, list):
            for value in thing:
                collect(value)
        elif isinstance(thing, (int, float)):
            found.append(thing)

    collect(entries)
    found += [(entry["q3_s"] - entry["q1_s"]) / 2 for entry in entries]
    scaled = [value * scale for value in found for scale in (1, 1e3, 1 / 2**20)]
    return {report.number(value) for value in scaled} | {f"{value:.2f}" for value in found} | {str(v) for v in found}


def test_tables_hold_the_numbers_of_the_json_alone(tmp_path):
    text = written(tmp_path, ENTRIES)
    assert {"71.7", "43.3", "17", "12.4", "3.1", "0.60", "7", "321", "66.5"} <= numbers_in_tables(text)
    assert numbers_in_tables(text) - allowed(ENTRIES) == set()


def test_the_arithmetic_stands_beside_the_measurement():
    names = {"eager": (0.100, {"stall_s": 0.010}), "eager, cached by identity": (0.068, {})}
    parameters = {"model": "llama", "layers": 4}
    common = {"parameters": parameters, "outcome": "measured"}
    entries = [{**common, "contender": name, "median_s": s, "figures": f} for name, (s, f) in names.items()]
    (row,) = packed_metadata.arithmetic(entries)
    assert row["(L−1)·s, ms"] == pytest.approx(30)
    assert row["saved by eager, cached by identity against eager, ms"] == pytest.approx(32)
    assert row["saved by fastpack against Inductor, both flags, ms"] is None


def test_whatever_is_quoted_of_a_simulation_says_so(tmp_path, monkeypatch):
    case = dataclasses.replace(load("tests.bench.toy_case"), simulated=True)
    monkeypatch.setattr(report, "load", lambda name: case)
    text = written(tmp_path, ENTRIES)
    assert "### Simulated device" in text and "### C" not in text  # neither CPU nor CUDA
    assert "| toy_case | simulated device |" in re.sub(" +", " ", text)
    headings = re.findall(r"^([^|#\n].*)\n\n\|", text, re.MULTILINE)
    assert len(headings) > 3 and headings[0].startswith("In short")
    assert all(heading.endswith(("(simulated device)", "(simulated device)</summary>")) for heading in headings[1:])
    assert "simulated device" in (tmp_path / "toy_case.cpu.times.svg").read_text()


def test_another_figure_is_another_report(tmp_path):
    before = written(tmp_path, ENTRIES)
    after = written(tmp_path, [measured("plain", 3, 0.0999, 1.0), *ENTRIES[1:]])
    assert "71.7 ±" in before and "71.7 ±" not in after and "99.9 ±" in after


def test_it_says_where_ours_is_slower_with_the_profiles_of_both(tmp_path):
    text = written(tmp_path, ENTRIES)
    assert re.search(r"\|\s*ours, size 5 \|\s*plain \|\s*1.2 \|", text)
    assert "ours, size 3 |" not in text
    assert "aten::add" in text and "aten::mm" in text
    assert "not slower" in written(tmp_path, ENTRIES[:2])


def test_each_reason_for_missing_figures_is_there_once(tmp_path):
    slow = {"contender": "failing", "outcome": "too slow", "why": "prepare took more than 60 s", "ours": False}
    text = written(tmp_path, [*ENTRIES, *({**slow, "parameters": {"size": size}} for size in (3, 5))])
    assert text.count("- failing (2 groups): too slow: prepare took more than 60 s") == 1


def test_two_reports_of_the_same_results_are_equal(tmp_path):
    first, picture = written(tmp_path, ENTRIES), (tmp_path / "toy_case.cpu.times.svg").read_bytes()
    assert written(tmp_path, ENTRIES) == first
    assert (tmp_path / "toy_case.cpu.times.svg").read_bytes() == picture


def test_a_timeline_is_drawn_where_one_was_recorded(tmp_path):
    spans = [{"lane": lane, "start": at, "ms": 1.0} for at, lane in enumerate(("kernels", "DtoH", "HtoD"))]
    text = written(tmp_path, [measured("plain", 3, 0.1, 1.0, timeline=spans)])
    assert "toy_case.cpu.timeline.svg" in text
    assert "plain: DtoH" in (tmp_path / "toy_case.cpu.timeline.svg").read_text()


def test_a_folder_without_results_is_an_error(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no results" in capsys.readouterr().err


def test_list_names_every_case_and_its_contenders(capsys):
    assert main(["list"]) == 0
    text = capsys.readouterr().out
    for name in ("packed_metadata", "flash_path", "experts", "offload", "all_together", "pass_time", "call_cost"):
        assert f"\n{name}: " in "\n" + text
    assert "    fastpack\n" in text and "    eager, cached by identity\n" in text


@pytest.mark.parametrize("name", CASES)
def test_a_cases_groups_differ_and_its_parameters_are_plain(name):
    case = load(name)
    assert case.baseline in [contender.name for contender in case.contenders] and case.expected
    assert set(case.shows) <= set(report.TABLES)
    for device in ("cpu", "cuda"):
        for quick in (True, False):
            groups = case.groups(device, quick)
            assert groups and len({json.dumps(group) for group in groups}) == len(groups)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "expert"], "there is no case 'expert'; cases: packed_metadata"),
        (["run", "--only", "layers"], "it takes KEY=VALUE"),
        (["run", "--threads", "0"], "--threads is 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
