"""What a saved trace takes from Dynamo, and gives back to it.

Private names, checked on torch 2.13 and 2.15: the fields of `OutputGraphGuardsState` and of `OutputGraphCommon`, from
which `CheckFunctionManager` makes guards; what `_compile` reads of an `OutputGraph` once a frame is compiled;
`CleanupHook`; `DynamoOutput`; `TrackedFake`; `pgo.get_code_state`, the sizes that Dynamo has seen in a frame;
`SetVariable`; `guards.profile_guard_manager`; `convert_frame.torch_function_mode_stack_state_mgr`; and what else holds
modes and hooks.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, SimpleNamespace
from typing import Any

import torch
from torch._dynamo.guards import CheckFunctionManager
from torch._dynamo.output_graph import OutputGraphCommon, OutputGraphGuardsState
from torch._guards import TracingContext

from fxpasses.base.patching import Patch
from fxpasses.dynamo.equal_guards import Reader
from fxpasses.graph.aliases import storages_of
from fxpasses.restart.pickling import CannotPickle

# Fields of Dynamo's `OutputGraph` from which guards are made, and that another process takes as they are.
STATE = (
    "guard_on_key_order", "input_source_to_sizes_strides", "dual_level", "current_device", "global_state_guard",
    "name_of_builtins_dict_key_in_fglobals",
)  # fmt: skip


def set_variable() -> Any:
    """Dynamo's class for sets; `BaseSetVariable` is its name in torch 2.15."""
    sets = importlib.import_module("torch._dynamo.variables.sets")
    return getattr(sets, "BaseSetVariable", None) or sets.SetVariable


def modes_around() -> str:
    """What is around a frame that Dynamo compiles and has no place in a saved trace; "" if nothing."""
    frames: Any = importlib.import_module("torch._dynamo.convert_frame")
    if frames.torch_function_mode_stack_state_mgr.stack:
        return "a mode that overrides functions"
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        return "a functional transform"
    module = torch.nn.modules.module
    hooks = (getattr(module, name) for name in vars(module) if name.startswith(("_global_forward", "_global_backward")))
    if any(hooks):
        return "a hook on all modules"
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        return "hooks for saved tensors"
    return ""


def autograd_modes() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


def renamed_state(state: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """The state with another global name for the dictionary of builtins."""
    key = "name_of_builtins_dict_key_in_fglobals"
    return {**state, key: names.get(state[key], state[key])}


def guarded(guards: Sequence[Any], read: Reader) -> list[tuple[str, Any]]:
    """What guards are about: the names of their sources, and the values."""
    sources = (guard.originating_source for guard in guards if guard.originating_source.name)
    return [(source.name, read(source)) for source in sources]


def given_modules(values: Iterable[tuple[str, Any]]) -> list[torch.nn.Module]:
    """The modules among what is guarded, without those that others own."""
    found = {id(value): value for _, value in values if isinstance(value, torch.nn.Module)}
    inner = {id(child) for module in found.values() for child in module.modules() if child is not module}
    return [module for key, module in found.items() if key not in inner]


def share_memory(values: Iterable[Any]) -> bool:
    """Whether two of some values are tensors of one memory."""
    found = [key for value in values if isinstance(value, torch.Tensor) for key in storages_of(value)]
    return len(set(found)) < len(found)


def tracked_fakes(output: Any) -> list[Any]:
    """The fake tensors of a shape environment, each with its source and what was decided about its sizes."""
    from fxpasses.restart.pickling import Input

    return [
        (Input(each.fake) if isinstance(each.fake, torch.Tensor) else each.fake, each.source, each.symbolic_context)
        for each in output.shape_env.tracked_fakes or ()
    ]


def set_tracked_fakes(shape_env: Any, tracked: Sequence[Any]) -> None:
    from torch.fx.experimental.symbolic_shapes import TrackedFake

    shape_env.tracked_fakes = [TrackedFake(fake, source, context) for fake, source, context in tracked]


def automatic_dynamic(code: CodeType) -> dict[str, Any]:
    """The sizes that Dynamo has seen in a frame, by source."""
    from torch._dynamo import pgo

    states = pgo.get_code_state()
    state = next((state for key, state in states.items() if _is_of(key, code)), None)
    return {} if state is None else dict(state.automatic_dynamic)


def _is_of(key: Any, code: CodeType) -> bool:
    return (key.filename, key.firstlineno, key.name) == (code.co_filename, code.co_firstlineno, code.co_name)


def add_automatic_dynamic(code: CodeType, sizes: Mapping[str, Any]) -> None:
    """Have Dynamo know the sizes that were seen in another process, as if it had traced the frame."""
    from torch._dynamo import pgo

    if sizes:
        found = pgo.get_code_state()[pgo.CodeId.make(code)].automatic_dynamic
        for name, entry in sizes.items():
            found.setdefault(name, entry)


class Differs(Exception):
    """A saved trace is of another batch, or of another state of the program."""


class RestoredOutput(OutputGraphCommon):
    """Takes the place of the `OutputGraph` of a trace."""

    export = False

    def __init__(
        self, frame: Mapping[str, Any], state: Mapping[str, Any], context: TracingContext, graph: Any, guards: Any
    ) -> None:
        fields: dict[str, Any] = {
            **state,
            "local_scope": frame["locals"],
            "global_scope": frame["globals"],
            "torch_function_mode_stack": [],
            "functorch_layers": [],
            "_guards": guards,
            "_aotautograd_guards": context.guards_context.aotautograd_guards,
        }
        assert context.fake_mode is not None
        super().__init__(OutputGraphGuardsState(**fields), shape_env=context.fake_mode.shape_env)
        self.tracing_context = context
        self.graph = graph
        self.cleanups: list[Any] = []
        self.output_pycode: list[Any] = []
        self.root_tx = None
        self.compliant_custom_ops = self.non_compliant_ops = set[Any]()
        self.tracers: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        """Dynamo reads further attributes for its logs, after the last place where an error of ours is caught."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    @property
    def shape_env(self) -> Any:
        return self._shape_env

    @property
    def placeholders(self) -> Any:
        return self.graph.find_nodes(op="placeholder")

    def is_empty_graph(self) -> bool:
        return False

    def has_outputs(self) -> bool:
        return True

    def count_calls(self) -> int:
        return sum(node.op.startswith("call") for node in self.graph.nodes)

    def get_graph_sizes_structured(self) -> dict[str, Any]:
        return {}

    def get_replayed_side_effect_source_refs(self) -> tuple[Any, ...]:
        return ()

    def install_global(self, name: str, value: Any) -> None:
        """A global that is there as long as the frame's code."""
        from torch._dynamo.output_graph import CleanupHook

        if name in self.global_scope:
            raise CannotPickle(f"the program has a global {name}")
        self.cleanups.append(CleanupHook.create(self.global_scope, name, value))

    def add_global(self, name: str, value: Any) -> None:
        """A global that stays, like those of Dynamo for a module's name or for builtins."""
        if self.global_scope.setdefault(name, value) is not value:
            raise CannotPickle(f"the program has a global {name}")

    def undo(self) -> None:
        for cleanup in self.cleanups:
            cleanup()
        self.cleanups = []


# Dynamo times guards with empty caches of the processor, for its logs, which takes as long as a fifth of making them.
_untimed = Patch(
    "making guards without timing them",
    lambda: importlib.import_module("torch._dynamo.guards"),
    profile_guard_manager=lambda original: lambda root, scope, repetitions: 0.0,
)


class RestoredFrame:
    """Takes the place of the `DynamoOutput` that `compile_frame` returns.

    Dynamo runs a frame's new code without another look at its guards, and takes guards that do not hold for an error:
    so they are made and checked before it gets them. Raises `Differs` if they do not hold.
    """

    last_attempt_start_time = None

    def __init__(self, output: RestoredOutput, frame: Mapping[str, Any], bytecode: CodeType) -> None:
        self.bytecode = bytecode
        self.pycode: list[Any] = []
        self.tracer_output = SimpleNamespace(
            error_on_graph_break=False,
            is_tracing_resume_prologue=False,
            output_graph=output,
            output_graph_for_cleanup=output,
            closure=frame.get("closure"),
            f_globals=frame["globals"],
            _cleanup_output_graph=lambda: None,
        )
        try:
            with _untimed():
                self._guards = CheckFunctionManager(frame["code"], output)
        except AssertionError as error:  # Dynamo's, for guards that do not hold
            raise Differs(str(error)) from error

    def build_guards(self, code: CodeType, hooks: Any = None, **more: Any) -> Any:
        if hooks is None or not (hooks.guard_fail_fn or getattr(hooks, "guard_filter_fn", None)):
            return self._guards
        output, filtered = self.tracer_output.output_graph, getattr(hooks, "guard_filter_fn", None)
        return CheckFunctionManager(code, output, more.get("cache_entries"), hooks.guard_fail_fn, filtered)
