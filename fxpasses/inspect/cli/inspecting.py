"""`fxpasses inspect`: runs a program under a record, or reads existing records, and shows them."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from fxpasses.inspect.failure import Failure, check_folder

if TYPE_CHECKING:
    from fxpasses.inspect import Record

NAME = "inspect"
HELP = "run a program and show what the passes did to its graphs"
EPILOG = """\
examples:
  fxpasses inspect train.py --steps 3          arguments after the script go to the script
  fxpasses inspect -m package.train --steps 3
  fxpasses inspect --html report.html --save run.jsonl train.py
  fxpasses inspect run.jsonl                   a record, or a folder of records, instead of a script

exit codes: the script's own if it is not 0; else 0; 2 wrong arguments; 3 this backend compiled no graph.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--html", metavar="FILE", help="write a page that works without a network")
    parser.add_argument("--save", metavar="FILE", help="write the record, for diff and explain")
    parser.add_argument("--all", action="store_true", help="print the whole report")
    parser.add_argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module")
    parser.add_argument("script", metavar="SCRIPT", help="a Python file, a record, or a folder of records")
    parser.add_argument("arguments", metavar="ARGS", nargs=argparse.REMAINDER, help="arguments of the script")


def run(given: argparse.Namespace) -> int:
    from fxpasses.inspect.cli.records import load_all

    check_folder(given.save, given.html)
    path = Path(given.script)
    if not given.module and (path.is_dir() or path.suffix in (".jsonl", ".json")):
        if given.arguments:
            raise Failure(f"{' '.join(given.arguments)}: options stand before the record, as in --html FILE RECORD")
        code, records = 0, load_all(given.script)
    else:
        code, record = _run_script(given)
        records = [record]
    for record in records:
        _show(record, given, len(records))
    graphs = sum(len(record.graphs) for record in records)
    return code or (0 if graphs else 3)


def _run_script(given: argparse.Namespace) -> tuple[int, Record]:
    """The exit code and the record of a program that runs in this process, as `python SCRIPT ARGS` would run it."""
    from fxpasses import inspect

    sys.argv = [given.script, *given.arguments]
    sys.path[0] = os.getcwd() if given.module else str(Path(given.script).resolve().parent)
    with inspect.record(measure=True) as record:
        record.program = " ".join(sys.argv)
        try:
            _check_is_there(given.script, given.module)  # may import the package that the module is in
            if given.module:
                runpy.run_module(given.script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(given.script, run_name="__main__")
            code = 0
        except SystemExit as stop:
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        except KeyboardInterrupt:
            code = 130
        except Failure:
            raise
        except Exception:  # of the user's program: show its traceback, and the report as well
            traceback.print_exc()
            code = 1
    return code, record


def _check_is_there(script: str, module: bool) -> None:
    if not module:
        if not Path(script).is_file():
            raise Failure(f"{script}: there is no such file")
        return
    try:
        found = importlib.util.find_spec(script)
        if found is not None and found.submodule_search_locations is not None:  # a package runs its __main__
            script += ".__main__"
            found = importlib.util.find_spec(script)
    except ModuleNotFoundError as error:
        if not error.name or not f"{script}.".startswith(f"{error.name}."):
            raise  # the module exists, but not what it imports
        found = None
    if found is None:
        raise Failure(f"{script}: there is no such module; the current folder and the installed packages were searched")


def _show(record: Record, given: argparse.Namespace, count: int) -> None:
    from fxpasses.inspect.text import Style, report

    print(report(record, Style.of(sys.stdout, given.all)))
    if given.save:
        record.save(_numbered(given.save, record, count))
    if given.html:
        from fxpasses.inspect.html import page

        target = Path(_numbered(given.html, record, count))
        target.write_text(page(record), encoding="utf-8")
        print(f"wrote {target}", file=sys.stderr)


def _numbered(path: str, record: Record, count: int) -> str:
    """The file of one record: `report-rank1.html` if there are several."""
    if count == 1:
        return path
    own = f"rank{record.rank}" if record.rank is not None else str(record.pid)
    return str(Path(path).with_stem(f"{Path(path).stem}-{own}"))
