"""`fxpasses doctor`: shows what works on this machine, and what would be switched off."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass

NAME = "doctor"
HELP = "print versions and devices, what works on this machine, and what would be switched off"
EPILOG = """\
exit codes: 0 everything works; 1 something would be switched off or fail; 2 wrong arguments.
"""


@dataclass(frozen=True)
class Finding:
    """One line. state: "ok", "note" (nothing to do) or "off" (does not work). text: details, and what to do."""

    subject: str
    state: str
    text: str

    @classmethod
    def of(cls, subject: str, works: object, text: str, without: str) -> Finding:
        return cls(subject, "ok", text) if works else cls(subject, "off", without)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    text = "say when each part of the capture can go, and which of Dynamo's methods it replaces"
    parser.add_argument("-v", "--verbose", action="store_true", help=text)


def run(given: argparse.Namespace) -> int:
    from tabulate import tabulate

    from fxpasses.inspect.text import Style

    style = Style.of(sys.stdout)
    found = list(findings(given.verbose))
    colors = {"ok": "32", "note": "33", "off": "31"}
    rows = [[style.paint(f.state, colors[f.state]), f.subject, f.text] for f in found]
    widths = [None, None, max(30, style.width - max(len(f.subject) for f in found) - 8)]
    print(tabulate(rows, tablefmt="plain", maxcolwidths=widths, disable_numparse=True))
    return int(any(f.state == "off" for f in found))


def findings(verbose: bool = False) -> Iterator[Finding]:
    """All findings, in the order of the report."""
    yield from _versions()
    yield from _devices()
    yield from _capture()
    yield from _features(verbose)
    yield from _private_names()
    yield _folding()
    yield from _environment()
    yield from _tools()


def _versions() -> Iterator[Finding]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    import fxpasses
    from fxpasses.base.tested_torch import NEWEST, OLDEST, release

    yield Finding("python", "ok", sys.version.split()[0])
    here = release(torch.__version__)
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    if here is not None and here < OLDEST:
        yield Finding("torch", "off", f"{torch.__version__}: fxpasses needs torch >= {oldest}")
    else:
        is_tested = here is None or here <= NEWEST
        untested = "" if is_tested else f" (tested with {oldest} to {newest} alone)"
        yield Finding("torch", "ok" if is_tested else "note", torch.__version__ + untested)
    yield Finding("fxpasses", "ok", fxpasses.__version__)
    for package in ("transformers", "accelerate"):
        try:
            yield Finding(package, "ok", version(package))
        except PackageNotFoundError:
            yield Finding(package, "note", "not installed; needed for Hugging Face models alone")
    with contextlib.suppress(ImportError):
        from accelerate.utils import DynamoBackend

        known = "FASTPACK" in DynamoBackend.__members__
        without = "does not take it: use fxpasses.FastpackCallback"
        yield Finding.of("accelerate", known, 'takes "fastpack" as a backend', without)


def _devices() -> Iterator[Finding]:
    import torch

    if not torch.accelerator.is_available():
        yield Finding("devices", "note", "the CPU alone: host reads cost little here, and the passes save little time")
        return
    kind = torch.accelerator.current_accelerator()
    name = getattr(torch.get_device_module(kind), "get_device_name", lambda index: str(kind))
    names = {name(index) for index in range(torch.accelerator.device_count())}
    yield Finding("devices", "ok", f"{torch.accelerator.device_count()} × {', '.join(sorted(names))}")


def _capture() -> Iterator[Finding]:
    import torch._dynamo

    from fxpasses.dynamo.dynamo_names import DynamoNames, MissingName
    from fxpasses.dynamo.flags import KEEP_CONFIG

    known = "fastpack" in torch._dynamo.list_backends(exclude_tags=())
    without = "torch does not find it: `pip install` fxpasses again"
    yield Finding.of("backend", known, 'torch.compile(backend="fastpack") is known', without)
    state, text = "ok", "`.item()` and `nonzero` are captured in this backend's frames"
    if os.environ.get(KEEP_CONFIG) == "1":
        state, text = "note", f"{KEEP_CONFIG}=1 keeps the process' own: `.item()` breaks graphs unless they are on"
    yield Finding("capture flags", state, text)
    try:
        DynamoNames.find()
        yield Finding("retracing", "ok", "frames that need a value while tracing are traced again with fewer flags")
    except MissingName as missing:
        yield Finding("retracing", "off", f"{missing}: such frames raise GuardOnDataDependentSymNode")
    has_ids = hasattr(torch._guards, "CompileContext")
    yield Finding.of("compile ids", has_ids, "records distinguish recompilations", "torch lacks them")


def _features(verbose: bool) -> Iterator[Finding]:
    """The features of the capture, each a workaround of what Dynamo cannot trace. verbose: whether to say when
    each can go, and which methods it replaces."""
    import torch

    from fxpasses.dynamo.features import Feature
    from fxpasses.dynamo.interceptions import Row, off_in, table

    def place(row: Row) -> str:
        return f"{'.'.join(row.handler.site.name.split('.')[-2:])} ({row.handler.order})"

    rows = table()
    off = off_in(rows)
    for feature in Feature:
        own = [row for row in rows if row.feature is feature]
        if not own:
            continue
        missing = [row.missing for row in own if row.missing]
        others = sorted({version for row in own for version in row.handler.checked})
        is_checked = all(torch.__version__.startswith(row.handler.checked) for row in own)
        text = f"else {feature.effect}"
        if feature in off:
            text = "off: " + "; ".join(missing or [feature.effect])
        elif missing:
            text = "; ".join(missing)
        elif not is_checked:
            text += f" (checked on torch {', '.join(others)} alone)"
        details = [f"can go when {feature.until}", "replaces " + ", ".join(map(place, own))]
        state = "off" if feature in off or missing else "ok" if is_checked else "note"
        yield Finding(feature.title, state, "\n".join([text, *(details if verbose else ())]))


def _private_names() -> Iterator[Finding]:
    """PyTorch's private names that the package uses outside capture."""
    from importlib import import_module

    from fxpasses.inspect import partition

    for subject, module, name, works, without in (
        (
            "bytes saved", partition.MODULE, partition.NAME, "records have the tensors saved for backward",
            "records lack the tensors saved for backward",
        ),
        ("structured trace", "torch._logging", "trace_structured", "tlparse shows our graphs", "it lacks ours"),
        ("offload", "torch._inductor.custom_graph_pass", "CustomPartitionerFn", "works", "fastpack.offload fails"),
    ):  # fmt: skip
        try:
            found = hasattr(import_module(module), name)
        except ImportError:
            found = False
        yield Finding.of(subject, found, works, f"{without}, as this torch has no {module}.{name}")


def _folding() -> Finding:
    import torch

    from fxpasses.fold.outlining import CHECKED, checked_here
    from fxpasses.options import FOLD_LEAST

    least, checked = FOLD_LEAST["auto"], ", ".join(CHECKED)
    if checked_here():
        text = f'with fastpack.fold "auto", equal layers, from {least} on, are compiled once under Inductor'
        return Finding("fold layers", "ok", text)
    text = f'checked on torch {checked} alone: on {torch.__version__}, only fastpack.fold "on" folds'
    return Finding("fold layers", "note", text)


def _environment() -> Iterator[Finding]:
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name, "0") not in ("", "0"):
            yield Finding(name, "off", f"is {os.environ[name]}: nothing is compiled, so no pass runs")
    yield from _default_options()
    for name, effect in (
        ("FXPASSES_PASSES", "only these passes run"),
        ("FXPASSES_GRAPHS", "passes run only on this many graphs"),
        ("FXPASSES_CHANGES", "a pass makes only this many changes"),
        ("FXPASSES_RECORD", "each process writes a record there"),
        ("FXPASSES_SUMMARY", "1 prints a summary when the process ends"),
        ("FXPASSES_QUIET", "1 hides the line that says what is being compiled"),
        ("FXPASSES_RECORD_VALUES", "records hold the elements of small integer inputs"),
        ("TORCH_TRACE", "graphs and reports go into the structured trace"),
    ):
        if os.environ.get(name) is not None:
            yield Finding(name, "note", f"is {os.environ[name]!r}: {effect}")


def _default_options() -> Iterator[Finding]:
    from fxpasses import default_options

    try:
        if given := default_options.from_environment():
            yield Finding(default_options.VARIABLE, "note", f"is {given}: the options of calls that do not give them")
    except ValueError as error:
        yield Finding(default_options.VARIABLE, "off", str(error))


def _tools() -> Iterator[Finding]:
    import torch

    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    without = "none found: Inductor cannot compile for the CPU; install g++, or set fastpack.lowering"
    yield Finding.of("C++ compiler", compiler, compiler or "", without)
    if torch.cuda.is_available():
        yield Finding.of("triton", torch.utils._triton.has_triton(), "works", "Inductor cannot compile for the GPU")
    dot = shutil.which("dot")
    yield Finding("graphviz", "ok" if dot else "note", dot or "not installed; needed for SVG drawings alone")
