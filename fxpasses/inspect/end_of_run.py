"""`FXPASSES_SUMMARY=1`: one screen at the end of a run, on standard error, in the words of the program's author.

    FXPASSES_SUMMARY=1 python train.py

It says how many graphs there were, which frame was compiled how often and which guard failed, what was not captured,
and what to change. Of several processes, rank 0 prints. Without the variable nothing is kept.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from torch.fx import GraphModule

from fxpasses.attention.runtime.stats import attention_stats
from fxpasses.base.containment import contained
from fxpasses.base.units import many
from fxpasses.inspect.verdict import verdict
from fxpasses.report import Reason, Report
from fxpasses.rows.row_stats import row_stats

VARIABLE = "FXPASSES_SUMMARY"
_WIDTH = 100
_MOST_LINES = 5  # of one kind
_AS_IT_SHOULD_BE = (Reason.SMALL, Reason.NEEDED_SOON, Reason.WITHIN_BUDGET, Reason.NOT_COMPUTED, Reason.LEFT_OUT)


@dataclass
class Graph:
    """Observes one compilation, as `recording.Observer` does, and keeps what the summary needs: no graph, no tensor.

    done: when the compilation ended, in seconds of the run.
    """

    frame: int
    where: str
    outcome: str = ""
    reports: list[Report] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    done: float = 0.0

    def after_pass(self, report: Report, result: Any, failure: str = "") -> None:
        if failure:
            self.failed.append(f"{report.pass_name}: {failure}")
        else:
            self.reports.append(report)

    def after_partition(self, report: Report) -> None:
        self.reports.append(report)

    def lowering(self) -> None:
        pass

    def finish(self, outcome: str) -> None:
        if _history is not None:
            self.outcome, self.done = outcome, time.monotonic() - _history.started
            _history.graphs.append(self)

    def retraced(self) -> None:
        self.outcome = "retraced"


@dataclass
class History:
    """What the backend compiled in this process; `None` in `_history` if nobody asked."""

    started: float = field(default_factory=time.monotonic)
    graphs: list[Graph] = field(default_factory=list)


# Of the process: Dynamo calls the backend from inside the user's step, so no argument can pass it on.
_history: History | None = None


def start_if_asked() -> None:
    """Keep a history from now on, and print it when the process ends, if the environment asks for it."""
    global _history
    if os.environ.get(VARIABLE) == "1" and _history is None:
        with contained("the summary at the end of the run"):
            from fxpasses.inspect import dynamo_history

            dynamo_history.keep_more()
            atexit.register(_print)
            _history = History()


def _print() -> None:
    from fxpasses.inspect.rank import process_rank

    try:
        if _history is not None and process_rank() in (None, 0):
            print(text(_history), file=sys.stderr, flush=True)
    except Exception as error:  # a process that ends well must not end with our traceback
        print(f"fxpasses: the summary failed ({type(error).__name__}: {error})", file=sys.stderr)


def entry(gm: GraphModule, compilation: Any) -> Graph | None:
    """An observer of a compilation for the summary; None if nobody asked for one."""
    from fxpasses.inspect import snapshot

    if _history is None:
        return None
    return Graph(compilation.frame_id if compilation is not None else -1, snapshot.where_from(gm))


def text(history: History) -> str:
    """The screen."""
    ours = [graph for graph in history.graphs if graph.outcome != "retraced"]
    lines = [*_heading(history, ours), *_frames(ours), *_done(ours), *_not_captured(ours)]
    advice = list(_advice(ours))
    lines += ["What to change", *(f"  {number}. {line}" for number, line in enumerate(advice, 1))] if advice else []
    return "\n".join(part for line in lines for part in _folded(line))


def _heading(history: History, ours: list[Graph]) -> Iterator[str]:
    import torch

    now = time.monotonic() - history.started
    program = " ".join([os.path.basename(sys.argv[0]), *sys.argv[1:]])
    yield f"fxpasses: summary of {program[: _WIDTH // 2]} (torch {torch.__version__}, {now:.0f} s)"
    if not ours:
        yield "  No graph was compiled with fastpack: its model was not called, or Dynamo skipped it."
        return
    frames = len({graph.frame for graph in ours})
    last = max(graph.done for graph in ours)
    seconds = sum(found.seconds for found in _compilations(ours))
    found = f"{many(len(ours), 'graph')} of {many(frames, 'frame')}"
    yield f"  {found}, {seconds:.0f} s to compile; the last at {last:.0f} s"
    yield f"  {verdict(report for graph in ours for report in graph.reports)}"
    yield from (f"  {text}" for text in (str(attention_stats()), str(row_stats())) if text)


def _frames(ours: list[Graph]) -> Iterator[str]:
    """Each frame with its number of graphs, and what each further graph was compiled for."""
    from fxpasses.inspect.dynamo_history import recompile_limit
    from fxpasses.inspect.guard_words import cause

    where = {graph.frame: graph.where for graph in ours}
    found: dict[int, list[Any]] = {}
    for compilation in _compilations(ours):
        found.setdefault(compilation.frame, []).append(compilation)
    most = sorted(found.values(), key=lambda group: -len(group))
    if most:
        yield "Compiled"
    for group in most[:_MOST_LINES]:
        limit = ", Dynamo's limit: other calls run uncompiled" if len(group) >= recompile_limit() else ""
        line = where.get(group[0].frame) or group[0].place
        yield f"  ×{len(group)}  {line}{limit}"
        causes = Counter(cause(one.guard).text for one in group if one.guard)
        yield from (f"       because of {text}{_times(count)}" for text, count in causes.most_common(_MOST_LINES))
    yield from _rest(most)


def _done(ours: list[Graph]) -> Iterator[str]:
    """What the passes did, in the summaries of their reports, equal ones once."""
    done = Counter(f"{r.pass_name}: {r.summary}" for graph in ours for r in graph.reports if r.changed and r.summary)
    yield from _most_frequent("Changed", done, "in {} graphs")


def _not_captured(ours: list[Graph]) -> Iterator[str]:
    """Graph breaks, frames that failed, graphs and passes that were dropped, and refusals."""
    from fxpasses.inspect import dynamo_history

    found: Counter[str] = Counter()
    for place in dynamo_history.breaks():
        found[f"the graph breaks at {place.where}: {place.reason}"] += 1
    for compilation in dynamo_history.compilations():
        if compilation.error:
            found[f"{compilation.place} is not compiled: {compilation.error}"] += 1
    for graph in ours:
        if graph.outcome == "uncompiled":
            found[f"{graph.where} runs uncompiled: fastpack.strict shows the error"] += 1
        found.update(f"a pass was dropped: {failure}" for failure in graph.failed)
        # A loop of many layers refuses the same at one place in each.
        found.update(f"{name} left {at}: {reason}" for name, at, reason in sorted(set(_refusals(graph))))
    yield from _most_frequent("Not captured, or left alone", found)


def _advice(ours: list[Graph]) -> Iterator[str]:
    """What to change, the most frequent cause first. One recompilation for a cause is what dynamic sizes cost."""
    from fxpasses.inspect import dynamo_history
    from fxpasses.inspect.guard_words import cause

    needed: Counter[str] = Counter()
    for compilation in _compilations(ours):
        if compilation.guard:
            needed[cause(compilation.guard).advice] += 1
    yield from (advice for advice, count in needed.most_common(_MOST_LINES) if advice and count > 1)
    reasons = {(r.pass_name, refusal.reason) for graph in ours for r in graph.reports for refusal in r.refusals}
    if ("live_rows", Reason.RETURNED) in reasons:
        yield (
            "If nothing reads the logits that the model returns: use_cache=False and "
            'options={"fastpack.outputs": "lazy"} leave out padding and prompts.'
        )
    if any(reason is Reason.TEXTS_MIX for _, reason in reasons):
        yield "Call the model with use_cache=False, so that transformers makes the mask that separates packed texts."
    if any(True for _ in dynamo_history.breaks()):
        yield "Take what breaks the graph out of the compiled model; TORCH_LOGS=graph_breaks has ways around it."
    if any(True for graph in ours for _ in _refusals(graph)):
        yield "FXPASSES_RECORD=records python ..., then `fxpasses explain records`: what was left alone, and its cost."


def _compilations(ours: list[Graph]) -> list[Any]:
    """Dynamo's compilations of the frames that this backend was given."""
    from fxpasses.inspect import dynamo_history

    frames = {graph.frame for graph in ours}
    return [one for one in dynamo_history.compilations() if one.frame in frames and not one.error]


def _refusals(graph: Graph) -> Iterator[tuple[str, str, str]]:
    """Pass, place and reason of what a change to the program, or another option, would have rewritten."""
    for report in graph.reports:
        for refusal in report.refusals:
            if refusal.reason not in _AS_IT_SHOULD_BE:
                yield report.pass_name, refusal.where or f"`{refusal.subject}`", refusal.reason.value


def _times(count: int, words: str = "×{}") -> str:
    return f" ({words.format(count)})" if count > 1 else ""


def _most_frequent(title: str, lines: Counter[str], words: str = "×{}") -> Iterator[str]:
    """A title and the most frequent lines, each with its count in words; nothing if there are none."""
    if lines:
        yield title
    yield from (f"  {line}{_times(count, words)}" for line, count in lines.most_common(_MOST_LINES))
    yield from _rest(lines)


def _rest(lines: Any) -> Iterator[str]:
    if len(lines) > _MOST_LINES:
        yield f"  and {len(lines) - _MOST_LINES} more"


def _folded(line: str) -> Iterator[str]:
    """The line, cut at the screen's width; what a person has to read in full goes on below."""
    indent = len(line) - len(line.lstrip()) + 4
    while len(line) > _WIDTH:
        cut = line.rfind(" ", indent, _WIDTH)
        cut = cut if cut > indent else _WIDTH
        yield line[:cut]
        line = " " * indent + line[cut:].lstrip()
    yield line
