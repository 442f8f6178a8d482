"""What the zoo's rules call worse, and how numbers are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from tests.zoo import page, results
from tests.zoo.exceptions import REASONS
from tests.zoo.measuring import difference, host_reads

EAGER = {"repeats": True, "reads": 4, "graphs": 0, "breaks": 0, "recompiled": 0, "reasons": []}
STOCK = {"difference": 0.0, "where": "", "reads": 4, "graphs": 2, "breaks": 1, "recompiled": 0, "compile_s": 3.0}


def lines(**ours: Any) -> list[dict[str, Any]]:
    same = {"architecture": "causal/llama", "arrangement": "packed"}
    figures = {"eager": EAGER, "stock": STOCK, "ours": {**STOCK, "reasons": ["a branch"], **ours}}
    return [{**same, "contender": contender, **values} for contender, values in figures.items()]


@pytest.mark.parametrize(
    ("worse", "word"),
    [
        ({"difference": 1e-3}, "differs"),
        ({"reads": 5}, "host reads"),
        ({"graphs": 3}, "graphs"),
        ({"breaks": 2}, "breaks"),
        ({"recompiled": 1}, "another batch"),
        ({"compile_s": 20.0}, "compiles"),
        ({"error": "RuntimeError: no"}, "fails"),
    ],
)
def test_each_rule_finds_what_is_worse(worse: dict[str, Any], word: str) -> None:
    (violation,) = results.runs(lines(**worse))[0].violations()
    assert word in violation


def test_as_good_as_without_is_not_worse() -> None:
    assert results.runs(lines())[0].violations() == []


def test_the_last_line_for_the_same_run_counts(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines(reads=9) + lines()))
    assert results.runs(results.read(file))[0].violations() == []


def test_an_architecture_that_cannot_be_built_is_not_run() -> None:
    missing = results.not_run([{"architecture": "causal/x", "error": "ValueError: no"}, *lines(error="no")])
    assert missing == {"causal/x": "ValueError: no"}


def test_what_did_not_run_or_ran_with_other_versions_is_tried_again(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    good = [{**line, **results.versions()} for line in lines()]
    other = [{**line, "architecture": "causal/old", "torch": "1.0", "transformers": "1.0"} for line in lines()]
    bad = {"architecture": "causal/x", "ended": "took more than 300 s", **results.versions()}
    file.write_text("".join(json.dumps(line) + "\n" for line in [*good, *other, bad]))
    assert results.forget_not_run(file) == {"causal/llama"}
    assert results.read(file) == good


def test_the_page_names_what_is_worse_and_why_there_are_several_graphs() -> None:
    text = page.page([*lines(reads=5), {"architecture": "causal/x", "ended": "took more than 300 s"}])
    assert "5 host reads, eager mode 4" in text
    assert "a branch" in text
    assert "took more than 300 s" in text


def test_the_page_names_what_fails_with_stock_as_well() -> None:
    failing = [line if line["contender"] == "eager" else {**line, "error": "ValueError: a | b"} for line in lines()]
    failing = [{key: value for key, value in line.items() if key != "graphs"} for line in failing]
    (row,) = [line for line in page.page(failing).splitlines() if line.startswith("| causal/llama")]
    assert [cell.strip() for cell in row.split(" | ")] == [
        "| causal/llama",
        "packed",
        "fails",
        "fails",
        "ValueError: a \\| b |",
    ]


def test_a_difference_is_relative_to_the_tensors_largest_number() -> None:
    wanted = {"w": torch.tensor([2.0, -4.0])}
    assert difference({"w": torch.tensor([2.0, -4.0])}, wanted) == (0.0, "")
    assert difference({"w": torch.tensor([2.0, -3.0])}, wanted) == (0.25, "w")
    assert difference({"w": torch.tensor([2.0, float("nan")])}, wanted)[0] == float("inf")
    assert difference({}, wanted)[0] == float("inf")


def test_reads_of_a_list_are_counted() -> None:
    numbers = torch.arange(3)
    assert host_reads(lambda: (numbers.tolist(), numbers[0].item(), [1].copy())) == 2


def test_published_lines_of_an_architecture_are_replaced_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "published.jsonl"
    other = {"architecture": "causal/a", "left_out": "needs timm"}
    results.publish([*lines(reads=9), {**lines()[0], "arrangement": "padded"}, other], file)
    found = results.publish(lines(), file)
    assert results.read(file) == found
    assert [line["architecture"] for line in found] == ["causal/a"] + 3 * ["causal/llama"]
    assert [run.violations() for run in results.runs(found)] == [[]]


def test_of_what_is_published_nothing_is_worse_and_few_are_several_graphs() -> None:
    found = [run for run in results.runs(results.read(results.PUBLISHED)) if run.comparable]
    assert found
    assert {run.architecture: words for run in found if (words := run.violations(timed=False))} == {}
    several = {run.architecture.split("/")[1] for run in found if run.contenders["ours"].get("graphs") != 1}
    assert len(several) < 16
    assert several <= {key.split("/")[-1] for key in REASONS}
