"""transformers' experts by the implementation "fastpack": eager mode's numbers, compiled and not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 3, "use_cache": False,
}  # fmt: skip
# Without a bias, [E, out, in]; with one, [E, in, out], and a gate of its own.
KINDS = {
    "Qwen3Moe": {"num_experts": 8, "moe_intermediate_size": 24},
    "GptOss": {"num_local_experts": 8},
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).double()


def found(step: Any, model: Any, ids: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss = step(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_and_one_graph(kind: str) -> None:
    model, ids = made(kind), torch.randint(0, 64, (2, 24))
    model.set_experts_implementation("eager")
    expected = found(model, model, ids)
    model.set_experts_implementation("fastpack")
    torch.testing.assert_close(found(model, model, ids), expected, rtol=1e-9, atol=1e-9)
    torch._dynamo.reset()
    counters.clear()
    step = torch.compile(model, backend="fastpack", options={"fastpack.lowering": "eager"})
    torch.testing.assert_close(found(step, model, ids), expected, rtol=1e-9, atol=1e-9)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_experts_of_other_ranks_add_nothing() -> None:
    """Their number is that of this rank's experts."""
    experts = made("Qwen3Moe").float().model.layers[0].mlp.experts
    x, weights = torch.randn(16, 32), torch.rand(16, 3)
    chosen = torch.randint(0, 9, (16, 3))
    chosen[0] = 8  # this token has none here
    results = []
    for name in ("grouped_mm", "fastpack"):
        experts.config._experts_implementation, experts._is_expert_parallel = name, True
        results.append(experts(x, chosen, weights))
    torch.testing.assert_close(results[1], results[0])
    assert results[1][0].eq(0).all()
