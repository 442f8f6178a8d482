"""What a step does, as the profiler and Dynamo's counters show it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

# Operators that make the host wait for the device, or whose result has a size that depends on data.
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique2", "aten::masked_select")
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
# On the CPU it reads the offsets, which lie there, one by one; on a device it reads nothing.
READS_ITSELF = "aten::_grouped_mm"
COPY_TO_HOST = "Memcpy DtoH"
TOP = 12


def counted(result: profile) -> Counter[str]:
    """How often each operator ran, less the reads that `F.grouped_mm` makes of its offsets."""
    return Counter(e.name for e in result.events() if not (e.name in HOST_READS and _within(e, READS_ITSELF)))


def profiled(step: Callable[[], Any]) -> profile:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as result:
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    return result


def counts(step: Callable[[], Any]) -> dict[str, int]:
    """One step's host reads and ATen operators; on CUDA kernel launches, waits and device-to-host copies as well.

    Neither an eager `.tolist()` of a CPU tensor nor a loop that Inductor compiled for the CPU shows in a profile.
    """
    result = profiled(step)
    seen, read = Counter({event.key: event.count for event in result.key_averages()}), counted(result)
    found = {
        "host_reads": sum(read[name] for name in HOST_READS),
        "operators": sum(count for name, count in seen.items() if name.startswith("aten::")),
    }
    if torch.cuda.is_available():
        # `profiled` itself waits once.
        found["launches"] = sum(seen[name] for name in LAUNCHES)
        found["waits"] = sum(seen[name] for name in WAITS) - 1
        found["copies_to_host"] = sum(count for name, count in seen.items() if name.startswith(COPY_TO_HOST))
    return found


def _within(event: Any, name: str) -> bool:
    while event is not None and event.name != name:
        event = event.cpu_parent
    return event is not None


def allocated_bytes(step: Callable[[], Any]) -> int:
    """The most that tensors on the CPU held at once during a step, beyond what they held before it.

    The resident set of a process has the allocator's unused memory in it as well. Files that a step maps do not count.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as result:
        step()
    assert result.profiler is not None
    events, found = list(result.profiler.kineto_results.experimental_event_tree()), []
    while events:
        event = events.pop()
        events.extend(event.children)
        if event.typed[0] == _EventType.Allocation:
            is_file = event.parent is not None and event.parent.name == "aten::from_file"
            found.append((event.start_time_ns, event.typed[1].ptr, event.typed[1].alloc_size, is_file))
    files: set[int] = set()
    held = most = 0
    for _, address, size, is_file in sorted(found):
        if is_file:
            files.add(address)
        elif address not in files:
            held += size
            most = max(most, held)
        elif size < 0:
            files.remove(address)
    return most


def top_operators(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """Where a step's time goes: the operators with the most self time (ms), on the device or else the CPU."""
    on = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
    events = sorted(profiled(step).key_averages(), key=lambda event: getattr(event, on), reverse=True)
    return [{"operator": e.key, "calls": e.count, "ms": round(getattr(e, on) / 1000, 3)} for e in events[:TOP]]


def timeline(step: Callable[[], Any]) -> list[dict[str, Any]]:
    """When copies in either direction and kernels ran on the device, as spans in ms from the first one."""
    events = [e for e in profiled(step).events() if e.device_type == torch.autograd.DeviceType.CUDA]
    if not events:
        return []
    zero = min(event.time_range.start for event in events)
    return [
        {
            "lane": next((way for way in ("DtoH", "HtoD") if way in event.name), "kernels"),
            "start": (event.time_range.start - zero) / 1000,
            "ms": event.time_range.elapsed_us() / 1000,
        }
        for event in events
    ]


def graphs() -> dict[str, int]:
    """Graphs that Dynamo captured, and graph breaks, since the process began."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled, and it takes seconds to import
        return {"graphs": 0, "graph_breaks": 0}
    from torch._dynamo.utils import counters

    return {"graphs": counters["stats"]["unique_graphs"], "graph_breaks": sum(counters["graph_break"].values())}
