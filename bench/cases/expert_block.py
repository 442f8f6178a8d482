"""A mixture-of-experts block: router, and experts as a loop, by hand, or as Hugging Face's `grouped_mm`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from bench.case import Parameters
from bench.cases.by_hand import grouped_experts


class Block(nn.Module):
    """x [T, hidden] -> [T, hidden]; softmax router, top-k, SwiGLU experts in the layout of transformers.

    parameters: experts E, hidden, width, top. `Qwen3MoeExperts` holds the weights: gate_up_proj [E, 2 * width, hidden]
    and down_proj [E, hidden, width].
    """

    def __init__(self, parameters: Parameters) -> None:
        super().__init__()
        self.count, self.top = parameters["experts"], parameters["top"]
        config = Qwen3MoeConfig(
            hidden_size=parameters["hidden"],
            moe_intermediate_size=parameters["width"],
            num_experts=self.count,
        )
        config._experts_implementation = "grouped_mm"
        self.router = nn.Linear(parameters["hidden"], self.count, bias=False)
        self.experts = Qwen3MoeExperts(config)
        for weight in self.experts.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        weights, idx = torch.topk(self.router(x).softmax(-1), self.top, dim=-1)
        return self.run(x, weights / weights.sum(-1, keepdim=True), idx)

    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        """weights [T, top], idx int64 [T, top]."""
        raise NotImplementedError

    def expert(self, e: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, self.experts.gate_up_proj[e]).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, self.experts.down_proj[e])


class Where(Block):
    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.count):
            token, slot = torch.where(idx == e)
            out.index_add_(0, token, self.expert(e, x[token]) * weights[token, slot, None])
        return out


class OneHot(Block):
    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        mask = F.one_hot(idx, num_classes=self.count).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for e in range(self.count):
            slot, token = torch.where(mask[e])
            rows = x[None, token].reshape(-1, x.shape[1])
            out.index_add_(0, token, self.expert(e, rows) * weights[token, slot, None])
        return out


class Mask(Block):
    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.count):
            chosen = idx == e
            mask = chosen.any(-1)
            out[mask] += self.expert(e, x[mask]) * (weights * chosen).sum(-1)[mask].unsqueeze(-1)
        return out


class ByHand(Block):
    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        return grouped_experts(x, weights, idx, self.experts.gate_up_proj, self.experts.down_proj)


class HuggingFace(Block):
    def run(self, x: Tensor, weights: Tensor, idx: Tensor) -> Tensor:
        out: Tensor = self.experts(x, idx, weights)
        return out


FORMS = {"where": Where, "one_hot": OneHot, "mask": Mask, "by hand": ByHand, "HF": HuggingFace}


def new_block(form: str, parameters: Parameters) -> Block:
    return FORMS[form](parameters).train()
