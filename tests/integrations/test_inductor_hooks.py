"""Passes under `backend="inductor"`, by Inductor's own hooks."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fxpasses
import fxpasses.inspect
from fxpasses import registry
from fxpasses.dynamo.flags import FLAGS

pytestmark = pytest.mark.all_cases

EXPERTS, TOKENS, HIDDEN = 4, 24, 8


def experts(x: Tensor, router: Tensor, weight: Tensor) -> Tensor:
    """A loop over experts that Dynamo captures whole."""
    scores, chosen = torch.topk(torch.softmax(x @ router, -1), 2)
    routed = torch.zeros_like(x)
    for expert in range(EXPERTS):
        token, slot = torch.where(chosen == expert)
        routed = routed.index_add(0, token, torch.tanh(x[token] @ weight[expert]) * scores[token, slot, None])
    return routed


def checkpointed(x: Tensor, router: Tensor, weight: Tensor) -> Tensor:
    return checkpoint(experts, x, router, weight, use_reentrant=False) + x


@pytest.fixture
def inputs() -> list[Tensor]:
    shapes = (TOKENS, HIDDEN), (HIDDEN, EXPERTS), (EXPERTS, HIDDEN, HIDDEN)
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.fixture(autouse=True)
def flags_are_on() -> Iterator[None]:
    with torch._dynamo.config.patch(dict.fromkeys(FLAGS, True)):
        yield


def results(program: Any, inputs: list[Tensor]) -> list[Tensor]:
    output = program(*inputs)
    return [output, *torch.autograd.grad(output.square().sum(), inputs)]


@pytest.mark.slow
@pytest.mark.parametrize("program", [experts, checkpointed])
def test_a_loop_over_experts_is_grouped(program: Any, inputs: list[Tensor]) -> None:
    options = fxpasses.inductor_options({"fastpack.strict": True})
    # A warm cache on disk, as a run before this one leaves it, runs no pass.
    with fxpasses.inspect.record() as record, torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(program, backend="inductor", options=options)
        torch.testing.assert_close(results(compiled, inputs), results(program, inputs))
    assert record.figures("group_experts") == {"loops_grouped": 1}, record
    assert [graph.outcome for graph in record.graphs] == ["rewritten"]


def test_a_topk_is_split() -> None:
    def program(x: Tensor) -> Tensor:
        return x.topk(5).values

    x = torch.linspace(-1, 3, 250_003).sin().expand(2, -1)
    options = fxpasses.inductor_options({"fastpack.strict": True, "fastpack.topk": "split"})
    with fxpasses.inspect.record() as record, torch._inductor.config.patch(force_disable_caches=True):
        found = torch.compile(program, backend="inductor", options=options)(x)
    assert record.figures("split_topk") == {"topk": 1}
    assert torch.equal(found, program(x))


def test_a_graph_without_anything_to_do_stays() -> None:
    compiled = torch.compile(torch.sin, backend="inductor", options=fxpasses.inductor_options())
    with fxpasses.inspect.record() as record:
        assert torch.allclose(compiled(torch.ones(3)), torch.sin(torch.ones(3)))
    assert [graph.outcome for graph in record.graphs] in ([], ["captured"])  # a warm cache runs no pass


def test_inductors_own_options_go_along() -> None:
    found = fxpasses.inductor_options({"shape_padding": False, "fastpack.passes": ["coalesce_reads"]})
    assert found["shape_padding"] is False and found["pre_grad_custom_pass"].passes[0].name == "coalesce_reads"


def test_caches_tell_options_apart() -> None:
    kinds = [{}, {"fastpack.experts": "slices"}, {"fastpack.passes": ["coalesce_reads"]}, {"fastpack.topk": "split"}]
    uuids = [fxpasses.inductor_options(kind)["pre_grad_custom_pass"].uuid() for kind in kinds]
    assert len(set(uuids)) == 4
    assert uuids[0] == fxpasses.inductor_options()["pre_grad_custom_pass"].uuid()
    hook = pickle.loads(pickle.dumps(fxpasses.inductor_options()["pre_grad_custom_pass"]))
    assert hook.uuid() == uuids[0]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fastpack.passes": ["hoist_metadata"]}, r"needs backend=\"fastpack\".*once per batch"),
        ({"fastpack.passes": ["sparsify_attention"]}, "plans would be made in every layer"),
        ({"fastpack.passes": ["fold_layers"]}, "bodies of layers apart"),
        ({"fastpack.capture": "on"}, r"no effect.*capture_scalar_outputs"),
        ({"fastpack.attention": "auto"}, "no effect"),
        ({"fastpack.lowering": "aot_eager"}, "the lowering is Inductor's"),
        ({"fastpack.mode": "max-autotune"}, "list_mode_options"),
        ({"fastpack.offload": "disk"}, "donated_buffer = False"),
        ({"pre_grad_custom_pass": print}, "is given, and fxpasses needs it"),
        ({"fastpack.pases": []}, "did you mean 'fastpack.passes'"),
    ],
)
def test_what_the_hooks_have_no_place_for_is_refused_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        fxpasses.inductor_options(given)


def test_activations_are_offloaded(inputs: list[Tensor]) -> None:
    before = fxpasses.offload_stats()
    with torch._functorch.config.patch(donated_buffer=False):
        options = {"fastpack.offload": "disk", "fastpack.offload.min_bytes": 0, "fastpack.passes": [
            "offload_activations"]}  # fmt: skip

        def program(x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(x) @ torch.ones(HIDDEN, HIDDEN) / HIDDEN
            return x

        given = fxpasses.inductor_options(options)
        assert set(given) == {"custom_partitioner_fn"}
        compiled = torch.compile(program, backend="inductor", options=given)
        torch.testing.assert_close(results(compiled, inputs[:1]), results(program, inputs[:1]))
    assert fxpasses.offload_stats() != before


def test_the_page_says_how_many_passes_the_hooks_run() -> None:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    passes = [entry for entry in registry.PASSES if entry.graphs != registry.PARTITIONED]
    kept = [entry for entry in passes if not entry.not_in_inductor]
    page = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text()
    assert f"[{words[len(kept)]} passes of {words[len(passes)]}, and offloading]" in page
