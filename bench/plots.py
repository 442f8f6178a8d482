"""Plots of a case's results, as SVG: times over the parameter, and on CUDA the timeline of copies and kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

from bench.case import Case

STYLE: Any = {
    "svg.hashsalt": "fxpasses",  # makes the file depend on the figures alone
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.size": 9,
}
MOST_PANELS = 24  # of a plot that can be looked at
LANES = ("kernels", "DtoH", "HtoD")


@contextlib.contextmanager
def figure(file: Path, panels: int, height: float) -> Iterator[list[Any]]:
    with pyplot.rc_context(STYLE):
        drawing, axes = pyplot.subplots(1, panels, figsize=(max(6.0, 3.4 * panels), height), squeeze=False)
        yield list(axes[0])
        drawing.tight_layout()
        drawing.savefig(file, metadata={"Date": None})
        pyplot.close(drawing)


def panels(case: Case, entries: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """The measured entries, grouped by all varying parameters except the one on the x axis."""
    measured = [entry for entry in entries if entry["outcome"] == "measured"]
    keys = [key for key in varying(entries) if key != case.x]
    found: dict[str, list[Mapping[str, Any]]] = {}
    for entry in measured:
        found.setdefault(", ".join(str(entry["parameters"][key]) for key in keys), []).append(entry)
    return found


def varying(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Parameters with more than one value, in their order."""
    keys = dict.fromkeys(key for entry in entries for key in entry["parameters"])
    return [key for key in keys if len({str(entry["parameters"].get(key)) for entry in entries}) > 1]


def times(case: Case, entries: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Median times with quartiles over `case.x`, a panel for each other combination. Returns whether there
    are any, and not too many."""
    parts = panels(case, entries)
    if not 0 < len(parts) <= MOST_PANELS:
        return False
    names = [contender.name for contender in case.contenders]
    model = case.model(entries) if case.model else {}
    with figure(file, len(parts), 3.2) as axes:
        for axis, (title, part) in zip(axes, parts.items(), strict=True):
            for colour, name in enumerate(names):
                own = [entry for entry in part if entry["contender"] == name]
                if own:
                    x = [entry["parameters"].get(case.x, 0) for entry in own]
                    below = [1e3 * (entry["median_s"] - entry["q1_s"]) for entry in own]
                    above = [1e3 * (entry["q3_s"] - entry["median_s"]) for entry in own]
                    y = [1e3 * entry["median_s"] for entry in own]
                    axis.errorbar(
                        x, y, [below, above], label=name, color=f"C{colour}", marker="o", ms=3, capsize=2, lw=1
                    )
                if line := model.get(name):
                    predicted = [1e3 * line[value] for value in sorted(line)]
                    axis.plot(sorted(line), predicted, color=f"C{colour}", ls="--", lw=1, label=f"{name}, model")
            axis.set_title(title)
            axis.set_yscale("log")
            if case.x:
                axis.set_xlabel(case.x)
                axis.set_xticks(sorted({entry["parameters"].get(case.x, 0) for entry in part}))
            else:
                axis.set_xticks([])
        axes[0].set_ylabel("ms a step (log scale)" + ", simulated device" * case.simulated)
        axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return True


def timelines(entries: Sequence[Mapping[str, Any]], file: Path) -> bool:
    """Lanes for each contender: when kernels ran, and copies to the host and back. Returns whether any was recorded."""
    recorded = [entry for entry in entries if entry.get("timeline")]
    if not recorded:
        return False
    with figure(file, 1, 1 + 0.8 * len(recorded)) as (axis,):
        labels = []
        for row, entry in enumerate(recorded):
            for lane, name in enumerate(LANES):
                spans = [(span["start"], span["ms"]) for span in entry["timeline"] if span["lane"] == name]
                y = -(row * (len(LANES) + 1) + lane)
                axis.broken_barh(spans, (y - 0.4, 0.8), facecolors=f"C{lane}")
                labels.append((y, f"{entry['contender']}: {name}"))
        axis.set_yticks([y for y, _ in labels], [text for _, text in labels])
        axis.set_xlabel("ms")
    return True
