"""Each layer asks for the packed batch's lengths and builds a mask; `fastpack` does both once per batch."""

import torch
from torch.utils.checkpoint import checkpoint

import fxpasses.inspect


def layer(linear, x, lengths):
    mask, start = torch.zeros(len(x), len(x), dtype=torch.bool), 0
    for length in lengths.tolist():  # one host read per sequence, in every layer, in forward and again in backward
        mask[start : start + length, start : start + length] = True
        start += length
    return x + torch.where(mask, 1 / lengths.max().item(), 0.0) @ linear(x)


class PackedModel(torch.nn.ModuleList):
    def forward(self, x, lengths):
        for linear in self:
            x = checkpoint(layer, linear, x, lengths, use_reentrant=False)
        return x.square().mean()


model = PackedModel(torch.nn.Linear(32, 32) for _ in range(4))
compiled, optimizer = torch.compile(model, backend="fastpack"), torch.optim.SGD(model.parameters(), lr=0.1)
with fxpasses.inspect.record() as record:
    for lengths in ([5, 8, 3], [4, 4, 8], [1, 14, 1]):
        compiled(torch.randn(16, 32), torch.tensor(lengths)).backward()
        optimizer.step(), optimizer.zero_grad()
print(record)
