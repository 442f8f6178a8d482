"""What the spellings of mixture-of-experts loops have in common: routers, experts, and the model around a loop.

A `Spelling` names a loop and says what is special about it. `Moe` is the model that it makes: router, experts, loop.
Its `reference` is the same without a loop: every expert on every token, `out[t] = sum_k w[t, k] * expert(x[t])`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# A width of 32: where a group is not made of whole vectors, CPU kernels of silu and others round its last elements
# differently than among all rows, so that no grouped form could be equal to the loop bit for bit.
HIDDEN, WIDTH, EXPERTS, TOP = 16, 32, 4, 2

# Routers: float32 logits [T, E] and a bias [E] to (weights [T, k], experts [T, k])

Router = Callable[[Tensor, int, Tensor], tuple[Tensor, Tensor]]


def softmax_then_topk(logits: Tensor, top: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Mixtral, Qwen-MoE: the chosen probabilities, normalised again."""
    weights, idx = torch.topk(logits.softmax(-1), top, dim=-1)
    return weights / weights.sum(-1, keepdim=True), idx


def topk_then_softmax(logits: Tensor, top: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """GPT-OSS, JetMoe."""
    values, idx = torch.topk(logits, top, dim=-1)
    return values.softmax(-1), idx


def sigmoid_in_groups(logits: Tensor, top: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """DeepSeek-V3: sigmoid scores, chosen with a correction bias within the better of two groups of experts."""
    scores = logits.sigmoid()
    corrected = scores + bias
    groups = corrected.view(-1, 2, corrected.shape[1] // 2)
    best = groups.topk(min(2, groups.shape[2]), dim=-1)[0].sum(-1).topk(1, dim=-1)[1]
    allowed = torch.zeros_like(groups[..., 0]).scatter(1, best, 1.0)
    masked = groups.masked_fill(~allowed.bool().unsqueeze(-1), float("-inf")).flatten(1)
    idx = masked.topk(top, dim=-1, sorted=False)[1]
    weights = scores.gather(1, idx)
    return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, idx


def sigmoid_of_topk(logits: Tensor, top: int, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Llama 4: the scores are not normalised, and multiply the input of the expert."""
    values, idx = torch.topk(logits, top, dim=-1)
    return values.sigmoid(), idx


# Experts: `experts(e, rows)` is expert e on rows [n, HIDDEN]


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def weight(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(self.count, *shape) * 0.3)


class SwiGluStacked(Experts):
    """One parameter for all experts, gate and up fused: Llama 4's layout."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.gate_up, self.down = self.weight(HIDDEN, 2 * WIDTH), self.weight(WIDTH, HIDDEN)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        gate, up = (rows @ self.gate_up[e]).chunk(2, dim=-1)
        return (F.silu(gate) * up) @ self.down[e]


class SwiGluTransposed(Experts):
    """Stacked as `nn.Linear` stores weights: Mixtral, Qwen3-MoE and others in transformers 5."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.gate_up, self.down = self.weight(2 * WIDTH, HIDDEN), self.weight(HIDDEN, WIDTH)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.gate_up[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.down[e])


class SwiGluSeparate(Experts):
    """Three stacked parameters, each transposed for the product: torchtitan."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.w1, self.w2, self.w3 = self.weight(WIDTH, HIDDEN), self.weight(HIDDEN, WIDTH), self.weight(WIDTH, HIDDEN)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        hidden = F.silu(torch.matmul(rows, self.w1[e].transpose(-2, -1)))
        hidden = hidden * torch.matmul(rows, self.w3[e].transpose(-2, -1))
        return torch.matmul(hidden, self.w2[e].transpose(-2, -1))


class SwiGluFlat(Experts):
    """All experts in one matrix, viewed as many: DBRX."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(count * WIDTH, HIDDEN) * 0.3) for _ in range(3))

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        w1, v1, w2 = (w.view(self.count, WIDTH, HIDDEN)[e] for w in (self.w1, self.v1, self.w2))
        return (F.silu(rows.matmul(w1.t())) * rows.matmul(v1.t())).matmul(w2)


class GeluStacked(Experts):
    """Product and bias as two operators."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.up, self.up_bias = self.weight(HIDDEN, WIDTH), self.weight(WIDTH)
        self.down, self.down_bias = self.weight(WIDTH, HIDDEN), self.weight(HIDDEN)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        return F.gelu(rows @ self.up[e] + self.up_bias[e]) @ self.down[e] + self.down_bias[e]


class GptOss(Experts):
    """Interleaved gate and up, clamped: GPT-OSS."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.gate_up, self.gate_up_bias = self.weight(HIDDEN, 2 * WIDTH), self.weight(2 * WIDTH)
        self.down, self.down_bias = self.weight(WIDTH, HIDDEN), self.weight(HIDDEN)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        gate_up = rows @ self.gate_up[e] + self.gate_up_bias[e]
        gate, up = gate_up[..., ::2].clamp(max=7.0), gate_up[..., 1::2].clamp(min=-7.0, max=7.0)
        return ((up + 1) * (gate * torch.sigmoid(gate * 1.702))) @ self.down[e] + self.down_bias[e]


class LoraStacked(Experts):
    """Frozen stacked weights with a low-rank adapter beside each."""

    def __init__(self, count: int, rank: int = 2) -> None:
        super().__init__(count)
        self.up, self.down = self.weight(WIDTH, HIDDEN), self.weight(HIDDEN, WIDTH)
        self.up_a, self.up_b = self.weight(rank, HIDDEN), self.weight(WIDTH, rank)

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        adapted = F.linear(F.linear(rows, self.up_a[e]), self.up_b[e]) * 0.5
        return F.linear(F.silu(F.linear(rows, self.up[e].detach()) + adapted), self.down[e].detach())


class Listed(Experts):
    """One module for each expert, in an `nn.ModuleList`."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.experts = nn.ModuleList(self.expert(e) for e in range(count))

    def expert(self, e: int) -> nn.Module:
        raise NotImplementedError

    def forward(self, e: Any, rows: Tensor) -> Tensor:
        return self.experts[e](rows)


class SwiGluMlp(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(HIDDEN, width, bias=False), nn.Linear(HIDDEN, width, bias=False)
        self.w2 = nn.Linear(width, HIDDEN, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(rows)) * self.w3(rows))


class SwiGluLinears(Listed):
    """Mixtral and DeepSeek-V2, V3 up to transformers 4."""

    def expert(self, e: int) -> nn.Module:
        return SwiGluMlp()


class GeluLinears(Listed):
    """With biases, so that each layer is one `addmm`: Switch-like models, tutorials."""

    def expert(self, e: int) -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, WIDTH), nn.GELU(), nn.Linear(WIDTH, HIDDEN))


class ReluSquared(nn.Module):
    def forward(self, rows: Tensor) -> Tensor:
        return F.relu(rows).square()


class ReluSquaredLinears(Listed):
    """Nemotron, modded-nanogpt."""

    def expert(self, e: int) -> nn.Module:
        return nn.Sequential(nn.Linear(HIDDEN, WIDTH, bias=False), ReluSquared(), nn.Linear(WIDTH, HIDDEN, bias=False))


class LoraLinear(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, rows: Tensor) -> Tensor:
        return self.base(rows) + self.lora_b(self.lora_a(rows)) * 0.5


class LoraLinears(Listed):
    """Adapters on the linears of every expert, as PEFT puts them there."""

    def expert(self, e: int) -> nn.Module:
        return nn.Sequential(LoraLinear(nn.Linear(HIDDEN, WIDTH)), nn.SiLU(), LoraLinear(nn.Linear(WIDTH, HIDDEN)))


class UnequalWidths(Listed):
    """Experts of different size."""

    def expert(self, e: int) -> nn.Module:
        return SwiGluMlp(WIDTH + 8 * e)


class WithIdentity(Listed):
    """The last expert returns its input: LongCat-Flash's zero-computation experts."""

    def expert(self, e: int) -> nn.Module:
        return nn.Identity() if e == self.count - 1 else SwiGluMlp()


STACKED_OR_LISTED = (SwiGluStacked, SwiGluLinears)

# Models


Loop = Callable[["Moe", Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Spelling:
    """One way to write the loop.

    loop: (model, x [T, HIDDEN], weights [T, k], idx [T, k]) to the routed sum [T, HIDDEN]. seen: where it is met.
    skips_empty: an expert without tokens is passed over. identical: the branches differ in weights alone.
    experts: the kinds of experts to try it with. local: the experts that this rank has, if not all.
    scales_input: the score multiplies the expert's input, not its output. shared: an expert of all tokens beside.
    dtype: of the experts; router and scores are float32.
    """

    name: str
    loop: Loop
    seen: str
    skips_empty: bool = False
    identical: bool = True
    experts: tuple[type[Experts], ...] = STACKED_OR_LISTED
    router: Router = softmax_then_topk
    top: int = TOP
    local: tuple[int, int] | None = None
    scales_input: bool = False
    shared: bool = False
    dtype: torch.dtype = torch.float32


class Moe(nn.Module):
    """x [T, HIDDEN] of the spelling's dtype to the same."""

    def __init__(self, spelling: Spelling, kind: type[Experts], count: int = EXPERTS) -> None:
        super().__init__()
        self.spelling, self.count = spelling, count
        self.local = range(*(spelling.local or (0, count)))
        self.gate = nn.Linear(HIDDEN, count, bias=False)
        self.register_buffer("bias", torch.linspace(-0.1, 0.1, count))
        self.experts = kind(count).to(spelling.dtype)
        self.shared = SwiGluMlp().to(spelling.dtype) if spelling.shared else None

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = self.route(x)
        out = self.spelling.loop(self, x, weights, idx)
        return out if self.shared is None else out + self.shared(x)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.spelling.router(self.gate(x.float()), self.spelling.top, self.bias)

    def reference(self, x: Tensor) -> Tensor:
        """The same, dense: E times the work, no index."""
        weights, idx = self.route(x)
        out = torch.zeros(x.shape, dtype=torch.float32)
        for slot in range(idx.shape[1]):
            weight = weights[:, slot, None]
            rows = (x * weight).to(x.dtype) if self.spelling.scales_input else x
            for e in self.local:
                y = self.experts(e, rows).float()
                out = out + torch.where(idx[:, slot, None] == e, y if self.spelling.scales_input else y * weight, 0.0)
        return out.to(x.dtype) if self.shared is None else out.to(x.dtype) + self.shared(x)
