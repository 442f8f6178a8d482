"""See what the passes did: record what is compiled, compare the graphs, and show it.

`record()` and `FXPASSES_RECORD` collect; `load` reads a file; `report` shows a record on a terminal, `page` as one HTML
file. docs/inspect.md describes the data model and the command line.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxpasses.inspect.changes import diff
    from fxpasses.inspect.html import page
    from fxpasses.inspect.model import Graph as GraphRecord
    from fxpasses.inspect.recording import Record, Watch, load, record, watch
    from fxpasses.inspect.text import report

__all__ = ["GraphRecord", "Record", "Watch", "diff", "load", "page", "record", "report", "watch"]

# Imported when asked for: the backend needs `watch` alone, and `fxpasses --help` must not wait for torch.
_HOMES = {
    "GraphRecord": ("model", "Graph"),
    "diff": ("changes", "diff"),
    "page": ("html", "page"),
    "report": ("text", "report"),
    **{name: ("recording", name) for name in ("Record", "Watch", "load", "record", "watch")},
}


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _HOMES:
        raise AttributeError(f"module 'fxpasses.inspect' has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"fxpasses.inspect.{module}"), attribute)
