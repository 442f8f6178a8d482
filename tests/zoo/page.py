"""Publishes results of the zoo and writes docs/supported.md from all of them: `python -m tests.zoo.page [RESULTS]`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from tests.zoo import results
from tests.zoo.architectures import MAPPINGS, architectures
from tests.zoo.exceptions import REASONS
from tests.zoo.loss import section as chunked_losses
from tests.zoo.results import Run
from tests.zoo.rows import section as live_rows

PAGE = Path(__file__).parents[2] / "docs" / "supported.md"

HEAD = """# Supported architectures

Written by `python -m tests.zoo.page` from the results of `make zoo`, with {versions}.

Each architecture of transformers' mappings is built tiny from its own configuration class, and trains two steps in
eager mode, under stock `torch.compile` and under this backend, both with the lowering `aot_eager`: on packed text with
checkpoints and on text padded left and then right where it can, mixtures also with `experts_implementation="eager"`.
Loss, outputs and all gradients are compared with eager mode's, relative to each tensor's largest number. Each task's
row says how many of its architectures were compared so far; a run is an architecture in one arrangement. What a kernel
on the CPU takes from the CPU's memory is no host read.
"""


def page(lines: Sequence[dict[str, Any]]) -> str:
    found, missing = results.runs(lines), results.not_run(lines)
    used = {f"{name} {line[name]}": None for line in lines for name in ("torch", "transformers") if name in line}
    versions = " and ".join(used)
    parts = [HEAD.format(versions=versions), _summary(found, missing), _worse(found), _several(found)]
    parts += [live_rows(), chunked_losses(), _one_graph(found), _not_run(missing)]
    return "\n".join(filter(None, parts))


def _summary(found: Sequence[Run], missing: dict[str, str]) -> str:
    rows = []
    known = Counter(each.task for each in architectures())
    for task in MAPPINGS:
        of_task = [run for run in found if run.architecture.startswith(f"{task}/")]
        good = [run for run in of_task if run.comparable and "error" not in run.contenders["ours"]]
        eager, stock, ours = ([run.contenders[name] for run in good] for name in ("eager", "stock", "ours"))
        rows.append([
            task,
            known[task],
            len({run.architecture for run in good}),
            len([name for name in missing if name.startswith(f"{task}/")]),
            len(good),
            sum(_one(figures) for figures in ours),
            sum(_one(figures) for figures in stock),
            sum(figures["difference"] == 0 for figures in ours),
            sum(figures["difference"] > results.TOLERANCE for figures in ours),
            f"{sum(figures['reads'] for figures in eager)} → {sum(figures['reads'] for figures in ours)}",
        ])  # fmt: skip
    heads = ["task", "there are", "compared", "cannot run", "runs", "one graph", "with stock", "bit for bit",
             f"beyond {results.TOLERANCE:g}", "host reads"]  # fmt: skip
    return tabulate(rows, heads, tablefmt="github") + "\n"


def _one(figures: dict[str, Any]) -> bool:
    return figures.get("graphs") == 1 and not figures["recompiled"]


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    return f"## {title}\n\n{tabulate(rows, heads, tablefmt='github')}\n"


def _worse(found: Sequence[Run]) -> str:
    rows = [[run.architecture, run.arrangement, "; ".join(words)] for run in found if (words := run.violations())]
    if not rows:
        return "No run is worse than without this backend.\n"
    return (
        "## Worse than without\n\n" + tabulate(rows, ["architecture", "arrangement", "how"], tablefmt="github") + "\n"
    )


def _several(found: Sequence[Run]) -> str:
    rows = []
    for run in found:
        stock, ours = run.contenders.get("stock", {}), run.contenders.get("ours", {})
        if not run.comparable or ours.get("graphs") == 1:
            continue
        reason = REASONS.get(run.architecture) or REASONS.get(run.architecture.split("/")[1])
        reason = reason or ours.get("error", "")[:140] or "; ".join(ours.get("reasons", ())) or "–"
        graphs = [each.get("graphs", "fails") for each in (ours, stock)]
        rows.append([run.architecture, run.arrangement, *graphs, _escaped(reason)])
    if not rows:
        return ""
    heads = ["architecture", "arrangement", "graphs", "with stock", "why"]
    return _table("More than one graph", heads, rows)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def _one_graph(found: Sequence[Run]) -> str:
    text = "## One graph in every arrangement\n\n"
    for task in MAPPINGS:
        good: dict[str, bool] = {}
        for run in found:
            if run.architecture.startswith(f"{task}/") and run.comparable:
                one = run.contenders["ours"].get("graphs") == 1 and not run.violations()
                good[run.architecture] = good.get(run.architecture, True) and one
        names = [name.split("/")[1] for name, one in good.items() if one]
        if names:
            text += f"**{task}** ({len(names)}): {', '.join(sorted(names))}.\n\n"
    return text


def _not_run(missing: dict[str, str]) -> str:
    if not missing:
        return ""
    rows = [[name, _escaped(why)[:140]] for name, why in sorted(missing.items())]
    return _table("Cannot run, or not built tiny", ["architecture", "why"], rows)


def main() -> None:
    lines = results.read(Path(sys.argv[1])) if len(sys.argv) > 1 else results.read()
    published = results.publish(lines)
    if not published:
        raise SystemExit(f"no results in {results.FILE}: run `make zoo` first")
    PAGE.write_text(page(published))


if __name__ == "__main__":
    main()
