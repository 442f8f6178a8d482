"""Errors of the commands: one line each."""

from __future__ import annotations

from pathlib import Path


class Failure(Exception):
    """An error to show to the user, in one line. code: the exit code."""

    def __init__(self, text: str, code: int = 2) -> None:
        super().__init__(text)
        self.code = code


def check_folder(*paths: str | None) -> None:
    """Raise `Failure` if a file's folder does not exist: before a long run, and not after it."""
    for path in paths:
        folder = Path(path).parent if path else Path()
        if not folder.is_dir():
            raise Failure(f"{path}: there is no folder {str(folder)!r}")
