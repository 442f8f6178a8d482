"""`model.set_experts_implementation("fastpack")`: experts of transformers in one grouped product each, from the start.

    order = experts.sort()                                    the choices of all tokens, by expert
    y = grouped_mm(x[order // k], gate_up_proj, offsets)      of [N * k] rows
    y = grouped_mm(act(gate) * up, down_proj, offsets)

transformers has a registry of implementations (`integrations/moe.py`, `ExpertsInterface`). Its `"eager"` is a loop,
which `group_experts` finds in the graph; this one leaves nothing to find, and so also serves graphs in which the loop's
effects cannot be proved, and eager mode. Sums over a token's experts are those of transformers' `"grouped_mm"`.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MODULE = "transformers.integrations.moe"
NAME = "fastpack"


def register(module: ModuleType) -> None:
    """Called once `module`, transformers' module of experts, has been imported."""
    module.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' results, weighted and added, [N, H]. self: transformers' module. hidden_states: [N, H].

    top_k_index: int64 [N, k], the experts of each token; one that is not less than their number is on another rank, and
    adds nothing. top_k_weights: [N, k].
    """
    import torch  # at the first call: what is registered must not delay an import

    import fxpasses.experts.runtime.grouped_linear  # noqa: F401 - defines the operators

    ops = torch.ops.fxpasses
    tokens, k = top_k_index.shape
    experts, order = top_k_index.reshape(-1).sort(stable=True)
    ends = torch.arange(self.num_experts, device=experts.device)
    offsets = torch.searchsorted(experts, ends, right=True)  # choices of other ranks come last, and their rows are 0

    def product(rows: Tensor, name: str) -> Tensor:
        bias = getattr(self, f"{name}_bias") if self.has_bias else None
        found: Tensor = ops.grouped_mm.default(rows, getattr(self, name), offsets, bias, not self.is_transposed)
        return found

    rows: Tensor = ops.gather_rows.default(hidden_states, order // k)
    rows = self._apply_gate(product(rows, "gate_up_proj")) if self.has_gate else self.act_fn(product(rows, "up_proj"))
    rows = product(rows, "down_proj")
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    rows = rows * top_k_weights.reshape(-1)[order].unsqueeze(-1)
    place = torch.empty_like(order)
    place[order] = torch.arange(order.shape[0], device=order.device)
    added = rows[place].view(tokens, k, -1).sum(1)
    return added.to(hidden_states.dtype)
