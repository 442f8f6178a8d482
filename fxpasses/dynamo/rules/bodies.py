"""The body of a checkpoint that Dynamo is tracing, and the values that such bodies store outside of themselves.

Private names, checked on torch 2.11, 2.13 and 2.15: the `description` and the `parent` of a tracer of Dynamo's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch.fx import GraphModule

from fxpasses.dynamo.failures import FeatureRejected
from fxpasses.dynamo.features import Feature
from fxpasses.dynamo.whole_program import is_part_of_frame
from fxpasses.graph.aliases import is_written
from fxpasses.graph.regions import CHECKPOINT

if TYPE_CHECKING:
    from fxpasses.dynamo.trace import Trace

ALL: Any = object()
_CHECKPOINT = "torch.utils.checkpoint.checkpoint"


StorePlace = tuple[Any, Any]


def is_in_checkpoint(tx: Any) -> bool:
    """Whether the innermost body that is being traced, including its calls, is a checkpoint's."""
    return _is_of_checkpoint(tx.output.current_tracer)


def outer_body(tx: Any) -> Any:
    """The tracer of the checkpoint's body that is being traced; None outside, and in a nested body."""
    tracer = tx.output.current_tracer
    return tracer if _is_of_checkpoint(tracer) and tracer.parent.parent is None else None


def is_in_another_body(tx: Any) -> bool:
    """Whether the traced code is in the body of a higher-order operator that is not a checkpoint."""
    tracer = tx.output.current_tracer
    while _is_of_checkpoint(tracer):
        tracer = tracer.parent
    return tracer.parent is not None


def _is_of_checkpoint(tracer: Any) -> bool:
    return getattr(tracer, "description", None) == _CHECKPOINT and tracer.parent is not None


class Ledger:
    """The stores of checkpoints' bodies outside of themselves, in a dict or on an object, and their reads there.

    A store is identified by its place: a dict or an object, and a key or a name. ALL stands for every key, as a length
    or an iteration reads. conflicts: why a store that was allowed would be visible after all.
    """

    feature: Feature

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.conflicts: list[str] = []
        self._by: dict[StorePlace, Any] = {}  # the body that stored there
        self._read: set[StorePlace] = set()
        self._tensors: list[Any] = []  # the stored tensors, as fake tensors

    def read(self, place: StorePlace, body: Any) -> None:
        """body: None for the frame, outside of checkpoints."""
        if self._by.get(place, self) is not body:
            self._read.add(place)

    def is_read(self, place: StorePlace) -> bool:
        return bool({place, (place[0], ALL)} & self._read)

    def record(self, place: StorePlace, parts: Iterable[Any], body: Any) -> None:
        """Record an allowed store. parts: the value's parts (`parts_of`)."""
        self._by[place] = body
        self._tensors += [part.as_proxy().node.meta["example_value"] for part in parts if part.is_tensor()]

    def conflict(self, gm: GraphModule) -> str:
        """Why an allowed store would be visible in the complete graph; "" if it would not."""
        if is_written(gm, self._tensors):
            return "a tensor that a checkpoint stored is written to"
        return next(iter(self.conflicts), "")

    def check(self, gm: GraphModule | None) -> None:
        """Raise `FeatureRejected` if a store would be visible. gm: the graph, once it is complete."""
        if self._by and (found := self._conflict_of_frame(gm)):
            raise FeatureRejected(self.feature, found)

    def _conflict_of_frame(self, gm: GraphModule | None) -> str:
        if gm is None:
            return next(iter(self.conflicts), "")
        calls = gm.graph.find_nodes(op="call_function", target=CHECKPOINT)
        if any(call.kwargs.get("preserve_rng_state") is False for call in calls):
            return "a recomputation draws other random numbers"
        if self.trace.graph is None or is_part_of_frame(self.trace.graph.output):
            return "the graph breaks in the frame"
        return self.conflict(gm)
