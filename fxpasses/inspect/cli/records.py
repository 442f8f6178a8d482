"""Loads records for the commands: one file, or all files of a folder."""

from __future__ import annotations

import sys
from pathlib import Path

from fxpasses.inspect import Record, load
from fxpasses.inspect.codec import RecordError
from fxpasses.inspect.failure import Failure


def load_all(path: str) -> list[Record]:
    """The record in a file, or those in a folder, by rank."""
    folder = Path(path)
    if not folder.is_dir():
        return [load(path)]
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise Failure(f"{path}: holds no record (*.jsonl)")
    found = []
    for file in files:
        try:
            found.append(load(file))
        except RecordError as error:  # a process that was killed early must not hide the others
            print(f"fxpasses: left out: {' '.join(str(error).split())}", file=sys.stderr)
    if not found:
        raise Failure(f"{path}: holds no record that can be read")
    return sorted(found, key=lambda record: (record.rank or 0, record.pid))


def load_one(path: str) -> Record:
    """One record; the first rank's if a folder holds several."""
    return load_all(path)[0]
