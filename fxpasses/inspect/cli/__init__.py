"""The command `fxpasses`: shows what passes do to a program, compares, explains, and finds a pass that breaks it."""

from fxpasses.inspect.cli.main import main

__all__ = ["main"]
