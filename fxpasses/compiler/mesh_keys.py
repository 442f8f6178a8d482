"""Graphs with DTensors have the same keys in PyTorch's caches in every process.

The keys digest what a graph's inputs are, pickled; a DTensor brings its `DeviceMesh`, and that keeps its own hash in a
field, `hash()` of objects and strings, which Python salts anew for each process. So no process found what another had
compiled. A mesh computes the hash again if the field is not there; what a cache restores is better without it as well.

Private names, checked on torch 2.11, 2.13 and 2.15: `DeviceMesh.__getstate__` and its field `_hash`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from fxpasses.base.patching import Patch


def _mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh


def _without_hash(state_of: Callable[[Any], dict[str, Any]]) -> Callable[[Any], dict[str, Any]]:
    def state(self: Any) -> dict[str, Any]:
        return {name: value for name, value in state_of(self).items() if name != "_hash"}

    return state


_leaving_out_hashes = Patch("finding graphs with DTensors in caches", _mesh, __getstate__=_without_hash)


def without_hashes() -> contextlib.AbstractContextManager[None]:
    """Inside, meshes are pickled without their hash."""
    return _leaving_out_hashes() if "torch.distributed.device_mesh" in sys.modules else contextlib.nullcontext()
