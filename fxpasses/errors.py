"""The errors that a user of fxpasses may see."""

from __future__ import annotations


class MetadataError(RuntimeError):
    """A batch breaks an assertion that the model makes of its metadata, such as `sum(lengths) == tokens`."""


class AssumptionError(MetadataError):
    """A batch breaks what a compiled graph assumes of it, and this torch lacks what compiling another one takes."""


class PassError(RuntimeError):
    """A pass failed, or its result differs from the graph it was given. Raised with `fastpack.strict` alone."""


class OffloadError(RuntimeError):
    """An activation that was moved away does not come back: the file system that holds it fails."""
