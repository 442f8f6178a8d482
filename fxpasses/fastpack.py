"""The backend as `torch.compile(model, backend="fastpack")` finds it.

Importing this module switches `torch._dynamo.config.capture_scalar_outputs` and `capture_dynamic_output_shape_ops` on
for the process: without them `.item()` and `nonzero` break the graph before any backend sees it, and `torch.compile`
gives a backend no other way to ask for them. With `FXPASSES_KEEP_DYNAMO_CONFIG=1` in the environment it does not, and
only graphs that were captured whole anyway are improved. `fxpasses.compile` needs no switch.
"""

from fxpasses.backend import fastpack_backend
from fxpasses.capture import flags

__all__ = ["fastpack_backend"]

flags.enable_for_process()
