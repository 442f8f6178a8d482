"""Eager mode's collectives for a captured graph, forward and backward, observed by running it on fake tensors.

AOTAutograd's joint graph shows the collectives of forward and of the gradients. It does not show those that a
checkpoint's recomputation issues again, when backward needs its first tensor: all up to the last tensor that backward
needs. Autograd determines them, so it runs here, without data and without other ranks.

    forward:   all_gather, reduce_scatter
    backward:  (reduce_scatter)', again all_gather, (all_gather)'

Private names, checked on torch 2.13: `torch.fx.experimental.symbolic_shapes.PropagateUnbackedSymInts`, the interpreter
that AOTAutograd traces with, `ShapeEnv.ignore_fresh_unbacked_symbols`, and
`torch._C._autograd._saved_tensors_hooks_set_tracing`, which keeps checkpoints' hooks from running.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import rebind_unbacked
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from fxpasses.collectives.as_written import AS_WRITTEN, run_checkpoint
from fxpasses.graph.collectives import OrderChanged, is_collective
from fxpasses.graph.regions import CHECKPOINT


@dataclass(frozen=True)
class Issued:
    """A collective. again: the position of the forward collective that it repeats; None for one of a gradient."""

    operator: str
    again: int | None = None


@dataclass
class Sequences:
    forward: list[str] = field(default_factory=list)
    backward: list[Issued] = field(default_factory=list)


def eager_sequences(
    gm: GraphModule, requested: Collection[int] | None = None, in_checkpoint: bool = False
) -> Sequences:
    """The collectives of a graph that Dynamo captured, whose placeholders have fake examples.

    requested: the positions of the outputs that backward starts from; None for all. in_checkpoint: whether a checkpoint
    runs the graph.

    Raises the errors of the run, and `OrderChanged` if two calls run one body.
    """
    examples = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    fakes = [example for example in map(_local, examples) if isinstance(example, torch._subclasses.FakeTensor)]
    if not fakes:
        raise OrderChanged("a graph that takes no tensors cannot be run on fake ones")
    fake_mode = fakes[0].fake_mode
    with _as_in_eager_mode(fake_mode), _Log(fake_mode) as log:
        inputs = [_leaf(example) for example in examples]
        run = _Recorder(gm, log).run
        results = checkpoint(run, *inputs, use_reentrant=False) if in_checkpoint else run(*inputs)
        outputs = [
            output
            for place, output in enumerate(pytree.tree_leaves(results))
            if isinstance(output, torch.Tensor) and output.requires_grad and (requested is None or place in requested)
        ]
        log.is_backward = True
        if outputs:
            torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return log.sequences


@contextlib.contextmanager
def _as_in_eager_mode(fake_mode: Any) -> Iterator[None]:
    """Record gradients, run backward in this thread, and hide new symbols from Dynamo.

    Hooks that do nothing hide the run from a checkpoint around the graph: only the innermost hooks on saved tensors are
    called. DDPOptimizer and AOTAutograd disable these hooks while they compile; then no checkpoint would recompute.
    """
    ignore: Any = getattr(fake_mode.shape_env, "ignore_fresh_unbacked_symbols", contextlib.nullcontext)
    with (
        _disable_current_modes(),
        torch.enable_grad(),
        torch.autograd.set_multithreading_enabled(False),
        _hooks_called(),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor),
        fake_mode,
        ignore(),
    ):
        yield


@contextlib.contextmanager
def _hooks_called() -> Iterator[None]:
    set_tracing = torch._C._autograd._saved_tensors_hooks_set_tracing
    prior = set_tracing(False)
    try:
        yield
    finally:
        set_tracing(prior)


class _Log(TorchDispatchMode):
    """Records the collectives that run, each with the interpreter's node."""

    def __init__(self, fake_mode: Any) -> None:
        super().__init__()
        self.fake_mode = fake_mode
        self.sequences = Sequences()
        self.is_backward = False
        self.node: Node | None = None
        self._count = 0  # how many collectives the node has issued
        self._places: dict[tuple[Node, int], int] = {}

    @contextlib.contextmanager
    def at(self, node: Node) -> Iterator[None]:
        before, self.node, self._count = self.node, node, 0
        try:
            yield
        finally:
            self.node = before

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        if is_collective(func):
            self._record(str(func))
        return func(*args, **(kwargs or {}))

    def _record(self, operator: str) -> None:
        key = (self.node, self._count) if self.node is not None else None
        self._count += 1
        if self.is_backward:
            self.sequences.backward.append(Issued(operator, self._places.get(key) if key is not None else None))
            return
        if key is None or key in self._places:
            raise OrderChanged("a graph runs one body twice")
        self._places[key] = len(self.sequences.forward)
        self.sequences.forward.append(operator)


class _Recorder(Interpreter):
    """Runs a graph and keeps the log's current node, also while a checkpoint reruns its body."""

    def __init__(self, gm: GraphModule, log: _Log) -> None:
        super().__init__(gm)
        self.log = log

    def run_node(self, n: Node) -> Any:
        with self.log.at(n):
            result = super().run_node(n)
        if not _is_bound(result):
            rebind_unbacked(torch._guards.detect_fake_mode().shape_env, n, result)  # type: ignore[union-attr]
        return result

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value, fake_mode = super().get_attr(target, args, kwargs), self.log.fake_mode
        is_real = isinstance(value, torch.Tensor) and not isinstance(value, torch._subclasses.FakeTensor)
        return fake_mode.from_tensor(value, static_shapes=True) if is_real else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not CHECKPOINT:
            return super().call_function(AS_WRITTEN.get(target, target), args, kwargs)
        body, log = args[0], self.log
        return run_checkpoint(*args, run=lambda *operands: _Recorder(body, log).run(*operands), **kwargs)


def _is_bound(result: Any) -> bool:
    """Whether a number already is the graph's symbol: a checkpoint's policy may have saved it from forward."""
    return isinstance(result, torch.SymInt) and result.node._expr in result.node.shape_env.replacements


def _leaf(example: Any) -> Any:
    return example.detach().requires_grad_(example.requires_grad) if isinstance(example, torch.Tensor) else example


def _local(example: Any) -> Any:
    return getattr(example, "_local_tensor", example)
