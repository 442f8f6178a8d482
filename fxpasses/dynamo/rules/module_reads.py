"""What a method reads of its module, by its source: whether its results depend on constants of the module alone.

    def get_rope_index(self, input_ids, image_grid_thw=None, ...):
        spatial_merge_size = self.config.vision_config.spatial_merge_size     # ("config", "vision_config", ...)
        ...
            vision_position_ids = self.get_vision_position_ids(...)           # a method, whose source is read as well

A method that does anything else with `self` (it passes it on, writes to it, reads a list or a tensor) is not known.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from torch.nn import Module

Path = tuple[str, ...]  # names of attributes, from the module on

_CONSTANTS = (bool, int, float, str, type(None))
_REACHES_MORE = frozenset({"super", "locals", "globals", "eval", "exec", "vars", "__class__"})


def constants_read(function: Callable[..., Any], module: Module) -> dict[Path, Any] | None:
    """The constants that a method of `module` reads, by attribute, and the names of the methods that it calls.

    None if it may read anything else of the module, or if its source is not known.
    """
    found: dict[Path, Any] = {}
    seen: set[Any] = set()
    waiting = [function]
    while waiting:
        called = waiting.pop()
        paths = _paths(called) if called not in seen else []
        if paths is None:
            return None
        seen.add(called)
        for path in paths:
            try:
                value = _value(module, path)
            except AttributeError:
                return None
            if inspect.ismethod(value) and value.__self__ is module:
                waiting.append(value.__func__)
                value = value.__qualname__
            elif not isinstance(value, _CONSTANTS):
                return None
            found[path] = value
    return found


def _value(module: Module, path: Path) -> Any:
    value: Any = module
    for name in path:
        value = getattr(value, name)
    return value


def _paths(function: Callable[..., Any]) -> list[Path] | None:
    """The attributes of its first argument that a function reads; None if it does anything else with it."""
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__") or function.__closure__:
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        (own, *_) = inspect.signature(function).parameters
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    read = list(_attributes(tree, own))
    is_all = len([node for node in names if node.id == own]) == len(read)
    reaches_more = _REACHES_MORE & {node.id for node in names}
    return [path for path in read if path is not None] if is_all and not reaches_more and None not in read else None


def _attributes(tree: ast.AST, own: str) -> Iterator[Path | None]:
    """The path of each `own.a.b`, the longest that is written there; None if it is written to, or is Python's own."""
    for node in ast.iter_child_nodes(tree):
        path, inner = [], node
        is_read = not isinstance(node, ast.Attribute) or isinstance(node.ctx, ast.Load)
        while isinstance(inner, ast.Attribute):
            path.append(inner.attr)
            inner = inner.value
        if path and isinstance(inner, ast.Name) and inner.id == own:
            yield tuple(reversed(path)) if is_read and not any(name.startswith("__") for name in path) else None
        else:
            yield from _attributes(node, own)
