"""What compiles the rewritten graph: Inductor, AOTAutograd alone, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.compiler.config
from torch.fx import GraphModule

from fxpasses import __version__
from fxpasses.options import Options

Compiled = Callable[..., Any]


def lower(gm: GraphModule, example_inputs: Sequence[Any], options: Options, salt: str) -> Compiled:
    """Compile `gm`. `salt` tells programs apart that have the same graph but differ in what is known of its inputs."""
    if options.lowering == "eager":
        return gm
    if options.lowering == "aot_eager":
        return torch._dynamo.lookup_backend("aot_eager")(gm, list(example_inputs))
    return _inductor(gm, example_inputs, options, salt)


def _inductor(gm: GraphModule, example_inputs: Sequence[Any], options: Options, salt: str) -> Compiled:
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    patches: dict[str, Any] = dict(list_mode_options(options.mode)) if options.mode else {}
    patches |= dict(options.inductor)
    config: Any = torch.compiler.config
    # PyTorch's caches do not look into our operators, whose gradients may change with the version.
    tag = ":".join([config.cache_key_tag, "fxpasses", __version__, salt])
    compile_graph: Any = compile_fx
    with config.patch(cache_key_tag=tag):
        return compile_graph(gm, list(example_inputs), config_patches=patches or None)
