"""Records what the backend compiles: while a `record()` is open, or for a whole process into a file.

    with fxpasses.inspect.record() as record:
        step()
    print(record)

`FXPASSES_RECORD=folder` in the environment does the same without a change to the program: each process writes
`folder/record-<pid>.jsonl`, with its rank in the name if there are several. Otherwise recording costs a compilation one
look at a list and one at the environment.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from fxpasses.attention.runtime.stats import attention_stats
from fxpasses.base.once import warn_once
from fxpasses.base.sample import close_sample, open_sample
from fxpasses.inspect import codec, end_of_run
from fxpasses.inspect.dry_run import DryRun
from fxpasses.inspect.model import CAPTURED, Graph, Run, Stage
from fxpasses.inspect.rank import process_rank
from fxpasses.inspect.verdict import said
from fxpasses.report import Report
from fxpasses.rows.row_stats import row_stats
from fxpasses.version import __version__

if TYPE_CHECKING:
    from fxpasses.options import Options
    from fxpasses.passes.pipeline import Result

FOLDER = "FXPASSES_RECORD"
VALUES = "FXPASSES_RECORD_VALUES"
log = logging.getLogger(__name__)


class Record(Run):
    """All graphs compiled while the record was open, in order."""

    _unmeasured: list[_Recorder] | None = None  # whose steps are to be measured when the record is closed

    def figures(self, pass_name: str) -> dict[str, int]:
        """A pass's figures, summed over the graphs; of peaks, the highest."""
        total: dict[str, int] = {}
        for graph in self.graphs:
            for report in graph.reports:
                if report.pass_name == pass_name:
                    for name, value in report.figures.items():
                        before = total.get(name, 0)
                        total[name] = max(before, value) if name.startswith("peak_bytes") else before + value
        return total

    def save(self, path: str | Path) -> None:
        """Write the record to a file that `fxpasses.inspect.load` and the command `fxpasses` read."""
        codec.write(self, path)

    def __str__(self) -> str:
        """What each pass did, line by line; `fxpasses.inspect.report` shows more."""
        lines = said(self)
        for number, graph in enumerate(self.graphs):
            lines.append(f"graph {number}: {graph.nodes} nodes")
            lines += [f"  {line}" for report in graph.reports for line in str(report).splitlines()]
        return "\n".join(lines) or "no graph was compiled"


# Open records. Dynamo calls the backend from inside the user's step, so no argument can pass one on.
_open: list[Record] = []


@contextlib.contextmanager
def record(measure: bool = False) -> Iterator[Record]:
    """Collect a `Record` of every graph that the backend compiles inside the `with` block, in any thread.

    measure: at the end, also find the FLOPs and the memory of forward and backward, before and after the passes. That
    traces each graph twice more, and keeps it until then.
    """
    opened, before, rows_before = new_record(), attention_stats(), row_stats()
    opened._unmeasured = [] if measure else None
    _open.append(opened)
    open_sample(opened.sample)
    try:
        yield opened
    finally:
        computed = attention_stats().since(before)
        opened.attention = asdict(computed) if computed.calls else {}
        rows = row_stats().since(rows_before)
        opened.rows = {name: float(value) for name, value in asdict(rows).items()} if rows.steps else {}
        close_sample(opened.sample)
        # By identity: two records with equal contents are equal.
        _open[:] = [other for other in _open if other is not opened]
        recorders, opened._unmeasured = opened._unmeasured or [], None
    for recorder in recorders:  # a block that raised is not measured
        recorder.measure(computed.pairs_computed / computed.pairs if computed.pairs else 1.0)


def load(path: str | Path) -> Record:
    """Read a file from `Record.save` or `FXPASSES_RECORD`; raises `codec.RecordError` for any other file.

    A record is data: reading executes nothing, and every field is checked.
    """
    run = codec.read(path)
    return Record(**{field.name: getattr(run, field.name) for field in fields(run)})


def new_record() -> Record:
    return Record(
        started=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        program=" ".join(sys.argv),
        versions={"python": sys.version.split()[0], "torch": torch.__version__, "fxpasses": __version__},
        rank=process_rank(),
        pid=os.getpid(),
    )


class Observer:
    """Observes one compilation. This class does nothing; it serves where nothing is recorded."""

    def after_pass(self, report: Report, result: Result, failure: str = "") -> None:
        """Record a pass: its report, and the graph after it if it changed something; or why it was dropped."""

    def after_partition(self, report: Report) -> None:
        """Record a pass on the forward and backward graphs that AOTAutograd made of the result."""

    def lowering(self) -> None:
        """Start to time the compilation of the result."""

    def finish(self, outcome: str) -> None:
        """Add the graph to open records and files. See `model.Graph` for outcomes."""

    def retraced(self) -> None:
        """Called later, if Dynamo has forgotten the graph, and the same one is compiled anew."""


def observe(gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Observer:
    """An observer of the compilation of `gm`. It never raises."""
    found: list[Any] = []
    _observe(found, gm, example_inputs, options)
    return _All(found) if found else Observer()


class _All(Observer):
    """Several observers of one compilation."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        for event in ("after_pass", "after_partition", "lowering", "finish", "retraced"):
            setattr(self, event, functools.partial(self._tell, observers, event))

    @staticmethod
    def _tell(observers: Sequence[Observer], event: str, *about: Any) -> None:
        for observer in observers:
            _observing(getattr(observer, event))(*about)


def _observing(method: Callable[..., None]) -> Callable[..., None]:
    """Turn a failure to record into one warning: the user's program continues."""

    @functools.wraps(method)
    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            log.debug("recording failed", exc_info=error)
            text = f"recording a graph failed, and the record lacks it ({type(error).__name__}: {error})"
            warn_once("recording", text, stacklevel=3)

    return guarded


@_observing
def _observe(found: list[Any], gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
    """Append the observers of the compilation of `gm`."""
    if (entry := end_of_run.entry(gm, _compile_id(gm))) is not None:
        found.append(entry)
    if _open or os.environ.get(FOLDER) or _structured_trace_is_on():
        found.append(recorder := _Recorder())
        recorder.capture(gm, example_inputs, options)


class _Recorder(Observer):
    def __init__(self) -> None:
        from fxpasses.inspect.partition import Listener

        self.graph = Graph(rank=process_rank())
        self.started = 0.0
        self.listener = Listener()
        # Graphs to measure when the record is closed; only for an open record.
        self.inputs = 0
        self.captured: DryRun | None = None
        self.result: Result | None = None
        self.rewritten: DryRun | None = None

    def capture(self, gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        from fxpasses.inspect import snapshot
        from fxpasses.inspect.capturability import capturability

        graph = self.graph
        graph.function, graph.options = snapshot.where_from(gm), _plain(asdict(options))
        graph.symbols = snapshot.symbol_hints(gm)
        compilation = _compile_id(gm)
        if compilation is not None:
            graph.compile_id = str(compilation)
            graph.frame, graph.recompile = compilation.frame_id, compilation.frame_compile_id
        regions = snapshot.snapshot(gm)
        if os.environ.get(VALUES) == "1":
            inputs = (node for node in regions[0].nodes if node.op == "placeholder")
            for node, data in zip(inputs, snapshot.input_data(example_inputs), strict=False):
                node.data = data
        graph.stages.append(Stage(CAPTURED, regions, cuda_graph=capturability(gm)))
        if any(opened._unmeasured is not None for opened in _open):
            self.captured, self.inputs = DryRun(gm), len(example_inputs)

    def after_pass(self, report: Report, result: Result, failure: str = "") -> None:
        from fxpasses.fold.outlining import is_folded
        from fxpasses.inspect import snapshot
        from fxpasses.inspect.capturability import capturability

        stage = Stage(report.pass_name, report=None if failure else report, failure=failure, seconds=report.seconds)
        # A folded graph differs from the one before by calls of the same nodes alone: the report says all of it.
        if report.changed and not failure and not is_folded(result.gm):
            self.result = result
            stage.regions = snapshot.snapshot(result.gm)
            stage.cuda_graph = capturability(result.gm)
            if result.program is not None:
                regions, stage.checks = snapshot.snapshot_prologue(result.program)
                stage.regions += regions
        self.graph.stages.append(stage)

    def after_partition(self, report: Report) -> None:
        # Without regions: these graphs are not versions of the captured graph, so a diff with it would be meaningless.
        self.graph.stages.append(Stage(report.pass_name, report=report, seconds=report.seconds, partitioned=True))

    def lowering(self) -> None:
        if self.captured is not None and self.result is not None:
            self.rewritten = DryRun(self.result.gm, len(self.result.example_inputs) - self.inputs)
        self.result = None
        self.started = time.perf_counter()
        self.listener.start()

    def finish(self, outcome: str) -> None:
        from fxpasses.inspect import trace

        self.listener.stop()
        in_pieces = any(report.figures.get("pieces", 0) > 1 for report in self.graph.reports)
        self.graph.partition = None if in_pieces else self.listener.found  # of pieces, it found the last one alone
        self.graph.compile_seconds = time.perf_counter() - self.started if self.started else 0.0
        self.graph.outcome = outcome
        if not self.graph.stages or self.graph.stages[0].name != CAPTURED:  # `capture` failed, with a warning
            return
        for opened in _open:
            opened.graphs.append(self.graph)
            if opened._unmeasured is not None:
                opened._unmeasured.append(self)
        _append_to_file(self.graph)
        if _structured_trace_is_on():
            trace.emit(self.graph)

    def retraced(self) -> None:
        self.graph.outcome = "retraced"

    def measure(self, share: float) -> None:
        """Measure the step before and after the passes, on the first batch's sizes. share: see `DryRun.step`."""
        before, after, self.captured, self.rewritten = self.captured, self.rewritten, None, None
        if before is not None and self.graph.before is None:
            # A size that only a batch knows: the figures are left out, and what PyTorch says of it is not the user's.
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.graph.before = before.step(share)
                self.graph.after = after.step(share) if after is not None else self.graph.before


def _structured_trace_is_on() -> bool:
    """Whether `TORCH_TRACE` requests artefacts.

    Private name, checked on torch 2.13: `torch._logging._internal.trace_log`. Its own handler always exists, with
    `root_dir` None where no trace is requested.
    """
    trace_log = getattr(torch._logging._internal, "trace_log", None)
    return any(getattr(handler, "root_dir", None) is not None for handler in getattr(trace_log, "handlers", ()))


def _compile_id(gm: GraphModule) -> Any:
    """Dynamo's id of the compilation. Private name, checked on torch 2.13: `torch._guards.CompileContext`."""
    context = getattr(torch._guards, "CompileContext", None)
    current = context.current_compile_id() if context is not None else None
    if current is None:
        current = gm.meta.get("dynamo_compile_id")
    return current if current is not None and current.frame_id is not None else None


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    return {key: value if isinstance(value, (bool, int, float, str)) else str(value) for key, value in options.items()}


# The process's own file, made when the first graph is compiled, and again in a forked process.
_file: Path | None = None
_file_pid = 0


def _append_to_file(graph: Graph) -> None:
    global _file, _file_pid
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    text = ""
    if _file is None or _file_pid != os.getpid() or _file.parent != Path(folder):
        run = new_record()
        rank = f"rank{run.rank}-" if run.rank is not None else ""
        _file, _file_pid = _unused(Path(folder), f"record-{rank}{run.pid}"), run.pid
        text = codec.header(run) + "\n"
    # One write of whole lines: a reader, or a crash, sees a prefix of the file with at most one incomplete graph.
    with open(_file, "a", encoding="utf-8") as file:
        file.write(f"{text}{codec.graph_line(graph)}\n")


def _unused(folder: Path, name: str) -> Path:
    """A path that no earlier process with the same id has taken."""
    folder.mkdir(parents=True, exist_ok=True)
    path, number = folder / f"{name}.jsonl", 1
    while path.exists():
        path, number = folder / f"{name}-{number}.jsonl", number + 1
    return path
