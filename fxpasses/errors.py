"""The errors that fxpasses may raise in a user's program."""

from __future__ import annotations


class MetadataError(RuntimeError):
    """A batch breaks one of the model's assertions on its metadata, such as `sum(lengths) == tokens`."""


class AssumptionError(MetadataError):
    """A batch breaks an assumption of a compiled graph, and this torch cannot compile another variant."""


class PassError(RuntimeError):
    """A pass failed, or its result differs from its input. Raised only with `fastpack.strict`."""


class MemoryBudgetError(RuntimeError):
    """A training step is predicted to need more memory than `fastpack.memory` gives, however much is recomputed."""


class RecordingError(RuntimeError):
    """A CUDA graph is recorded around a model that needs its batch on the host, which replays would not run."""


class OffloadError(RuntimeError):
    """An activation that was moved away does not come back: its file system failed, or its handle was replaced."""
