"""Finds floating-point inputs that are masks of attention, which say of a batch what lengths say otherwise.

    attention_mask                       # [B, 1, T, T]: 0 or the least value, made by the user's collator
    mask = attention_mask[:, :, :, :T].to(dtype)
    out = scaled_dot_product_attention(q, k, v, mask)

Other floating-point inputs are data. LLaMA-Factory makes such masks in its collator (`neat_packing`), and transformers
passes masks of 4 dimensions on as they are.
"""

from __future__ import annotations

from torch.fx import Node

from fxpasses.graph.calls import argument, operator_of
from fxpasses.graph.regions import CHECKPOINT, Region
from fxpasses.graph.traits import CASTS, VIEWS

_PASSES_ON = CASTS | VIEWS | {"clone", "contiguous", "detach", "expand_as", "squeeze"}  # as frameworks do with a mask
_LOOKS = frozenset({"dim", "getattr", "size", "sym_size"})
# Take the mask as this argument; passes make the last two of the first.
_ATTENTIONS = {
    "scaled_dot_product_attention": "attn_mask",
    "fxpasses::sparse_attention": "mask",
    "fxpasses::attention_plan": "mask",
}


def is_given_mask(region: Region, node: Node) -> bool:
    """Whether attention reads the value as its mask, in this region or in checkpoints, and nothing else reads it."""
    read, waiting = False, [(region, node)]
    while waiting:
        region, node = waiting.pop()
        for user in node.users:
            if user.target is CHECKPOINT and user in region.bodies:
                body = region.bodies[user]
                waiting += [(body, inner) for inner, operand in body.operands.items() if operand is node]
            elif name := _ATTENTIONS.get(operator_of(user)):
                if argument(user, name) is not node or [*user.args, *user.kwargs.values()].count(node) > 1:
                    return False
                read = True
            elif operator_of(user) in _PASSES_ON and user.args and user.args[0] is node:
                waiting.append((region, user))
            elif operator_of(user) not in _LOOKS:
                return False
    return read
