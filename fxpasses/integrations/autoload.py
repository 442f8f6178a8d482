"""Makes accelerate and transformers know the name `fastpack`, in programs that never import fxpasses.

accelerate checks the names of backends against its own enumeration, and has no plug-in point. PyTorch has one: `import
torch` calls the entry points of group `torch.backends`, which are meant for devices, and accelerate imports torch. So
if fxpasses is installed, `autoload` runs in every process that imports torch. It imports neither accelerate nor torch:
it adds a finder to `sys.meta_path`, which compares the name of each module that is imported, and which is removed once
accelerate's module has been found. `import fxpasses` does the same, for `TORCH_DEVICE_BACKEND_AUTOLOAD=0`.

Nothing here may raise: an entry point that raises makes `import torch` fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fxpasses.integrations import accelerate_names, experts_interface

Hook = Callable[[ModuleType], None]
_BACKEND = '"fastpack" is no name of a backend for accelerate. fxpasses.FastpackCallback compiles without its help.'

# By module, the hook that runs once the module has been imported, and what does not work if it fails.
HOOKS: dict[str, tuple[Hook, str]] = {
    accelerate_names.ENUMERATION: (accelerate_names.add_to_enumeration, _BACKEND),
    accelerate_names.MENU: (accelerate_names.add_to_menu, _BACKEND),
    experts_interface.MODULE: (
        experts_interface.register,
        'transformers has no implementation of experts "fastpack"; "eager" and "grouped_mm" are there.',
    ),
}


def autoload() -> None:
    """Run the hooks of modules that are already imported, and wait for the others."""
    missing = []
    for name in HOOKS:
        module = sys.modules.get(name)
        if module is None or getattr(getattr(module, "__spec__", None), "_initializing", False):
            missing.append(name)
        else:
            _run(module)
    if missing and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(missing))


def _run(module: ModuleType) -> None:
    hook, effect = HOOKS[module.__name__]
    try:
        hook(module)
    except Exception as error:
        from fxpasses.base.once import warn_once

        warn_once(("autoload", module.__name__), f"{effect} ({type(error).__name__}: {error})")


class _Finder:
    """Finds the modules of `HOOKS` by the other finders, and has their loaders run the hooks."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = set(names)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.names:
            return None
        self.names.discard(name)
        if not self.names and self in sys.meta_path:
            sys.meta_path.remove(self)
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader:
    """Loads a module, and then runs its hook; the module keeps its own loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: Any) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self.loader
        if module.__spec__ is not None:
            module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        _run(module)
