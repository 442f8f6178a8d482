"""The figure with which RESULTS.md and README begin: time, memory and compile time of six kinds of steps.

A row is one group of a case. Each panel has stock Inductor, with its capture flags or without (the faster), and ours;
time and memory are relative to eager mode's, and a mark is the time of the fastest of all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import plots
from bench.case import load

Measured = Mapping[tuple[str, str], Mapping[str, Any]]
FILE = "overview.svg"
STOCK = ("Inductor", "Inductor, both flags")
OURS = "fastpack"
# What a row says, and the parameters of its group: the first that has them.
ROWS: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("packed texts, 4096 tokens", "packed_attention", {"mask": "documents", "tokens": 4096, "width": "reduced"}),
    (
        "padded, prompts without labels",
        "live_rows",
        {"dead": "padding and prompts", "tokens": 384, "vocabulary": 32000},
    ),
    ("the same, 128,000 columns", "live_rows", {"dead": "padding and prompts", "vocabulary": 128000}),
    ("head and loss, 30 % labelled", "loss_head", {"loss": "plain", "labelled": 0.3, "columns": 32000}),
    ("28 equal layers", "compile_time", {"model": "llama", "layers": 28, "checkpointed": False}),
    ("all rows labelled, nothing padded", "live_rows", {"dead": "nothing"}),
)


def draw(measured: Measured, folder: Path) -> bool:
    """Write the figure into a folder of results; False if none of its rows was measured on a CPU."""
    found = [(text, row) for text, case, wanted in ROWS if (row := _row(measured.get((case, "cpu")), case, wanted))]
    if found:
        _draw([text for text, _ in found], [row for _, row in found], folder / FILE)
    return bool(found)


def _row(results: Mapping[str, Any] | None, case: str, wanted: Mapping[str, Any]) -> dict[str, float] | None:
    """time, memory: of stock and ours, by eager mode's; compile_s; fastest: of all others. None if one is missing."""
    groups: dict[str, dict[str, Mapping[str, Any]]] = {}
    for entry in results["entries"] if results is not None else ():
        if entry["outcome"] == "measured" and all(entry["parameters"].get(k) == v for k, v in wanted.items()):
            groups.setdefault(str(entry["parameters"]), {})[entry["contender"]] = entry
    baseline = load(case).baseline
    for group in groups.values():
        stock = min((group[name] for name in STOCK if name in group), key=lambda one: one["median_s"], default=None)
        if stock is None or OURS not in group or baseline not in group:
            continue
        eager, ours = group[baseline], group[OURS]
        others = [one["median_s"] for name, one in group.items() if not one["ours"] and name != baseline]
        return {
            "stock time": stock["median_s"] / eager["median_s"],
            "our time": ours["median_s"] / eager["median_s"],
            "fastest": min(others) / eager["median_s"],
            "stock memory": stock["step_bytes"] / eager["step_bytes"],
            "our memory": ours["step_bytes"] / eager["step_bytes"],
            "stock compile": stock["compile_cold_s"],
            "our compile": ours["compile_cold_s"],
        }
    return None


def _draw(texts: Sequence[str], rows: Sequence[Mapping[str, float]], file: Path) -> None:
    panels = {"time": "time of a step ÷ eager mode's", "memory": "memory of a step ÷ eager mode's",
              "compile": "time to compile, s"}  # fmt: skip
    places = list(range(len(rows)))[::-1]
    with plots.figure(file, len(panels), 0.9 + 0.42 * len(rows)) as axes:
        for axis, (what, title) in zip(axes, panels.items(), strict=True):
            for shift, name, label, color in ((0.19, "stock", "stock Inductor", "0.62"), (-0.19, "our", OURS, "C0")):
                values = [row[f"{name} {what}"] for row in rows]
                bars = axis.barh([place + shift for place in places], values, 0.36, color=color, label=label)
                axis.bar_label(bars, [f"{value:.2f}" if what != "compile" else f"{value:.0f}" for value in values],
                               padding=2, fontsize=7)  # fmt: skip
            if what == "time":
                axis.plot([row["fastest"] for row in rows], [place + 0.19 for place in places], "k|", ms=10,
                          label="fastest of the others")  # fmt: skip
            if what != "compile":
                axis.axvline(1, color="0.4", lw=0.8, ls=":")
                axis.set_xlim(0, 1.3)
            axis.set_yticks(places, texts if axis is axes[0] else [""] * len(texts))
            axis.set_title(title, fontsize=9, loc="left")
        axes[0].legend(fontsize=7, loc="upper left", bbox_to_anchor=(0, -0.09), ncol=3, frameon=False)
