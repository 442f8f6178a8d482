"""The whole idea in one screen: each layer asks for the packed batch's metadata; `fastpack` asks once a batch."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect


class PackedModel(torch.nn.Module):
    def __init__(self, layers=4, width=32):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers))

    def forward(self, x, lengths):
        for linear in self.layers:
            x = checkpoint(self.layer, linear, x, lengths, use_reentrant=False)
        return x

    def layer(self, linear, x, lengths):
        mask = torch.zeros(len(x), len(x), dtype=torch.bool)
        start = 0
        for length in lengths.tolist():  # a host read a sequence, in every layer, forward and again in backward
            mask[start : start + length, start : start + length] = True
            start += length
        return x + F.scaled_dot_product_attention(x[None], x[None], linear(x)[None], mask)[0] / lengths.max().item()


model = PackedModel()
compiled = torch.compile(model, backend="fastpack")
with fxpasses.inspect.record() as record:
    for lengths in ([5, 8, 3], [4, 4, 8], [1, 14, 1]):
        compiled(torch.randn(16, 32), torch.tensor(lengths)).square().mean().backward()
print(record)
