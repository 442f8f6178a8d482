"""`fxpasses.compile`: `torch.compile` with this backend, whose options are checked at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch

from fxpasses import default_options
from fxpasses.compiler.backend import fastpack_backend
from fxpasses.dynamo import flags, retracing

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
    and Inductor's; keys that it lacks come from `fxpasses.set_default_options` and `FASTPACK_OPTIONS`. A copy of the
    result (`copy.deepcopy`, `pickle`, `torch.save`) is compiled in the same way. Unlike
    `torch.compile(model, backend="fastpack")`, this raises `ValueError` for unknown options or wrong values before the
    first call.
    """
    compiled = torch.compile(
        model, fullgraph=fullgraph, dynamic=dynamic, backend=backend_of(mode, options), disable=disable
    )
    if disable or retracing.is_installed():
        return cast(Model, compiled)
    if isinstance(compiled, torch.nn.Module):
        compiled.forward = _scoped(compiled.forward)
        return cast(Model, compiled)
    return cast(Model, _scoped(compiled))


def backend_of(mode: str | None, options: Mapping[str, Any] | None) -> Callable[..., Any]:
    """The backend with its arguments, for `torch.compile` and `Module.compile`; raises `ValueError` for wrong ones.

    It can be pickled, if the options can.
    """
    default_options.parse(options, mode)
    return functools.partial(fastpack_backend, mode=mode, options=dict(options or {}))


def _scoped(function: Callable[..., Any]) -> Any:
    """For a torch in which traces are not intercepted: the flags are on while the model is called."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with flags.scoped():
            return function(*args, **kwargs)

    return call
