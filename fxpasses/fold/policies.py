"""Checkpoints that would be equal layers if they did not select different results to save.

    checkpoint(layer_0, h, context_fn=partial(create_selective_checkpoint_contexts, partial(policy, 0)))
    checkpoint(layer_1, h, context_fn=partial(create_selective_checkpoint_contexts, partial(policy, 1)))

One body has one policy, so these are different programs. Without a reason in the report, nobody would know why.
"""

from __future__ import annotations

from collections import defaultdict

from torch.fx import GraphModule, Node

from fxpasses.fold.repetition import calls
from fxpasses.fold.segments import is_reference, local_signature
from fxpasses.graph.checkpoints import has_policy
from fxpasses.graph.refusals import Refused
from fxpasses.report import Reason, Refusal


def refusals(gm: GraphModule, least: int) -> list[Refusal]:
    """A refusal for each set of `least` or more checkpoints that differ only in what they select to save."""
    equal: dict[object, list[Node]] = defaultdict(list)
    for node in calls(gm):
        if _selects(gm, node):
            equal[local_signature(gm, node)].append(node)
    alike: dict[object, list[Node]] = defaultdict(list)
    for nodes in equal.values():
        if len(nodes) < least:
            alike[local_signature(gm, nodes[0], policies=False)] += nodes
    return [_refused(nodes) for nodes in alike.values() if len(nodes) >= least]


def _selects(gm: GraphModule, node: Node) -> bool:
    return any(has_policy(getattr(gm, str(o.target))) for o in node.all_input_nodes if is_reference(gm, o))


def _refused(nodes: list[Node]) -> Refusal:
    text = f"{len(nodes)} checkpoints are equal but for their `context_fn`"
    return Refused(Reason.SELECTIVE, text).of(nodes[0])
