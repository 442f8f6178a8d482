"""Keeps what the compilation of a frame has found, for `fxpasses.save_caches`.

A trace is kept if another process can make its guards and its graph; `refusals` tells why others are not.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.dynamo.dynamo_names import arguments_of
from fxpasses.dynamo.equal_guards import Reader
from fxpasses.dynamo.tracing import described
from fxpasses.graph.bodies import modules_in
from fxpasses.loss.lazy_outputs import LeftOut, SavedLeftOut
from fxpasses.options import Options
from fxpasses.passes.pipeline import Result
from fxpasses.report import Report
from fxpasses.restart import hashes, pickling, program
from fxpasses.restart.dynamo_state import (
    STATE,
    autograd_modes,
    automatic_dynamic,
    given_modules,
    guarded,
    modes_around,
    share_memory,
    tracked_fakes,
)
from fxpasses.restart.facts import Names, digest_of, fact_of, installing, is_found_by_name, shared_objects
from fxpasses.restart.hashes import Hashes
from fxpasses.restart.pickling import CannotPickle
from fxpasses.restart.saved_trace import Body, Graphs, Head, SavedTrace, digest_of_body
from fxpasses.rows.choice import RowCounts

log = logging.getLogger(__name__)

_MOST = 64  # traces; older ones go
_CAN = ".".join(torch.__version__.split(".")[:2]) in ("2.13", "2.14", "2.15")  # guards of older ones state other things

_saved: list[SavedTrace] = []
_refusals: dict[str, str] = {}  # the reason, by the frame
_is_on = False


def start() -> None:
    """Keep the traces of all frames that are compiled from now on, if this torch is 2.13 to 2.15.

    It takes some percent of their compilation.
    """
    global _is_on
    _is_on = _CAN


def is_on() -> bool:
    return _is_on


def saved() -> list[SavedTrace]:
    return list(_saved)


def refusals() -> dict[str, str]:
    """Why frames that were compiled are not kept."""
    return dict(_refusals)


def add(trace: SavedTrace) -> None:
    """Keep a trace, which may be there already."""
    if trace in _saved:
        return
    if len(_saved) >= _MOST:
        del _saved[0]
    _saved.append(trace)


class Recording:
    """What a backend has made of one frame.

    left_out: the outputs that it has taken out of the graph before. refusal: why the trace is not saved; "" if it may
    be.
    """

    def __init__(self) -> None:
        self.refusal = "the backend has compiled no graph of it"
        self.options: Options | None = None
        self.graphs: bytes | None = None
        self.captured: GraphModule | None = None
        self.left_out: LeftOut | None = None
        self.reports: Sequence[Report] = ()
        self.asserted: frozenset[str] = frozenset()
        self.is_given = False
        self.hashes = Hashes()

    def note(
        self,
        rewritten: Result,
        captured: GraphModule,
        *,
        options: Options,
        asserted: frozenset[str],
        is_given: bool,
        rows: RowCounts | None,
        packed: bool,
        refusal: str,
    ) -> None:
        """Called by the backend after it has compiled a graph. refusal: of the backend's own. The rest: as in `Head`,
        `Body` and `Graphs`.

        The graphs are pickled at once: Dynamo and Inductor clear what they remember of them when the frame is done.
        """
        self.refusal = refusal or ("its frame has two graphs" if self.captured is not None else "")
        self.captured = captured
        if not self.refusal:
            try:
                left_out = None if self.left_out is None else SavedLeftOut.of(self.left_out)
                examples = _examples(rewritten.gm)
                self.graphs = pickling.dumps(
                    Graphs(captured, rewritten.gm, examples, rewritten.program, rows, packed, left_out)
                )
            except Exception as error:
                log.debug("a graph is not kept", exc_info=error)
                self.refusal = str(error)
        self.options, self.reports, self.asserted = options, list(map(replace, rewritten.reports)), asserted
        self.is_given = is_given


_current: ContextVar[Recording | None] = ContextVar("recording", default=None)


@contextmanager
def recording() -> Iterator[Recording]:
    """Inside, `running()` is a new recording."""
    found = Recording()
    token = _current.set(found)
    try:
        with hashes.noticing() as found.hashes:
            yield found
    finally:
        _current.reset(token)


def running() -> Recording | None:
    return _current.get()


def keep(found: Recording, frame: Mapping[str, Any], output: Any, bytecode: types.CodeType) -> None:
    """Keep a frame that Dynamo has compiled. frame: the arguments of `compile_frame`; output: its `OutputGraph`."""
    try:
        if found.refusal:
            raise CannotPickle(found.refusal)
        add(_pickled(found, frame, output, bytecode))
    except Exception as error:  # of any kind: what another process cannot have is of many kinds
        log.debug("a trace is not kept", exc_info=error)
        _refusals[described(frame["code"])] = str(error)


def _pickled(found: Recording, frame: Mapping[str, Any], output: Any, bytecode: types.CodeType) -> SavedTrace:
    assert found.graphs is not None and found.captured is not None and found.options is not None
    _check(output, found.captured)
    name, objects = _globals(output)
    read = Reader(frame["locals"], frame["globals"])
    checks = [made for guard in output.guards if (made := arguments_of(guard)) is not None]
    if any(check.restart == "lost" for check, _, _ in checks):
        raise CannotPickle("a guard of this package holds objects of the process")
    kept = [(check.holds, check.feature, sources, text) for check, sources, text in checks if check.restart == "kept"]
    guards = [guard for guard in output.guards if arguments_of(guard) is None]
    inputs = [getattr(node, "_dynamo_source", None) for node in found.captured.graph.find_nodes(op="placeholder")]
    if found.hashes.refusal:
        raise CannotPickle(found.hashes.refusal)
    if share_memory(map(read, filter(None, inputs))):
        raise CannotPickle("some of its inputs share memory")
    names = Names(read)
    facts = [fact_of(guard, names) for guard in guards]
    about = guarded(guards, read)
    modules = given_modules(about)
    values = [*(value for _, value in about), *_all(modules)]
    codes = [frame["code"], *output.traced_code]
    code = digest_of(frame["code"])
    body = pickling.dumps(
        Body(
            graphs=found.graphs,
            reports=found.reports,
            asserted=found.asserted,
            name=name,
            bytecode=bytecode,
            state={field: getattr(output, field) for field in STATE},
            tracked=tracked_fakes(output),
            checks=kept,
            sizes=automatic_dynamic(frame["code"]),
        )
    )
    head = Head(
        code=code,
        body=digest_of_body(body),
        options=found.options,
        settings=program.settings(),
        sources=program.sources(codes, [each if isinstance(each, _OF_SOURCE) else type(each) for each in values]),
        classes=program.classes(values, names.digest),
        operators=program.operators([found.captured]),
        environment=program.environment(codes, about),
        sets=program.order_of_sets() if found.hashes.of_texts else "",
        modules=program.modules_digest(modules, names.digest),
        is_given=found.is_given,
        one_graph=bool(frame["one_graph"]),
        modes=autograd_modes(),
        imports=dict(output.import_sources),
        objects=objects,
        guards=[(guard.originating_source, installing(guard)) for guard in guards],
        facts=facts,
        shared=shared_objects(about),
    )
    return SavedTrace(code, pickling.dumps(head), body)


_OF_SOURCE = (types.FunctionType, types.MethodType, types.ModuleType, type)


def _all(modules: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    return (module for root in modules for module in root.modules())


def _examples(gm: GraphModule) -> list[Any]:
    found = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    return [pickling.Input(example) if isinstance(example, torch.Tensor) else example for example in found]


def _check(output: Any, captured: GraphModule) -> None:
    """Raise `CannotPickle` for what a saved trace does not hold."""
    if output.torch_function_mode_stack or (around := modes_around()):
        raise CannotPickle(f"{around or 'a mode'} is around it")
    if getattr(output, "torch_function_subclass_inlined", False):
        raise CannotPickle("a tensor's subclass overrides functions in it")
    if output.shape_env.specializations if hasattr(output.shape_env, "specializations") else ():
        raise CannotPickle("it is specialised for some sizes")
    reason = getattr(captured, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break:
        raise CannotPickle("its graph ends at a graph break")
    for module in modules_in(captured):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            if tensor is not None:
                raise CannotPickle("its graph holds a tensor")


def _globals(output: Any) -> tuple[str, dict[str, Any]]:
    """The global name of the compiled graph, and the others that Dynamo has made."""
    name, found = "", dict[str, Any]()
    for installed in sorted(output.installed_globals):
        value = output.global_scope[installed]
        if installed == output.name_of_builtins_dict_key_in_fglobals:
            found[installed] = None
        elif installed.startswith("__compiled_fn"):
            if name:
                raise CannotPickle("its frame has two graphs")
            name = installed
        elif isinstance(value, (type, types.ModuleType)) or is_found_by_name(value):
            found[installed] = value
        else:
            raise CannotPickle(f"its code uses a {type(value).__name__} of the process")
    if not name:
        raise CannotPickle("its frame has no graph")
    return name, found
