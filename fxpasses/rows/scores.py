"""Attention that no plan can compute, on unpacked rows: scores that are capped, biases with gradients, sinks, dropout.

    scores = (q @ k.transpose(2, 3)) / cap                  [B, H, T, T]: batch, -, tokens, keys
    scores = tanh(scores) * cap + bias + mask               hides the keys that the mask hides, whatever was before
    weights = dropout(softmax(scores, -1))                  0 for hidden keys
    output = weights @ v                                    [B, H, T, D]: rows again, and packed

Its operators stay unchanged. Before the first, queries, keys and values are unpacked, with dead rows as copies of
others: as keys, these are hidden from every needed query; as queries, their results are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils import _pytree as pytree

from fxpasses.attention.match import Mask, Operand
from fxpasses.attention.products import Product, product_of
from fxpasses.attention.spelling import constant_of
from fxpasses.graph.calls import OperatorCall, argument, is_in_place, operator_of
from fxpasses.graph.refusals import Refused
from fxpasses.graph.traits import ADDITIONS, KEEPS_VALUES, RESHAPES, is_pointwise
from fxpasses.report import Reason
from fxpasses.rows.attentions import ATTENTION, HIDES, MODERATE, RowAttention
from fxpasses.rows.nodes import first_of, is_tensor, refused
from fxpasses.rows.rules import Rules
from fxpasses.rows.spaces import BATCH, GROUPS, TOKENS, Tags

# The dimension of scores whose elements are the tokens that a query attends to.
KEYS = "keys"
_ADDS = ADDITIONS | {"sub"}
_USUAL = (0, 1, 2, 3)
_CARRIES = KEEPS_VALUES | {"expand"}
_ROWS = (BATCH, None, TOKENS, None)
_UNBOUNDED = frozenset({"cosh", "exp", "exp2", "expm1", "reciprocal", "sinh", "where"})  # may exceed what a mask hides
# Operators that do not make large values of small ones.
_MODEST = RESHAPES | _CARRIES | _ADDS | {
    "abs", "arange", "clamp", "cumsum", "eq", "full", "full_like", "ge", "getitem", "gt", "le", "logical_and",
    "logical_not", "logical_or", "lt", "masked_fill", "maximum", "minimum", "mul", "ne", "neg", "new_full", "new_ones",
    "new_zeros", "ones", "ones_like", "transpose", "tril", "triu", "unsqueeze", "where", "zeros", "zeros_like",
}  # fmt: skip


@dataclass(frozen=True)
class Scores:
    """A value [B, H, T, keys, or more] of unpacked attention.

    query, key: the operands of the product. masks: the masks that hide keys in it. is_softmax: whether it is 0 where
    they hide. more: how many elements besides keys are at the end of the last dimension. factor: the number by which
    hidden scores were multiplied. of_greatest: if a greatest score was used, the masks that hid keys when it was taken.
    """

    query: Node
    key: Node
    masks: tuple[Mask, ...] = ()
    is_softmax: bool = False
    more: int = 0
    factor: float = 1.0
    of_greatest: tuple[Mask, ...] | None = None

    @property
    def is_known(self) -> bool:
        """Whether no score that is hidden in the end was read, not even as a candidate for the greatest."""
        return bool(self.masks) and (self.of_greatest is None or set(self.masks) <= set(self.of_greatest))


class Unpacked:
    """The values of a graph that are computed on unpacked rows. states: what is known of each.

    is_metadata: whether only the batch determines a value. rules: those of the same layout.
    """

    def __init__(self, is_metadata: Callable[[Node], bool], rules: Rules) -> None:
        self.is_metadata, self.tags, self.spaces = is_metadata, rules.tags, rules.spaces
        self.regrouped = rules.regrouped
        self.states: dict[Node, Scores] = {}

    def scores(self, node: Node, name: str) -> Tags | None:
        """The tags of a node that computes scores; None for another node. Raises `Refused`."""
        given = [operand for operand in node.all_input_nodes if operand in self.states]
        if not given:
            return self._first(node)
        if not self._are_alike(given):
            raise refused(node, "combines the scores of two attentions")
        found = self._after(node, name, given)
        if found is None:
            raise refused(node, "changes scores or weights in a way that is not known")
        self.states[node], tags = found
        if is_in_place(name):
            self.states[given[0]] = found[0]
        return tags

    def _are_alike(self, given: list[Node]) -> bool:
        """Whether values are scores of one attention, or of several among the same rows that are not yet weights."""
        states = [self.states[operand] for operand in given]
        texts = {(self.spaces[state.query], self.spaces[state.key]) for state in states}
        products = {(state.query, state.key) for state in states}
        return len(products) == 1 or (len(texts) == 1 and not any(state.is_softmax or state.more for state in states))

    def result(self, node: Node) -> RowAttention | None:
        """The attention whose last product a node is; None for another node."""
        product = product_of(node)
        if product is None or (product.left in self.states) == (product.right in self.states):
            return None
        weights = product.left if product.left in self.states else product.right
        state, value = self.states[weights], product.right if weights is product.left else product.left
        if not state.is_softmax or not state.is_known or state.more or value not in self.tags:
            raise refused(node, "multiplies scores that no mask hides")
        own, tags = self._by_letters(product, weights), self._by_letters(product, value)
        summed = [letter for letter, tag in own.items() if tag == KEYS]
        if tags.get(summed[0]) != TOKENS or summed[0] in product.axes:
            raise refused(node, "multiplies weights by other rows")
        rest = {letter: tag for letter, tag in (*own.items(), *tags.items()) if letter != summed[0]}
        result = tuple(rest[letter] for letter in product.axes)
        if any(own.get(letter, tag) != tag for letter, tag in tags.items() if letter != summed[0]):
            raise refused(node, "multiplies weights by other rows")
        if sorted(tag for tag in result if tag) not in ([BATCH, TOKENS], [GROUPS, TOKENS]):
            raise refused(node, "gives rows in a way that is not known")
        return _attention(node, state.query, state.key, value, state.masks, result)

    def reduced(self, node: Node) -> RowAttention | None:
        """The attention of `scores.logsumexp(-1)`, a number for each query; None for another node."""
        call, scores = OperatorCall.of(node), node.args[0] if node.args else None
        if not isinstance(scores, Node) or scores not in self.states:
            return None
        if operator_of(node) not in ("amax", "logsumexp") or call.argument("keepdim"):
            return None
        state, tags, dims = self.states[scores], self.tags[scores], call.argument("dim")
        dims = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,)
        if dims not in ((-1,), (len(tags) - 1,)) or tags[-1] != KEYS or not state.is_known or state.is_softmax:
            return None
        return _attention(node, state.query, state.key, state.key, state.masks, tags[:-1])

    def fused(self, node: Node) -> RowAttention | None:
        """A call of `scaled_dot_product_attention` whose mask hides keys and does more; None for another node."""
        call = OperatorCall.of(node)
        mask = call.argument("attn_mask")
        if operator_of(node) != ATTENTION or not isinstance(mask, Node) or mask in self.tags:
            return None
        masks = (Mask(mask),) if self._is_bool_metadata(mask) else tuple(self._hiding(mask))
        query, key, value = (call.argument(name) for name in ("query", "key", "value"))
        if not masks or call.argument("is_causal") or any(self.tags.get(part) != _ROWS for part in (query, key, value)):
            return None
        if len(masks) > 1 or masks[0].node is not mask:
            if not self._adds_little(mask, (*_ROWS[:-1], KEYS)):
                return None
        return _attention(node, query, key, value, masks, _ROWS)

    def _is_bool_metadata(self, mask: Node) -> bool:
        return self.is_metadata(mask) and mask.meta["example_value"].dtype is torch.bool

    def _first(self, node: Node) -> Tags | None:
        """The tags of a product of queries and keys."""
        product = product_of(node) or self._added_to(node)
        if product is None or product.left not in self.tags or product.right not in self.tags:
            return None
        left, right = self._by_letters(product, product.left), self._by_letters(product, product.right)
        *batch, queries, keys = list(product.axes)
        query, key = (product.left, product.right) if queries in left and queries not in right else (
            product.right, product.left,
        )  # fmt: skip
        own, other = (left, right) if query is product.left else (right, left)
        shared = [letter for letter in own if letter in other and letter not in product.axes]
        fits = own.get(queries) == other.get(keys) == TOKENS and queries not in other and keys not in own
        fits = fits and all(own.get(letter) == other.get(letter) for letter in batch)
        if not fits or any(own[letter] or other[letter] for letter in shared):
            return None
        self.states[node] = Scores(query, key)
        return (*(own[letter] for letter in batch), TOKENS, KEYS)

    def _added_to(self, node: Node) -> Product | None:
        """The product in `torch.baddbmm(biases, q, k)`, where biases have no rows."""
        operands = [argument(node, name) for name in ("input", "batch1", "batch2")]
        if operator_of(node) != "baddbmm" or not all(map(is_tensor, operands)) or operands[0] in self.tags:
            return None
        return Product(node, operands[1], operands[2], "xij", "xjk", "xik")

    def _by_letters(self, product: Product, operand: Node) -> dict[str, str | None]:
        axes = product.left_axes if operand is product.left else product.right_axes
        return dict(zip(axes, self.tags[operand], strict=True))

    def _after(self, node: Node, name: str, given: list[Node]) -> tuple[Scores, Tags] | None:
        state, tags = self.states[given[0]], self.tags[given[0]]
        first = node.args[0] if node.args else None
        if name in KEEPS_VALUES:
            return (state, tags) if node.meta["example_value"].is_floating_point() else None
        if name in RESHAPES and len(given) == 1 and not state.more:
            return state, self.regrouped(node)
        if name == "softmax" and first is given[0] and argument(node, "dim") in (-1, len(tags) - 1):
            if tags[-1] != KEYS:
                return None
            return (replace(state, is_softmax=True), tags) if state.masks and not state.is_softmax else None
        if name == "dropout" and not argument(node, "inplace", False):  # it would set a hidden score to 0
            return (state, tags) if state.is_softmax or not state.masks else None
        if name == "cat":
            return self._with_sinks(node, given)
        if name == "getitem":
            return self._without_sinks(node, state, tags)
        if state.is_softmax:
            keeps = name == "mul" and self._keeps(node, given, tags)
            return (state, tags) if keeps or self._fills_weights(node, name) else None
        if any(self.states[operand].is_softmax for operand in given):  # weights of 0 would not hide scores
            return None
        if name == "max" and len(node.args) == 2 and first is given[0] and is_tensor(node.args[1]):
            least = constant_of(node.args[1])
            return (state, tags) if least is not None and least <= HIDES else None
        if name in ("max", "amax") and argument(node, "keepdim", False):
            is_of_keys = argument(node, "dim") in (-1, len(tags) - 1) and tags[-1] == KEYS and state.masks
            found = replace(state, masks=(), of_greatest=state.masks)  # the greatest itself hides nothing
            return (found, (*tags[:-1], None)) if is_of_keys else None
        masked = self._masked(node, name, given[0])
        if masked is not None:
            return (masked, tags) if node.meta["example_value"].dim() == len(tags) else None
        if name == "sub" and not self._subtracts_little(node):
            return None
        if state.masks and name in ("div", "mul"):  # hidden scores stay hidden
            factor = constant_of(node.args[1]) if node.args[0] is given[0] and len(node.args) == 2 else None
            if factor is None or factor <= 0 or node.kwargs:
                return None
            factor = state.factor * (factor if name == "mul" else 1 / factor)
            return (replace(state, factor=factor), tags) if 1e-3 < factor < 1e3 else None
        adds = name in _ADDS and OperatorCall.of(node).has_only("input", "other")
        is_masked = any(self.states[operand].masks for operand in given)
        if (is_masked or adds) and not self._adds_to_scores(node, given[0]):
            return None
        if adds or (not is_masked and is_pointwise(name) and name not in _UNBOUNDED and self._is_moderate(node)):
            return (self._joined(node, given), tags) if self._keeps(node, given, tags) else None
        return None

    def _is_moderate(self, node: Node) -> bool:
        return all(not isinstance(value, (int, float)) or abs(value) <= MODERATE for value in _leaves(node))

    def _adds_to_scores(self, node: Node, scores: Node) -> bool:
        """Whether scores that are hidden, now or later, stay hidden with the other operands of a sum."""
        others = [operand for operand in node.all_input_nodes if operand not in self.states]
        return all(self._adds_little(operand, self.tags[scores]) for operand in others)

    def _adds_little(self, node: Node, tags: Tags, steps: int = 8) -> bool:
        """Whether a summand is a mask, which is checked for each batch, or far smaller than what hides a score.

        Activations and parameters are assumed to be small. tags: those of the scores.
        """
        name, first = operator_of(node), first_of(node)
        if self._is_modest(node):
            return True
        if self.is_metadata(node):
            return any(self._hides_in(mask, tags) for mask in self._hiding(node))
        if steps and self._fills(node, name) is not None:
            kept = [part for part in node.all_input_nodes if not self.is_metadata(part)]
            return all(self._adds_little(part, tags, steps - 1) for part in kept)
        adds = name in ("add", "add_") and OperatorCall.of(node).has_only("input", "other")
        if steps and (adds or (name in _CARRIES and isinstance(first, Node))):
            parts = node.all_input_nodes if adds else [first]
            return all(self._adds_little(part, tags, steps - 1) for part in parts)
        return False

    def _is_modest(self, node: Node) -> bool:
        """Whether the parts of a value that only the batch determines are computed without large constants."""
        waiting, seen, product = [node], {node}, 1.0
        while waiting:
            part = waiting.pop()
            example = part.meta.get("example_value")
            is_exact = isinstance(example, torch.Tensor) and not example.is_floating_point()
            if is_exact or not isinstance(example, torch.Tensor):
                continue
            if part.op.startswith("call") and operator_of(part) in _MODEST:
                for value in _leaves(part):
                    product *= max(1.0, abs(value)) if isinstance(value, (int, float)) else 1.0
                if not product <= MODERATE:
                    return False
                inputs = [each for each in part.all_input_nodes if each not in seen]
                seen.update(inputs)
                waiting.extend(inputs)
            elif self.is_metadata(part) or self._is_buffer(part):
                return False
        return True

    def _is_buffer(self, node: Node) -> bool:
        """Whether a value is an input that is neither a parameter nor an activation: it may be a mask."""
        example = node.meta["example_value"]
        trains = isinstance(example, torch.nn.Parameter) or example.requires_grad
        is_one = all(type(size) is int and size == 1 for size in example.shape)
        return node.op in ("placeholder", "get_attr") and not (trains or is_one or node in self.tags)

    def _subtracts_little(self, node: Node) -> bool:
        """Whether a node is `scores - x`, where x hides nothing: a number for each query, or a value without rows."""
        first, second = node.args[0], node.args[1]
        if first not in self.states or not isinstance(second, Node):
            return first in self.states
        return KEYS not in self.tags.get(second, ()) and (second in self.states or self._is_modest(second))

    def _joined(self, node: Node, given: list[Node]) -> Scores:
        """The scores of a sum: keys that a mask hides in any summand are hidden."""
        others = [operand for operand in node.all_input_nodes if operand not in self.states]
        masks = [mask for operand in given for mask in self.states[operand].masks]
        if operator_of(node) in ("add", "add_"):
            found = [mask for operand in others for mask in self._hiding(operand)]
            masks += [mask for mask in found if self._hides_in(mask, self.tags[given[0]])]
        states = [self.states[operand] for operand in given]
        first = max(states, key=lambda state: state.more)
        greatest = {state.of_greatest for state in states} - {None}
        of_greatest = next(iter(greatest)) if len(greatest) == 1 else () if greatest else None
        return replace(first, masks=tuple(dict.fromkeys(masks)), of_greatest=of_greatest)

    def _keeps(self, node: Node, given: list[Node], tags: Tags) -> bool:
        """Whether the result of an elementwise operator has the dimensions of the scores among its operands."""
        if node.meta["example_value"].dim() != len(tags):
            return False
        for operand in node.all_input_nodes:
            own = self.tags.get(operand, ())
            if any(tag not in (None, other) for tag, other in zip(reversed(own), reversed(tags), strict=False)):
                return False
        return KEYS in tags or all(KEYS not in self.tags[operand] for operand in given)

    def _masked(self, node: Node, name: str, scores: Node) -> Scores | None:
        """The scores of `masked_fill(scores, mask, least)` or `where(mask, scores, least)`; None for another node."""
        mask, state = self._fills(node, name), self.states[scores]
        if mask is None:
            return None
        return replace(state, masks=(*state.masks, mask)) if self._hides_in(mask, self.tags[scores]) else state

    def _fills_weights(self, node: Node, name: str) -> bool:
        """Whether a node is `weights.masked_fill(mask, 0)`."""
        condition = argument(node, "mask") if name == "masked_fill" else None
        return isinstance(condition, Node) and self.is_metadata(condition) and constant_of(argument(node, "value")) == 0

    def _hides_in(self, mask: Mask, tags: Tags) -> bool:
        """Whether a mask's dimensions are known to be those of texts and keys, in scores with these tags.

        In scores [B * H, Tq, Tk], only a mask [Tq, Tk] for all groups is; in [H, B, Tq, Tk], none that differs along H.
        """
        sizes = mask.node.meta["example_value"].shape
        if tags[-2:] != (TOKENS, KEYS) or len(sizes) > 4:
            return False
        if GROUPS in tags:
            return len(sizes) == 2
        return len(sizes) < 4 or tags[-4:-3] == (BATCH,) or (type(sizes[0]) is int and sizes[0] == 1)

    def _fills(self, node: Node, name: str) -> Mask | None:
        """The mask by which a node replaces scores with a number that hides them; None for another node."""
        if name in ("masked_fill", "masked_fill_"):
            condition, fill, hides = argument(node, "mask"), constant_of(argument(node, "value")), True
        elif name == "where" and len(node.args) == 3:
            condition, *sides = node.args
            fills = [constant_of(side) for side in sides]
            hides = fills[1] is None
            fill = fills[not hides]
        else:
            return None
        if not isinstance(condition, Node) or not self.is_metadata(condition) or fill is None:
            return None
        if fill > HIDES:
            raise Refused(Reason.SCORES_CHANGED, f"{fill:g} does not hide a score for certain", node)
        return Mask(condition, fill, hides)

    def _hiding(self, node: Any, steps: int = 8) -> Iterator[Mask]:
        """The parts of a sum that only the batch determines, and that may hide keys."""
        if not isinstance(node, Node) or steps == 0 or not isinstance(node.meta.get("example_value"), torch.Tensor):
            return
        if self.is_metadata(node):
            example = node.meta["example_value"]
            if example.is_floating_point() and example.dtype is not torch.float16 and example.dim() in (2, 3, 4):
                yield Mask(node)
        elif (mask := self._fills(node, operator_of(node))) is not None:
            yield mask
        elif operator_of(node) in ("add", "add_") and OperatorCall.of(node).has_only("input", "other"):
            for operand in node.all_input_nodes:
                yield from self._hiding(operand, steps - 1)
        elif operator_of(node) in _CARRIES:
            yield from self._hiding(node.args[0], steps - 1)

    def _with_sinks(self, node: Node, given: list[Node]) -> tuple[Scores, Tags] | None:
        """The scores of `cat([scores, sinks], -1)`, where sinks have no rows."""
        parts: Any = node.args[0]
        state, tags = self.states[given[0]], self.tags[given[0]]
        fits = parts[0] is given[0] and len(given) == 1 and argument(node, "dim", 0) in (-1, len(tags) - 1)
        if not fits or any(part in self.tags for part in parts[1:]) or state.is_softmax:
            return None
        added = sum(part.meta["example_value"].shape[-1] for part in parts[1:])
        return (replace(state, more=state.more + added), tags) if type(added) is int else None

    def _without_sinks(self, node: Node, state: Scores, tags: Tags) -> tuple[Scores, Tags] | None:
        """The scores of `weights[..., :-1]`, and of `max(...)[0]`."""
        if isinstance(node.args[0], Node) and isinstance(node.args[0].meta["example_value"], (tuple, list)):
            return state, tags
        index = node.args[1]
        if state.more and index == (Ellipsis, slice(None, -state.more, None)):
            return replace(state, more=0), tags
        return None


def _attention(node: Node, query: Node, key: Node, value: Node, masks: tuple[Mask, ...], tags: Tags) -> RowAttention:
    first, second, third = (Operand(part, _USUAL) for part in (query, key, value))
    return RowAttention(node, first, second, third, masks, None, _USUAL, is_unpacked=True, tags=tags)


def _leaves(node: Node) -> list[Any]:
    return [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if not isinstance(leaf, bool)]
