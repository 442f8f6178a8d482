"""The code that Inductor writes for a program on a device that is not there, forward and backward."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from fxpasses import fastpack_backend
from tests.cuda_code.absent_device import AbsentDevice

_WITHOUT_DEVICE = {
    "force_disable_caches": True,
    "compile_threads": 1,  # the stand-ins are in this process
    "joint_graph_constant_folding": False,  # it fills small tensors on the device
    "use_static_triton_launcher": False,  # it keeps the binary alone
}


@dataclass
class Code:
    """A compiled graph: its wrapper's source, and the PTX of each of its Triton kernels by name."""

    wrapper: str
    is_backward: bool
    ptx: dict[str, str] = field(default_factory=dict)


class _Stop(Exception):
    """Dynamo would call the compiled graph next."""


def generate(device: AbsentDevice, program: Any, *inputs: Any, **options: Any) -> list[Code]:
    """What the backend compiles of a program for tensors on the device: its prologue if it is worth it, and its graph.

    Backward is compiled with forward, and not when it is called. Nothing runs. `options` are the backend's.
    """
    given = {"fastpack.strict": True} | options

    def backend(gm: Any, examples: Any) -> Any:
        fastpack_backend(gm, examples, options=given)

        def stop(*_: Any) -> None:
            raise _Stop

        return stop

    backend._is_fastpack = True  # type: ignore[attr-defined] - dynamo/ recognises its traces by it
    torch._dynamo.reset()
    with collecting() as found, contextlib.suppress(_Stop):
        torch.compile(device.tensors(program), backend=backend, fullgraph=True)(*device.tensors(inputs))
    return found


@contextlib.contextmanager
def collecting() -> Iterator[list[Code]]:
    """Collect what Inductor writes, compile each kernel to PTX, and launch none.

    Private names, checked on torch 2.15: `GraphLowering.save_output_code`, which PyTorch's own `run_and_get_code`
    replaces, too; `AsyncCompile.triton`, which compiles a kernel of a wrapper; `_load_triton_kernel_from_source`,
    `skip_gpu_driver_setup` and `precompile(warm_cache_only=True)`, which its processes call, and which need no device.
    """
    from torch._inductor import config
    from torch._inductor.async_compile import AsyncCompile, _load_triton_kernel_from_source
    from torch._inductor.graph import GraphLowering
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.virtualized import V

    found: list[Code] = []

    def save(source: str) -> None:
        found.append(Code(source, bool(V.graph.is_backward)))

    def compile_kernel(_: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        with triton_helpers.skip_gpu_driver_setup():
            kernel = _load_triton_kernel_from_source(name, source)
            kernel.precompile(warm_cache_only=True)
        found[-1].ptx[name] = kernel.compile_results[0].kernel.asm["ptx"]
        return kernel

    functorch: Any = torch._functorch.config
    with (
        config.patch(_WITHOUT_DEVICE),
        functorch.patch(force_non_lazy_backward_lowering=True),
        mock.patch.object(GraphLowering, "save_output_code", staticmethod(save)),
        mock.patch.object(AsyncCompile, "triton", compile_kernel),
    ):
        yield found
