"""Records for the commands: a file, or all of a folder."""

from __future__ import annotations

from pathlib import Path

from fxpasses.inspect import Record, load
from fxpasses.inspect.cli.main import Failure


def load_all(path: str) -> list[Record]:
    """The record in a file, or those in a folder, by rank."""
    folder = Path(path)
    if not folder.is_dir():
        return [load(path)]
    files = sorted(folder.glob("*.jsonl"))
    if not files:
        raise Failure(f"{path}: holds no record (*.jsonl)")
    return sorted((load(file) for file in files), key=lambda record: (record.rank or 0, record.pid))


def load_one(path: str) -> Record:
    """One record; of a folder that holds several, those of the first rank."""
    return load_all(path)[0]
