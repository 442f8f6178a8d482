"""`fxpasses.compile`: `torch.compile` with this backend, with the capture flags on during this model's calls alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from fxpasses.backend import fastpack_backend
from fxpasses.capture import flags

Model = TypeVar("Model", bound=Callable[..., Any])


def compile(
    model: Model,
    *,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    disable: bool = False,
) -> Model:
    """Compile a module or function with the passes of fxpasses.

    The arguments are those of `torch.compile`; `options` takes the keys `fastpack.*` (see `fxpasses.options.Options`)
    and Inductor's. Unlike `torch.compile(model, backend="fastpack")`, this changes no setting of Dynamo for the rest of
    the process. Raises `ValueError` for unknown options or wrong values, before the first call.
    """
    from fxpasses.options import Options

    Options.parse(options, mode)
    compiled = torch.compile(
        model,
        fullgraph=fullgraph,
        dynamic=dynamic,
        backend=functools.partial(fastpack_backend, mode=mode, options=dict(options or {})),
        disable=disable,
    )
    if disable:
        return cast(Model, compiled)
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = _scoped(compiled.forward)
        return cast(Model, compiled)
    return cast(Model, _scoped(compiled))


def _scoped(function: Callable[..., Any]) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with flags.scoped():
            return function(*args, **kwargs)

    return call
