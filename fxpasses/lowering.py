"""What compiles the rewritten graph: Inductor, AOTAutograd alone, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.options import Options

Compiled = Callable[..., Any]


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None, salt: str) -> Compiled:
    """Compile `gm`. `salt` tells programs apart that have the same graph but differ in what is known of its inputs."""
    if options.lowering == "eager":
        return gm
    if options.lowering == "aot_eager":
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(example_inputs))
    return _inductor(gm, example_inputs, options, mode, salt)


def _inductor(gm: GraphModule, example_inputs: Sequence[Any], options: Options, mode: str | None, salt: str) -> Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches = dict(list_mode_options(mode)) if mode else {}
    patches |= dict(options.inductor)
    if not salt:
        return compile_fx(gm, list(example_inputs), config_patches=patches or None)
    tag = torch.compiler.config.cache_key_tag
    with torch.compiler.config.patch(cache_key_tag=f"{tag}:{salt}" if tag else salt):
        return compile_fx(gm, list(example_inputs), config_patches=patches or None)
