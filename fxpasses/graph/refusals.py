"""The exception by which a pass leaves something unchanged."""

from __future__ import annotations

from torch.fx import Node

from fxpasses.graph.provenance import module_of, where
from fxpasses.report import Reason, Refusal


class Refused(Exception):
    """Something is unknown, or not known to be legal. node: the node to blame, if there is one."""

    def __init__(self, reason: Reason, text: str = "", node: Node | None = None) -> None:
        super().__init__(text)
        self.reason, self.text, self.node = reason, text, node

    def of(self, subject: Node, reason: Reason | None = None) -> Refusal:
        """The refusal for a report: `subject` stays unchanged, for this reason or the given one."""
        place = where(self.node) if self.node is not None else ""
        return Refusal(subject.name, reason or self.reason, self.text, place or where(subject), module_of(subject)[0])


class NotProved(Refused):
    """A loop over experts is not understood, or not known to be one program."""

    def __init__(self, text: str, node: Node | None = None) -> None:
        super().__init__(Reason.NOT_ALIKE, text, node)
