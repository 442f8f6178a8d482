"""The command `fxpasses`: see what the passes do to a program, compare, explain, and find the pass that breaks it."""

from fxpasses.inspect.cli.main import main

__all__ = ["main"]
