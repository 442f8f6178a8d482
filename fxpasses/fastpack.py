"""The entry point of `torch.compile(model, backend="fastpack")`.

Without Dynamo's two capture flags, `.item()` and `nonzero` break the graph before any backend sees it. The flags are on
while a frame is traced for this backend (`dynamo/flags.py`), and importing this module changes nothing for the process.
Only in a torch in which no trace can be intercepted does it switch them on; a warning says so.

A wrong `FASTPACK_OPTIONS` is a `ValueError` here, in `torch.compile`, and not in the model's first call.
"""

from fxpasses import default_options
from fxpasses.compiler.backend import fastpack_backend
from fxpasses.dynamo import flags, retracing

__all__ = ["fastpack_backend"]

default_options.from_environment()
if not retracing.is_installed():
    flags.enable_for_process()
