"""Train and evaluate with a data loader that is one batch ahead: no step asks the host anything about its batch.

    python examples/prefetch_training.py

The model asks for its batch's longest sequence in each layer. `fastpack` asks once per batch, and `PrefetchLoader` does
so before the step: the prologue of batch n + 1 is done before step n. Evaluation batches come again in each epoch, and
keep what their prologues computed; the one read that is left there is the DataLoader's, of its seed.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages

import torch
from torch.profiler import profile
from torch.utils.data import DataLoader

from fxpasses.data import PrefetchLoader

TOKENS, WIDTH = 32, 16


class PackedModel(torch.nn.ModuleList):
    def forward(self, x, lengths):
        document = torch.repeat_interleave(torch.arange(len(lengths)), lengths, output_size=TOKENS)
        for linear in self:
            same = document[:, None] == document
            x = x + torch.where(same, 1 / lengths.max().item(), 0.0) @ torch.tanh(linear(x))
        return x.square().mean()


def batch(index):
    """A packed batch of a data set: the same for the same index."""
    torch.manual_seed(index)
    cut = int(torch.randint(1, TOKENS - 1, ()))
    return {"x": torch.randn(TOKENS, WIDTH), "lengths": torch.tensor([cut, TOKENS - cut])}


def loader(first, count):
    return DataLoader(range(first, first + count), batch_size=None, collate_fn=batch, num_workers=1)


def host_reads(step):
    with profile() as seen:
        step()
    return sum(event.count for event in seen.key_averages() if event.key == "aten::_local_scalar_dense")


torch.manual_seed(0)
plain = PackedModel(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))
model = torch.compile(plain, backend="fastpack", options={"fastpack.lowering": "aot_eager"})
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
training = PrefetchLoader(loader(0, 6), model)  # device="cuda" moves the batches as well
evaluation = PrefetchLoader(loader(100, 4), model, keep_bytes=1 << 20)

for epoch in range(3):
    reads = []
    for given in training:
        reads.append(host_reads(lambda given=given: model(**given).backward()))
        optimizer.step(), optimizer.zero_grad()
    with torch.no_grad():
        model(**batch(99))  # from here on there is code without gradients
        losses = []
        evaluating = host_reads(lambda losses=losses: losses.extend(model(**given) for given in evaluation))
    print(f"epoch {epoch}: host reads in a step: {reads[-1]} (eager mode: {host_reads(lambda: plain(**batch(0)))}), "
          f"in the evaluation: {evaluating}, loss: {sum(losses).item() / len(losses):.4f}")  # fmt: skip
