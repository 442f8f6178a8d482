"""The identity of a program, as far as a saved trace depends on it and its guards do not say so.

Dynamo does not guard what it takes for granted within a process: that the code of the functions that it traced stays as
it is, that modules do not get hooks, and which configuration it traced with. Another process may differ in all of them.

Private names, checked on torch 2.13 and 2.15: `torch.utils._device.CURRENT_DEVICE`; `torch._library.custom_ops.OPDEFS`,
the operators of `torch.library.custom_op`, and the functions that they hold. Of Python: `_abc._get_dump`, whose first
element is an abstract class's registry, and `os._Environ`.
"""

from __future__ import annotations

import _abc
import abc
import dis
import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from fxpasses.dynamo.rules.idempotent_hooks import distinct
from fxpasses.graph.bodies import nodes_in
from fxpasses.restart.facts import OF_PYTHON, constant, digest_of, function_digest, tensor_fact, type_name
from fxpasses.restart.pickling import CannotPickle

_CONFIGURATIONS = ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config")


def settings() -> dict[str, str]:
    """The configuration and the state of the process that traces and compilers read, as texts."""
    found = {name: _configuration(importlib.import_module(name)) for name in _CONFIGURATIONS}
    cuda = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    dist = torch.distributed
    ranks = [dist.get_rank(), dist.get_world_size()] if dist.is_available() and dist.is_initialized() else []
    state = {
        "devices": cuda,
        "ranks": ranks,
        "dtype": torch.get_default_dtype(),
        "device": [torch.utils._device.CURRENT_DEVICE, torch.get_default_device()],
        "autocast": [(of, torch.is_autocast_enabled(of), torch.get_autocast_dtype(of)) for of in ("cpu", "cuda")],
        "numpy": getattr(sys.modules.get("numpy"), "__version__", ""),
        "matmul": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "debug": __debug__,
    }
    return {**found, **{name: repr(value) for name, value in state.items()}}


def _configuration(config: Any) -> str:
    """A digest. That of torch depends on the order of sets (`get_hash`, torch 2.13)."""
    values = sorted((name, plain(value)) for name, value in config.get_config_copy().items() if name[0] != "_")
    return hashlib.sha256(repr(values).encode()).hexdigest()[:16]


def plain(value: Any) -> str:
    """The text of a setting, the same in each process."""
    if isinstance(value, dict):
        return repr([(plain(key), plain(each)) for key, each in value.items()])
    if isinstance(value, (list, tuple)):
        return repr([plain(each) for each in value])
    if isinstance(value, (set, frozenset)):
        return repr(sorted(map(plain, value)))
    if callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return repr(value)


def order_of_sets() -> str:
    """Tells processes apart that order texts in sets differently (`PYTHONHASHSEED`)."""
    return str(hash("fxpasses"))


def classes(values: Iterable[Any], digest: Callable[[type], str]) -> dict[str, str]:
    """Digests of the types of values, and of values that are types, with all that these inherit, by name.

    digest: `class_digest`.
    """
    kinds: dict[type, None] = {}
    for value in values:
        for kind in (value if isinstance(value, type) else type(value)).__mro__:
            metaclass: type = type(kind)
            kinds.update(dict.fromkeys((kind, *metaclass.__mro__)))
    found: dict[str, list[str]] = {}
    for kind in kinds:
        if kind.__flags__ & OF_PYTHON:
            found.setdefault(type_name(kind), []).append(f"{digest(kind)}{_registered(kind)}")
    return {name: " ".join(sorted(digests)) for name, digests in found.items()}


def _registered(kind: type) -> str:
    """The classes that count as subclasses of an abstract one, because the program has said so."""
    if not isinstance(kind, abc.ABCMeta):
        return ""
    if "__subclasshook__" in vars(kind) and not is_versioned(kind.__module__):
        raise CannotPickle(f"{kind.__name__} decides by code which classes are its subclasses")
    registry = (reference() for reference in _abc._get_dump(kind)[0])
    return repr(sorted(type_name(each) for each in registry if each is not None and not is_versioned(each.__module__)))


def operators(graphs: Iterable[GraphModule]) -> dict[str, str]:
    """Digests of the Python code behind the operators in graphs that are neither PyTorch's nor this package's.

    Raises `CannotPickle` for an operator whose code is not known, or that finds its code by a name in this process.
    """
    found = {}
    for target in {node.target for gm in graphs for node in nodes_in(gm)}:
        if isinstance(target, torch._ops.OpOverloadPacket):
            target = getattr(target, target.overloads()[0])
        if isinstance(target, torch._ops.OpOverload) and target._schema.name in _OF_PROCESS:
            raise CannotPickle("it calls functions of the process by their numbers")
        if isinstance(target, torch._ops.OpOverload) and target.namespace not in _NAMESPACES:
            definition = torch._library.custom_ops.OPDEFS.get(f"{target.namespace}::{target._opname}")
            if definition is None:
                raise CannotPickle(f"it calls {target}, an operator of another library")
            found[str(target)] = _definition(definition)
    return found


_NAMESPACES = frozenset(("aten", "prim", "prims", "fxpasses", "_c10d_functional", "inductor", "higher_order"))


# Operators of this package that take functions and graphs by a number: see `register` beside each.
_OF_PROCESS = frozenset(
    f"fxpasses::{name}"
    for name in ("host_function", "host_method", "loop_over_parts", "loop_over_parts_backward", "part_function")
)


def _definition(definition: Any) -> str:
    functions = [definition._init_fn, definition._abstract_fn, definition._setup_context_fn, definition._backward_fn]
    functions += [each for _, each in sorted(definition._backend_fns.items(), key=lambda pair: str(pair[0]))]
    return " ".join(function_digest(each) for each in functions)


def environment(codes: Iterable[types.CodeType], values: Iterable[tuple[str, Any]]) -> dict[str, str | None]:
    """The variables of the environment that traced code reads, some of which Dynamo does not guard.

    values: what guards read, with their sources. Raises `CannotPickle` for one whose name is not written in the code.
    """
    if any(_is_environment(value) and not name.endswith(_BY_NAME) for name, value in values):
        raise CannotPickle("it reads the environment by another name")
    found, reads = dict[str, str | None](), False
    for code in codes:
        reads |= code in _OF_ENVIRONMENT
        if not (is_versioned_file(code.co_filename) or _READ.isdisjoint(code.co_names)):
            found.update((name, os.environ.get(name)) for name in _variables(code))
    if reads and not found:
        raise CannotPickle("it reads variables of the environment whose names are not written where it does")
    return found


_READ = frozenset(("environ", "environb", "getenv", "getenvb"))
_BY_NAME = tuple(text for name in sorted(_READ) for text in (f".{name}", f"['{name}']"))
_OF_ENVIRONMENT = frozenset(
    function.__code__
    for function in (os.getenv, os.getenvb, *vars(os._Environ).values())
    if isinstance(function, types.FunctionType)
)


def _is_environment(value: Any) -> bool:
    return isinstance(value, os._Environ) or value is os.getenv or value is os.getenvb


def _variables(code: types.CodeType) -> Iterator[str]:
    """`os.environ["X"]`, `os.environ.get("X")`, `os.getenv("X")`, `"X" in os.environ`."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
    for at, step in enumerate(steps):
        if step.argval not in _READ or step.opname.startswith("STORE"):
            continue
        after = steps[at + 1 : at + 3]
        if after and after[0].opname == "CONTAINS_OP":
            names = [each for each in reversed(steps[max(at - 2, 0) : at]) if each.opname == "LOAD_CONST"]
        else:
            names = [
                each
                for each, following in zip(after, steps[at + 2 : at + 4], strict=False)
                if each.opname == "LOAD_CONST" and following.opname.startswith(_AFTER_NAME)
            ]
        if not names or not isinstance(names[0].argval, str):
            raise CannotPickle(f"{code.co_name} reads the environment by names that are not written there")
        yield names[0].argval


_AFTER_NAME = ("CALL", "LOAD_CONST", "KW_NAMES", "BINARY_SUBSCR", "BINARY_OP_SUBSCR")


def sources(codes: Iterable[types.CodeType], objects: Iterable[Any]) -> dict[str, str]:
    """Digests of the files of the Python modules that traced code is in, or can reach by its modules' names.

    codes: what was traced. objects: functions, types and modules that guards compare, and what owns them. Raises
    `CannotPickle` for code that is in no module's file, and for a file that was written after the process began, which
    may have imported it before.
    """
    of_file = {getattr(module, "__file__", None): name for name, module in list(sys.modules.items())}
    names, generated = set[str](), set[types.CodeType]()
    for code in codes:
        if is_versioned_file(code.co_filename):
            continue
        if code.co_filename in of_file:
            names.add(of_file[code.co_filename])
        else:
            generated.add(code)
    for value in objects:
        names |= set(_module_names(value))
    found = _reachable(names)
    for code in generated.difference(_methods(found)) if generated else ():
        raise CannotPickle(f"{code.co_name} is in {code.co_filename}, which is no module's file")
    return {name: file_digest(name) for name in sorted(found) if _file(name)}


def _methods(names: Iterable[str]) -> Iterator[types.CodeType]:
    """The code of the methods of modules' classes, some of which Python generates, as those of data classes."""
    for name in names:
        for kind in list(vars(sys.modules[name]).values()) if name in sys.modules else ():
            if isinstance(kind, type):
                yield from (method.__code__ for method in vars(kind).values() if isinstance(method, types.FunctionType))


def is_versioned_file(name: str) -> bool:
    if name.startswith("<frozen "):  # a module of Python's own
        return True
    return name.startswith((_TORCH, _PACKAGE, _STANDARD)) and not name.startswith(_OTHER_PACKAGES)


_TORCH = os.path.dirname(torch.__file__) + os.sep
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_OTHER_PACKAGES = tuple(os.path.join(_STANDARD, name) + os.sep for name in ("site-packages", "dist-packages"))


def _reachable(names: set[str]) -> set[str]:
    found, seen = set[str](), set[str]()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if is_versioned(name):
            continue
        found.add(name)
        module = sys.modules.get(name)
        for value in list(vars(module).values()) if module is not None else ():
            waiting += _module_names(value)
    return found


def _module_names(value: Any) -> list[str]:
    if isinstance(value, types.ModuleType):
        return [value.__name__]
    of = value.__mro__ if isinstance(value, type) else (value if _is_function(value) else type(value),)
    return [name for each in of if isinstance(name := getattr(each, "__module__", None), str)]


def _is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType))


def is_versioned(name: str) -> bool:
    """Whether a module is Python's, PyTorch's or this package's, which all have a version in the file."""
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is None or not os.path.isabs(file):  # `torch.ops` has such a file
        return name not in sys.modules or name.partition(".")[0] in ("torch", *sys.stdlib_module_names)
    return file.startswith(_NUMPY) or is_versioned_file(file)


_NUMPY = os.path.join(os.path.dirname(os.path.dirname(torch.__file__)), "numpy", "")


def _file(name: str) -> str | None:
    """The file of a Python module, loaded or not."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
    else:
        spec = importlib.util.find_spec(name)
        file = None if spec is None else spec.origin
    return file if isinstance(file, str) and file.endswith(".py") else None


def file_digest(name: str) -> str:
    """The digest of a Python module's file. Raises `CannotPickle` if it cannot be read, or was written to since the
    process began: what is in memory may be what was in it before."""
    file = _file(name)
    if file is None:
        raise CannotPickle(f"the module {name} has no file")
    try:
        if os.path.getmtime(file) > _started():
            raise CannotPickle(f"{file} was written to after the process had begun")
        return hashlib.blake2b(Path(file).read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise CannotPickle(f"{file} cannot be read: {error}") from error


@functools.cache
def _started() -> float:
    """When this process began, in seconds since the epoch; where that is not known, when this module was imported."""
    try:
        ticks = float(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        lines = Path("/proc/stat").read_text().splitlines()
        booted = next(float(line.split()[1]) for line in lines if line.startswith("btime "))
    except (OSError, StopIteration, ValueError, IndexError):
        return _IMPORTED
    return min(_IMPORTED, booted + ticks / os.sysconf("SC_CLK_TCK") + 1)


_IMPORTED = time.time()


def modules_digest(roots: Iterable[torch.nn.Module], digest: Callable[[type], str]) -> str:
    """A digest of modules with all that they own: their classes, hooks, flags, constants, parameters and buffers.

    Sizes count, values of tensors do not. digest: `class_digest`. Raises `CannotPickle` for hooks, which are functions
    of a process.
    """
    tensors: dict[int, int] = {}
    seen: dict[int, int] = {}
    text = []
    for root in roots:
        for path, module in root.named_modules(remove_duplicate=False):
            number = seen.setdefault(id(module), len(seen))
            text.append(f"{path} {number}")
            if number == len(seen) - 1:
                text += [digest(type(module)), *_described(module, tensors)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def _described(module: torch.nn.Module, tensors: dict[int, int]) -> list[str]:
    lines = [type_name(type(module))]
    for name, value in sorted(vars(module).items()):
        if name in ("_parameters", "_buffers"):
            for key, tensor in value.items():
                lines.append(f"{name} {key} {_tensor(tensor, tensors)}")
        elif name in _HOOKS:
            lines.append(f"{name} {_hooks(module, name)}" if value else "")
        elif name not in _UNREAD:
            lines.append(f"{name} {_value(value, tensors)}")
    return lines


def _hooks(module: torch.nn.Module, name: str) -> str:
    effects = [effect for _, effect in distinct(getattr(module, name), getattr(module, f"{name}_with_kwargs", {}))]
    if None in effects:
        raise CannotPickle(f"a {type(module).__name__} has hooks")
    return repr(effects)


_HOOKS = frozenset(name for name in vars(torch.nn.Module()) if "_hooks" in name and "state_dict" not in name)
_UNREAD = ("_modules", "_compiled_call_impl", "_non_persistent_buffers_set", "_is_full_backward_hook")


def _tensor(tensor: Any, tensors: dict[int, int]) -> str:
    if tensor is None:
        return "None"
    number = tensors.setdefault(id(tensor), len(tensors))
    return f"{number} {tuple(tensor.shape)} {tensor.stride()} {tensor_fact(tensor)}"


def _value(value: Any, tensors: dict[int, int]) -> str:
    """A constant, or what kind of object it is: what a trace reads of an object is guarded."""
    if isinstance(value, torch.Tensor):
        return _tensor(value, tensors)
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return f"{value.__qualname__} {digest_of(value.__code__)}"
    if isinstance(value, (set, frozenset)):
        return repr(sorted(_value(each, tensors) for each in value))
    if isinstance(value, (list, tuple, dict)):
        try:
            return repr(constant(value))
        except CannotPickle:
            return f"{type_name(type(value))} {len(value)}"
    try:
        return repr(constant(value))
    except CannotPickle:
        return type_name(type(value))


def differs(saved: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The first key for which two identities differ; "" if none."""
    return next((key for key in {**saved, **now} if saved.get(key) != now.get(key)), "")
