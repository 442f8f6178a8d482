"""The entry point of `torch.compile(model, backend="fastpack")`.

Importing this module enables `torch._dynamo.config.capture_scalar_outputs` and `capture_dynamic_output_shape_ops` for
the process: without them `.item()` and `nonzero` break the graph before any backend sees it, and a backend has no other
way to request them. With `FXPASSES_KEEP_DYNAMO_CONFIG=1` in the environment the flags stay as they are, and passes
improve only graphs that Dynamo captures whole anyway. `fxpasses.compile` does not change them for the process.

A wrong `FASTPACK_OPTIONS` is a `ValueError` here, in `torch.compile`, and not in the model's first call.
"""

from fxpasses import default_options
from fxpasses.backend import fastpack_backend
from fxpasses.capture import flags

__all__ = ["fastpack_backend"]

default_options.from_environment()
flags.enable_for_process()
