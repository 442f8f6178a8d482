"""The ways to compile a model that the cases compare. Each is called in a process of its own, so flags may stay set.

`fxpasses.compiler.backend` adds to Dynamo when it is imported, so only the contenders of ours import it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from bench.case import Contender, Parameters, Program

Compiler = Callable[[Any], Any]
Build = Callable[[Compiler, Parameters, str], Program]


def eager(model: Any) -> Any:
    return model


def inductor(model: Any) -> Any:
    return torch.compile(model)


def inductor_with_flags(model: Any, mode: str | None = None) -> Any:
    """With `.item()` and `nonzero` in the graph, as stock PyTorch can capture them."""
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    return torch.compile(model, mode=mode)


def fastpack(model: Any, **options: Any) -> Any:
    given = {f"fastpack.{name.replace('__', '.')}": value for name, value in options.items()}
    return torch.compile(model, backend="fastpack", options=given)


def missing_option(options: dict[str, Any], parameters: Parameters, device: str) -> str:
    from fxpasses.options import Options

    try:
        Options.parse({f"fastpack.{name.replace('__', '.')}": value for name, value in options.items()})
    except ValueError as error:
        return f"this version has no such option: {error}"
    return ""


def contender(name: str, build: Build, compiler: Compiler, **more: Any) -> Contender:
    return Contender(name, functools.partial(build, compiler), compiles=compiler is not eager, **more)


def ours(name: str, build: Build, **options: Any) -> Contender:
    """With options `fastpack.NAME`; unavailable in a version that does not know them. Write `a__b` for `a.b`."""
    missing = functools.partial(missing_option, options)
    compiler = functools.partial(fastpack, **options)
    return contender(name, build, compiler, ours=True, unavailable=missing)


EAGER, STOCK, STOCK_FLAGS, OURS = "eager", "Inductor", "Inductor, both flags", "fastpack"


def usual(build: Build) -> list[Contender]:
    """Eager, stock Inductor, stock Inductor with both capture flags, ours."""
    return [
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor),
        contender(STOCK_FLAGS, build, inductor_with_flags),
        ours(OURS, build),
    ]


LIGER = "Liger kernel"


def needs_liger(parameters: Parameters, device: str) -> str:
    if importlib.util.find_spec("liger_kernel") is None:
        return "liger_kernel is not installed"
    return "" if device == "cuda" else "its kernels need a device"
