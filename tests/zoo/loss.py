"""Which architectures have their loss computed in chunks of rows; `python -m tests.zoo.rows` runs them."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from tabulate import tabulate

from fxpasses.inspect import Record
from fxpasses.loss import chunks, region

FILE = Path(__file__).parent / "rows.jsonl"
TASKS = ("causal", "masked", "seq2seq")
HEAD = """## Losses in chunks

The same batches. Taken: logits never stand in full. Written by `python -m tests.zoo.rows`.

"""
_SMALL = {
    (region, "LEAST_COLUMNS"): 16,
    (region, "LEAST_BYTES"): 0,
    (chunks, "_LEAST_ROWS"): 5,
    (chunks, "CHUNK_BYTES"): 1,
}


@contextmanager
def of_any_size() -> Any:
    """Small logits are taken, in several chunks."""
    with ExitStack() as stack:
        for (module, name), value in _SMALL.items():
            stack.enter_context(mock.patch.object(module, name, value))
        yield


def taken(record: Record) -> str:
    """ "yes", or why not."""
    reports = [report for graph in record.graphs for report in graph.reports if report.pass_name == "chunk_loss"]
    if any(report.changed for report in reports):
        return "yes"
    refusals = [refusal for report in reports for refusal in report.refusals]
    return refusals[-1].text or refusals[-1].reason.value if refusals else "no logits in a graph"


def section() -> str:
    """Of docs/supported.md; empty without results."""
    found = [json.loads(line) for line in FILE.read_text().splitlines()] if FILE.exists() else []
    counts, reasons = [], defaultdict(list)
    for task in TASKS:
        own = [each for each in found if each["architecture"].startswith(f"{task}/") and "loss" in each]
        if not own:
            return ""
        kinds = Counter(each["loss"] == "yes" for each in own)
        counts.append([task, len(own), kinds[True], kinds[False]])
        for each in own:
            if each["loss"] != "yes":
                reasons[each["loss"].replace("|", "\\|")].append(each["architecture"])
    rows = [[why, ", ".join(names)] for why, names in sorted(reasons.items(), key=lambda item: -len(item[1]))]
    return HEAD + "\n\n".join(_tables(counts, rows)) + "\n"


def _tables(counts: Iterable[Any], rows: Iterable[Any]) -> list[str]:
    first = tabulate(counts, ["task", "compared", "taken", "not"], tablefmt="github")
    return [first, tabulate(rows, ["why not", "architectures"], tablefmt="github")]
