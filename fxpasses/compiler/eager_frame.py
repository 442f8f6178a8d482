"""Runs in eager mode the program of the frame whose compiled code is running.

    def forward(x, lengths):             Dynamo has replaced the code: it calls the graph, which calls this module
        longest = lengths.max().item()
        y = all_reduce(x)
        assert longest <= 512            Dynamo puts the assertion right after the number that it is about

A graph does not show where its program would raise. The program itself does: Dynamo's code calls the graph before it
does anything else, so the frame still has its original arguments, and can start again.

Checked on torch 2.13: the code that Dynamo makes has the file, line, name, arguments and free variables of the
frame's own.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from types import CellType, CodeType, FrameType, FunctionType
from typing import Any


def eager_frame(code: CodeType | None) -> Callable[[], Any] | None:
    """A callable that reruns in eager mode the innermost frame that runs Dynamo's code for `code`; None if none does.

    Its result is lost, because the frame goes on with the graph's result; so are its assignments to variables of an
    enclosing function. It is meant for a program that raises.
    """
    frame: FrameType | None = sys._getframe(1)
    while code is not None and frame is not None:
        if frame.f_code is not code and _identity(frame.f_code) == _identity(code):
            return _called_as_before(code, frame.f_locals, frame.f_globals)
        frame = frame.f_back
    return None


def _identity(code: CodeType) -> tuple[Any, ...]:
    return code.co_filename, code.co_firstlineno, code.co_name, inspect.getargs(code), code.co_freevars


def _called_as_before(code: CodeType, variables: Mapping[str, Any], module: dict[str, Any]) -> Callable[[], Any] | None:
    """A function of `code` with the arguments in `variables`; None if one of them is gone."""
    names = inspect.getargs(code)
    if not variables.keys() >= {*names.args, *filter(None, (names.varargs, names.varkw))}:
        return None
    cells = tuple(CellType(variables[name]) if name in variables else CellType() for name in code.co_freevars)
    positional = [variables[name] for name in names.args[: code.co_argcount]]
    keywords = {name: variables[name] for name in names.args[code.co_argcount :]}
    if names.varargs is not None:
        positional += variables[names.varargs]
    if names.varkw is not None:
        keywords |= variables[names.varkw]
    return functools.partial(FunctionType(code, module, closure=cells), *positional, **keywords)
