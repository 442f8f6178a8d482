"""What of the values that a partition saves may move, and the seconds that copies and recomputation take."""

from __future__ import annotations

import torch

from fxpasses.fold.outlining import Place
from fxpasses.memory.joint import Values
from fxpasses.memory.recompute import recomputed_nodes
from fxpasses.offload.candidates import candidates_of, limits_of, step_of
from fxpasses.offload.choose import Model, admitted, within
from fxpasses.offload.runtime.calibration import rates
from fxpasses.offload.saved import Partition, groups
from fxpasses.options import Offload


class Movable:
    """The values of a partition that may move within the user's limits, and what it takes in one call.

    free: those that may move, those first that should rather than others. required: those that move in any case, for
    `device_budget`. recomputing: seconds of what backward computes again. replayed: see `OffloadActivations`.
    """

    def __init__(self, partition: Partition, options: Offload, place: Place, replayed: bool) -> None:
        found, _ = groups(partition, options.tier, replayed)
        known = [(c, g) for c, g in zip(candidates_of(found, partition), found, strict=True) if c is not None]
        candidates = [candidate for candidate, _ in known]
        limits = limits_of(options, place)
        measured = rates(options.tier, options.directory, _device(partition))
        step = step_of(partition, found, measured)
        model = Model(step, limits.buffers, candidates)
        self._saved = {candidate: [node.name for node in group.saved] for candidate, group in known}
        self._model, self._taken = model, measured.taken
        self.free, _ = admitted(candidates, limits)
        if limits.host_budget is not None:  # all calls' values are there together
            self.free, _ = within(self.free, limits.host_budget // max(1, place.calls))
        budget = limits.device_budget
        self.required: Values = frozenset() if budget is None else frozenset(model.cheapest(self.free, budget))
        again = set(recomputed_nodes(partition.forward, partition.backward))
        later = zip(partition.backward.graph.nodes, step.seconds[step.forward :], strict=True)
        self.recomputing = sum(seconds for node, seconds in later if node in again)

    def exposed(self, moved: Values) -> float:
        """The seconds by which copies delay a call, in forward and backward: it waits for them, or they need a core."""
        waits = self._model.exposed(sorted(moved, key=lambda candidate: candidate.name))
        return max(waits, self._taken * sum(candidate.bytes for candidate in moved))

    def names(self, moved: Values) -> frozenset[str]:
        """The saved tensors in the memory of these values."""
        return frozenset(name for candidate in moved for name in self._saved[candidate])


def _device(partition: Partition) -> torch.device:
    values = [node.meta.get("val") for node in partition.forward.graph.find_nodes(op="placeholder")]
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))
