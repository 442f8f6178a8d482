"""Errors of the user: one line each."""

from __future__ import annotations

from pathlib import Path


class Failure(ValueError):
    """An error to show to the user, in one line; the command ends with exit code 2."""


def check_folder(*paths: str | None) -> None:
    """Raise `Failure` if a file's folder does not exist: before a long run, and not after it."""
    for path in paths:
        folder = Path(path).parent if path else Path()
        if not folder.is_dir():
            raise Failure(f"{path}: there is no folder {str(folder)!r}")
