"""Graph passes that remove the glue from a language model's training step: a `torch.compile` backend.

    torch.compile(model, backend="fastpack")

Public names: `fastpack_backend` (importing it enables two capture flags of Dynamo, see `fxpasses.fastpack`), `compile`
(which changes no flag), `set_default_options`, `FastpackCallback` (which needs transformers), `inductor_options`,
`prefetch`, `save_caches`, `load_caches`, `attention_stats`, `offload_stats`, `row_stats`, `skip_idle_experts`,
`inspect` and the errors.
"""

from typing import TYPE_CHECKING, Any

from fxpasses.errors import AssumptionError, MemoryBudgetError, MetadataError, OffloadError, PassError, RecordingError
from fxpasses.integrations.autoload import autoload
from fxpasses.version import __version__

if TYPE_CHECKING:
    from fxpasses import inspect
    from fxpasses.attention.runtime.stats import attention_stats
    from fxpasses.compiler.cache_files import load_caches, save_caches
    from fxpasses.compiling import compile
    from fxpasses.default_options import set_default_options
    from fxpasses.experts.runtime.idle_experts import skip_idle_experts
    from fxpasses.fastpack import fastpack_backend
    from fxpasses.integrations.inductor_hooks import inductor_options
    from fxpasses.integrations.trainer import FastpackCallback
    from fxpasses.metadata.runtime.prefetching import prefetch
    from fxpasses.offload.runtime.stats import offload_stats
    from fxpasses.rows.row_stats import row_stats

__all__ = [
    "AssumptionError",
    "FastpackCallback",
    "MemoryBudgetError",
    "MetadataError",
    "OffloadError",
    "PassError",
    "RecordingError",
    "__version__",
    "attention_stats",
    "compile",
    "fastpack_backend",
    "inductor_options",
    "inspect",
    "load_caches",
    "offload_stats",
    "prefetch",
    "row_stats",
    "save_caches",
    "set_default_options",
    "skip_idle_experts",
]

_HOMES = {
    "FastpackCallback": "fxpasses.integrations.trainer",
    "attention_stats": "fxpasses.attention.runtime.stats",
    "compile": "fxpasses.compiling",
    "fastpack_backend": "fxpasses.fastpack",
    "inductor_options": "fxpasses.integrations.inductor_hooks",
    "load_caches": "fxpasses.compiler.cache_files",
    "offload_stats": "fxpasses.offload.runtime.stats",
    "prefetch": "fxpasses.metadata.runtime.prefetching",
    "row_stats": "fxpasses.rows.row_stats",
    "save_caches": "fxpasses.compiler.cache_files",
    "set_default_options": "fxpasses.default_options",
    "skip_idle_experts": "fxpasses.experts.runtime.idle_experts",
}


autoload()  # again, in case PyTorch's own loading of entry points is off


def __getattr__(name: str) -> Any:
    """Import a public name on first use: some imports have effects, and Dynamo is slow to import."""
    import importlib

    if name == "inspect":
        return importlib.import_module("fxpasses.inspect")
    if name not in _HOMES:
        raise AttributeError(f"module 'fxpasses' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
