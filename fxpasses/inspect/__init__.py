"""Shows what the passes did: records compilations, compares the graphs, and reports the differences.

`record()` and `FXPASSES_RECORD` collect records; `load` reads a file; `report` shows a record on a terminal, `page` as
one HTML file. docs/inspect.md describes the data model and the command line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpasses.inspect.end_of_run import start_if_asked as start_summary_if_asked
    from fxpasses.inspect.html import page
    from fxpasses.inspect.recording import Record, load, observe, record
    from fxpasses.inspect.text import report

__all__ = ["Record", "load", "observe", "page", "record", "report", "start_summary_if_asked"]

# Imported on first use: the backend needs `observe` alone, and `fxpasses --help` must not wait for torch.
_HOMES = {
    "page": ("html", "page"),
    "report": ("text", "report"),
    "start_summary_if_asked": ("end_of_run", "start_if_asked"),
    **{name: ("recording", name) for name in ("Record", "load", "observe", "record")},
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'fxpasses.inspect' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"fxpasses.inspect.{module}"), attribute)
