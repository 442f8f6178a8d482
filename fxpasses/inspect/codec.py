"""Records as JSON Lines: the run on the first line, one compiled graph on each further line.

With one graph per line, writing is incremental: a program that is killed leaves a readable file. Reading treats the
file as data: it executes nothing, checks every field, and ignores fields that a newer writer of this version added.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import re
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fxpasses.inspect import model
from fxpasses.inspect.failure import Failure
from fxpasses.inspect.model import SCHEMA, VERSION, Graph, Run


class RecordError(Failure):
    """A file that is not a record, or that this version cannot read. The message is one line for a person."""


@dataclasses.dataclass(frozen=True)
class OtherReason:
    """A reason of another version of fxpasses, with the attributes of members of `Reason` and `Obstruction`."""

    name: str
    value: str


def header(run: Run) -> str:
    """The first line of a record."""
    fields = {key: value for key, value in to_json(run).items() if key != "graphs"}
    return dumps({"schema": SCHEMA, "version": VERSION, **fields})


def graph_line(graph: Graph) -> str:
    return dumps(to_json(graph))


def dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def write(run: Run, path: str | Path) -> None:
    """Write a whole record; an existing file is replaced once the record is complete."""
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.writelines(f"{line}\n" for line in (header(run), *map(graph_line, run.graphs)))
    partial.replace(path)


def read(path: str | Path) -> Run:
    """Read a record; raises `RecordError`. A last line that a crash cut off is ignored."""
    try:
        with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:  # a crash may cut a letter
            return parse(lines, str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from error


def parse(lines: Iterable[str], name: str = "record") -> Run:
    """A record from its lines, read one by one: only one graph's JSON is in memory at a time."""
    run: Run | None = None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found = json.loads(_harmless(line), parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            if run is not None and not line.endswith("\n"):  # the writer was interrupted
                break
            raise RecordError(f"{name}:{number}: is not JSON: {error}") from error
        if run is None:
            run = _run(found, name)
        else:
            run.graphs.append(_graph(found, f"{name}:{number}"))
    return run if run is not None else _run(None, name)


def _run(found: Any, name: str) -> Run:
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise RecordError(f'{name}: is not a record of fxpasses (its first line lacks "schema": "{SCHEMA}")')
    if found.get("version") != VERSION:
        raise RecordError(f"{name}: has version {found.get('version')!r}, and this fxpasses reads {VERSION}")
    fields = {key: value for key, value in found.items() if key not in ("schema", "version")}
    run: Run = _value(Run, fields, f"{name}:1")
    return run


def _graph(found: Any, where: str) -> Graph:
    graph: Graph = _value(Graph, found, where)
    try:
        _check_references(graph, where)
    except RecordError:
        raise
    except (TypeError, ValueError, RecursionError, AttributeError) as error:
        raise RecordError(f"{where}: an argument of a node is malformed") from error
    return graph


def to_json(value: Any) -> Any:
    """A value of the model as JSON values, without fields that have their default."""
    if isinstance(value, (enum.Enum, OtherReason)):
        return {"name": value.name, "value": value.value}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: to_json(given)
            for name, _, default in _fields(type(value))
            if (given := getattr(value, name)) is not None and given != default
        }
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


@functools.cache
def _fields(cls: type) -> list[tuple[str, Any, Any]]:
    """Name, type and default of each field; the default is `dataclasses.MISSING` if the field is required."""
    hints = typing.get_type_hints(cls)
    return [
        (f.name, hints[f.name], f.default if f.default_factory is dataclasses.MISSING else f.default_factory())
        for f in dataclasses.fields(cls)
    ]


_CONTROLS = re.compile("[\x7f-\x9f]")
_ESCAPE = re.compile(r"\\(u00(?:0[0-8b-f]|1[0-9a-f]|7f|[89][0-9a-f])|.)", re.IGNORECASE)


def _harmless(line: str) -> str:
    """JSON without control characters other than tab and newline, which could control the terminal that shows it."""
    line = _CONTROLS.sub("\ufffd", line)
    return _ESCAPE.sub(lambda m: "\\ufffd" if len(m[1]) > 1 or m[1] in "bfr" else m[0], line) if "\\" in line else line


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not a JSON number")


def _value(hint: Any, given: Any, where: str) -> Any:
    """`given` as the type that the model declares; raises a `RecordError` with its place if it is of another type."""
    if hint is Any:
        return given
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _reason(hint, given, where)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type, hint), given, where)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is list:
        return [_value(arguments[0], item, where) for item in _expect(list, given, where)]
    if origin is dict:
        return {key: _value(arguments[1], item, where) for key, item in _expect(dict, given, where).items()}
    if origin in (types.UnionType, typing.Union):
        if given is None and type(None) in arguments:
            return None
        wanted = [a for a in arguments if a is not type(None)]
        if len(wanted) == 1:
            return _value(wanted[0], given, where)
        return _expect(tuple(wanted), given, where)
    return _expect((int, float) if hint is float else hint, given, where)


def _object(cls: type, given: Any, where: str) -> Any:
    _expect(dict, given, where)
    fields = {}
    for name, hint, default in _fields(cls):
        if name in given:
            fields[name] = _value(hint, given[name], f"{where}: {name}")
        elif default is dataclasses.MISSING and type(None) in typing.get_args(hint):
            fields[name] = None
        elif default is dataclasses.MISSING:
            raise RecordError(f"{where}: {cls.__name__.lower()} lacks {name!r}")
    return cls(**fields)


def _expect(kind: Any, given: Any, where: str) -> Any:
    if not isinstance(given, kind) or (isinstance(given, bool) and kind not in (bool, object)):
        names = " or ".join(k.__name__ for k in kind) if isinstance(kind, tuple) else kind.__name__
        raise RecordError(f"{where}: {str(given)[:40]!r} is not of type {names}")
    return given


def _reason(kind: type[enum.Enum], given: Any, where: str) -> Any:
    _expect(dict, given, where)
    name, value = (str(given.get(key, "")) for key in ("name", "value"))
    known = kind.__members__.get(name)
    return known if known is not None and known.value == value else OtherReason(name, value)


def _check_references(graph: Graph, where: str) -> None:
    """Check that names are unique in every stage and refer to nodes that exist; readers of a record rely on this."""
    if not graph.stages or graph.stages[0].regions is None:
        raise RecordError(f"{where}: the first stage has no graph")
    for stage in graph.stages:
        regions = {region.path: region for region in stage.regions or ()}
        if stage.regions is None:
            continue
        if len(regions) != len(stage.regions) or model.MAIN not in regions:
            raise RecordError(f"{where}: stage {stage.name!r} has two regions of one path, or no {model.MAIN!r}")
        for region in stage.regions:
            names: set[str] = set()
            for node in region.nodes:
                missing = next((name for name in model.inputs_of(node) if name not in names), None)
                if missing is not None:
                    raise RecordError(f"{where}: {node.name!r} takes {missing!r}, which does not precede it")
                if node.name in names:
                    raise RecordError(f"{where}: two nodes of {region.path!r} are called {node.name!r}")
                names.add(node.name)
            parent = regions.get(region.parent)
            if region.call and (parent is None or all(node.name != region.call for node in parent.nodes)):
                raise RecordError(f"{where}: {region.path!r} is run by {region.call!r}, which is missing")
