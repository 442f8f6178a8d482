"""What Inductor's code for a graph allocates and frees, read from the code."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch.fx import Graph

from fxpasses.memory.workspace import workspace_of
from fxpasses.memory.wrapper_code import NotRead, WrapperCode, read

CODE = """
def cpp_fused_add_0(): ...

class Runner:
    def call(self, args):
        x, w, s7 = args
        args.clear()
        assert_size_stride(x, (s7, 16), (16, 1), 'input')
        s8 = 2*s7
{body}
        return (a, )
"""


def known(body: str, device: str = "cpu") -> WrapperCode:
    lines = "\n".join(f"        {line.strip()}" for line in body.strip().splitlines())
    return read(CODE.format(body=lines), ("x", "w"), {"s7": 8}, device, lambda shape, strides: 2)


def lives(code: WrapperCode) -> list[int]:
    """The bytes of results after each statement of the body."""
    return list(itertools.accumulate(code.changes))[4:-1]


def test_results_are_freed_with_their_last_name() -> None:
    code = known(
        """
        a = empty_strided_cpu((s8, 16), (16, 1), torch.float32)
        cpp_fused_add_0(x, a)
        del x
        b = reinterpret_tensor(a, (16, s8), (1, 16), 0); del a  # reuse
        a = empty_strided_cpu((s7, ), (1, ), torch.int64)
        del b
        """
    )
    assert lives(code) == [1024, 1024, 1024, 1024, 1024, 1088, 64]
    assert code.dropped == {"x": 6}


def test_results_of_an_operator_live_from_its_call_to_the_end_of_all() -> None:
    code = known(
        """
        whole = torch.ops.aten.sort.stable(x, stable=True)
        a = empty_strided_cpu((1, ), (1, ), torch.float32)
        p = whole[0]
        assert_size_stride(p, (10, ), (1, ), 'sort')
        del p
        q = whole[1]
        assert_size_stride(q, (20, ), (1, ), 'sort')
        del whole
        del q
        """
    )
    assert lives(code) == [60, 64, 64, 64, 64, 64, 64, 44, 4]
    assert ("sort", 4) in code.operators


def test_memory_of_another_device_does_not_count() -> None:
    text = "a = empty_strided_cuda((4, ), (1, ), torch.float32)\nb = empty_strided_cpu((64, ), (1, ), torch.float32)"
    assert lives(known(text, "cuda")) == [512, 512]  # a block of the allocator


def test_branches_of_devices_are_read() -> None:
    text = "with torch.cuda._DeviceGuard(0):\n            a = empty_strided_cuda((4, ), (1, ), torch.float32)"
    code = read(CODE.format(body=f"        {text}"), ("x", "w"), {"s7": 8}, "cuda", lambda *_: 4)
    assert sum(code.changes) == 512


@pytest.mark.parametrize(
    "body", ["a = empty_strided_cpu((u0, ), (1, ), torch.float32)", "for a in x: pass", "a = b[0]", "x.y = w"]
)
def test_what_is_not_known_is_not_guessed(body: str) -> None:
    with pytest.raises(NotRead):
        known(body)


def test_code_of_another_form_is_not_read() -> None:
    with pytest.raises(NotRead):
        read("def partition_0(args): ...\ndef call(args): ...", (), {}, "cpu", lambda *_: 4)


@pytest.mark.parametrize(("rows", "heads"), [(1024, 4), (300, 2)])
def test_buffers_of_attention(rows: int, heads: int) -> None:
    """What the CPU's kernel is seen to allocate besides its results."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = (torch.randn(1, heads, rows, 32) for _ in range(3))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    out, logsumexp = flash(q, k, v)
    arguments: Any = (torch.randn_like(q), q, k, v, out, logsumexp, 0.0, False)
    for target, given in ((flash, (q, k, v)), (back, arguments)):
        graph = Graph()
        nodes = []
        for value in given:
            nodes.append(graph.placeholder("x") if isinstance(value, torch.Tensor) else value)
            if isinstance(value, torch.Tensor):
                nodes[-1].meta["val"] = value
        node = graph.call_function(target.default, tuple(nodes))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            results = target(*given)
        assert seen.profiler is not None
        events = sorted(
            (e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
        )
        most = max(itertools.accumulate(e.nbytes() for e in events))
        own = sum(result.untyped_storage().nbytes() for result in results)
        assert workspace_of(node) == pytest.approx(most - own, rel=0.1, abs=4096)
