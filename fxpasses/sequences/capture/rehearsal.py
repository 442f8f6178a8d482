"""The values that a loop's body has for each part of the batch at hand, as far as it has been traced.

The batch's numbers are known while Dynamo traces, and so is each number that the body computes from them alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from fxpasses.dynamo.trace import Trace
from fxpasses.graph.symbols import expression
from fxpasses.sequences.batched import Unbatched
from fxpasses.sequences.part_functions import call_of

_OPS = torch.ops.fxpasses
_PART_FUNCTION = _OPS.part_function.default


class Rehearsal:
    """lengths: the node of a tensor with an element for each part."""

    def __init__(self, trace: Trace, lengths: Node) -> None:
        self._trace, self._lengths = trace, lengths
        self._outer: dict[Node, Any] = {}
        self._parts: list[dict[Node, Any]] | None = None

    def values(self, body: Iterable[Node]) -> list[dict[Node, Any]]:
        """By the nodes of a body, in order, their values for each part. Raises `Unbatched` if they are not known."""
        assert self._trace.graph is not None
        with self._trace.graph.outside(), torch.no_grad():
            try:
                if self._parts is None:
                    self._parts = [{} for _ in range(len(self._value(self._lengths)))]
                for node in body:
                    for number, part in enumerate(self._parts):
                        if node not in part:
                            part[node] = self._run(node, number, part)
            except Unbatched:
                raise
            except Exception as error:  # the program's, which recurs when the body runs
                raise Unbatched(f"its values are not known: {error}") from error
        return self._parts

    def _run(self, node: Node, number: int, part: dict[Node, Any]) -> Any:
        given = node.args, node.kwargs
        args, kwargs = cast(Any, map_arg(given, lambda each: part[each] if each in part else self._value(each)))
        if node.target is _OPS.part_size.default:
            return args[0].tolist()[number]
        if node.target is _OPS.element.default:
            return args[0][number]
        if node.target is _OPS.part.default:
            size: Any = node.args[2]
            starts = self._starts(size.args[0])
            return args[0].narrow(args[1], starts[number], args[2])
        if node.target is _OPS.ragged.default:
            start, size = self._starts(node.args[1])[number], args[1].tolist()[number]
            return args[0].narrow(0, start, size).view(args[2])
        if node.target is _PART_FUNCTION:
            name, *given = args
            return call_of(name)(*given)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if node.op != "call_function":
            raise Unbatched(f"`{node.name}` is not known")
        return cast(Any, node.target)(*args, **kwargs)

    def _starts(self, lengths: Any) -> list[int]:
        return [*accumulate(self._value(lengths).tolist(), initial=0)]

    def _value(self, node: Node) -> Any:
        """The value of a node from outside of the body."""
        if node not in self._outer:
            self._outer[node] = self._known(node)
        return self._outer[node]

    def _known(self, node: Node) -> Any:
        graph, example = self._trace.graph, node.meta.get("example_value")
        assert graph is not None
        if isinstance(example, Tensor):
            found = graph.tensors([node]) if graph.is_metadata(node) else None
            if found is not None:
                return found[0].clone()  # the body may write to it
        if isinstance(example, torch.SymInt):
            number = self._trace.number(expression(example))
            if number is not None:
                return int(number)
        raise Unbatched(f"`{node.name}` is not known")
