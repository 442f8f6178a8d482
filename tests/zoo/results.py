"""The results of the zoo, read from JSON lines: what each architecture did in each arrangement, and the rules.

{"architecture": "causal/llama", "arrangement": "packed, checkpoints", "contender": "ours", "graphs": 1, ...}
{"architecture": "causal/x", "error": "..."}       it could not be built
{"architecture": "causal/x", "ended": "..."}       its process did not come to its end
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "scratch" / "results.jsonl"  # of this checkout's runs
PUBLISHED = Path(__file__).parent / "results.jsonl"  # what docs/supported.md is written from
TOLERANCE = 2e-5
# Compilation: CPU seconds, which tiny models bring near the noise of a shared machine.
COMPILE_FACTOR, COMPILE_SLACK_S = 2.0, 5.0
LEAVES_MORE = "which leaves more to eager mode"


@dataclass
class Run:
    """An architecture in an arrangement: the figures of each contender, as in `measuring.measure`."""

    architecture: str
    arrangement: str
    contenders: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def comparable(self) -> bool:
        """Whether eager mode ran, with the same numbers each time, and the others had their turn."""
        return bool(self.contenders.get("eager", {}).get("repeats")) and {"stock", "ours"} <= self.contenders.keys()

    def violations(self, timed: bool = True) -> list[str]:
        """How this run is worse than without this package, in words; none if it is not comparable.

        timed: whether a longer compilation counts, which it should not on a busy machine.
        """
        if not self.comparable:
            return []
        eager, stock, ours = (self.contenders[name] for name in ("eager", "stock", "ours"))
        if "error" in ours:
            return [] if "error" in stock else [f"fails: {ours['error']}"]
        found = []
        if ours["difference"] > TOLERANCE and ours["difference"] > 2 * stock.get("difference", 0.0):
            found.append(f"differs from eager mode by {ours['difference']:.1e} in {ours.get('where')}")
        if ours["reads"] > eager["reads"]:
            found.append(f"{ours['reads']} host reads, eager mode {eager['reads']}")
        if "error" in stock:
            return found
        if ours["graphs"] > max(stock["graphs"], 1):
            found.append(f"{ours['graphs']} graphs, stock {stock['graphs']}")
        if ours["breaks"] > stock["breaks"]:
            found.append(f"{ours['breaks']} graph breaks, stock {stock['breaks']}")
        if ours["recompiled"] > stock["recompiled"]:
            found.append(f"{ours['recompiled']} graphs more for another batch, stock {stock['recompiled']}")
        if timed and ours["compile_s"] > COMPILE_FACTOR * stock["compile_s"] + COMPILE_SLACK_S:
            left = f", {LEAVES_MORE}: {stock['graphs']} graphs, {stock['reads']} host reads"
            left += f"; ours {ours['graphs']} and {ours['reads']}"
            longer = f"compiles for {ours['compile_s']} s, stock for {stock['compile_s']} s"
            found.append(longer + left * (stock["graphs"] > ours["graphs"]))
        return found


def read(path: Path = FILE) -> list[dict[str, Any]]:
    """All lines; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def publish(lines: Iterable[dict[str, Any]], path: Path = PUBLISHED) -> list[dict[str, Any]]:
    """Add lines to those published, in place of those of the same architectures; returns all. Empty figures are left
    out."""
    new = [{key: value for key, value in line.items() if value not in ("", [])} for line in lines]
    replaced = {line["architecture"] for line in new}
    found = [line for line in read(path) if line["architecture"] not in replaced] + new
    found.sort(key=lambda line: line["architecture"])
    path.write_text("".join(json.dumps(line) + "\n" for line in found))
    return found


def runs(lines: Iterable[dict[str, Any]]) -> list[Run]:
    """By architecture and arrangement; of lines for the same, the last."""
    found: dict[tuple[str, str], Run] = {}
    for line in lines:
        if "contender" in line:
            key = line["architecture"], line["arrangement"]
            found.setdefault(key, Run(*key)).contenders[line["contender"]] = line
    return list(found.values())


def not_run(lines: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Architectures that could not be built or run in eager mode, or whose process ended early, and why."""
    found: dict[str, str] = {}
    for line in lines:
        for key in ("left_out", "error", "ended"):
            if key in line and line.get("contender", "eager") == "eager":
                found[line["architecture"]] = line[key]
        if line.get("repeats") is False:
            found[line["architecture"]] = "eager mode's numbers differ from run to run"
    return found


def versions() -> dict[str, str]:
    return {name: metadata.version(name).split("+")[0] for name in ("torch", "transformers")}


def ran(lines: Iterable[dict[str, Any]]) -> set[str]:
    """The architectures that ran, all with today's versions."""
    lines = list(lines)
    old = {line["architecture"] for line in lines if not versions().items() <= line.items()}
    return {line["architecture"] for line in lines} - old - not_run(lines).keys()


def forget_not_run(path: Path = FILE) -> set[str]:
    """Remove the lines of architectures that did not run, or with other versions, so that they are tried again;
    returns the others."""
    lines = read(path)
    found = ran(lines)
    kept = [line for line in lines if line["architecture"] in found]
    if len(kept) < len(lines):
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
    return found
