"""Head and loss: the largest tensors of a step, computed in chunks of rows. Beside the compilers, chunks by hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import EAGER, LIGER, Compiler, contender, eager, needs_liger, ours, usual

FULL, CHUNKS, AUTO = "fastpack, logits in full", "fastpack, chunks", "Inductor, auto_chunker"
BY_HAND, LINEAR = "chunks by hand", "F.linear_cross_entropy"
BATCHES, TEXTS = 4, 8
BY_HAND_ROWS = 256
CAP = 30.0


def build(compiler: Compiler, parameters: Parameters, device: str, by_hand: str = "") -> Program:
    import torch

    from bench.cases.training import training_program

    torch.manual_seed(0)
    dtype = getattr(torch, parameters["dtype"])
    head = torch.nn.Linear(parameters["hidden"], parameters["columns"], bias=False).to(device, dtype)
    kind = BY_HANDS[by_hand] if by_hand else LOSSES[parameters["loss"]]
    loss = compiler(functools.partial(kind, head))

    def loss_of(batch: Any) -> Any:
        return loss(batch["rows"].detach().requires_grad_(), batch["target"])

    return training_program(head, loss_of, rows_and_targets(parameters, device, dtype))


def rows_and_targets(parameters: Parameters, device: str, dtype: Any) -> list[dict[str, Any]]:
    """rows: [tokens, hidden]. target: int64 [tokens], -100 for those without a label."""
    import torch

    generator = torch.Generator().manual_seed(3)
    tokens = parameters["tokens"]
    found = []
    for _ in range(BATCHES):
        rows = torch.randn(tokens, parameters["hidden"], generator=generator).to(device, dtype)
        target = torch.randint(0, parameters["columns"], (tokens,), generator=generator)
        dead = torch.rand(tokens, generator=generator) > parameters["labelled"]
        found.append({"rows": rows, "target": target.masked_fill(dead, -100).to(device)})
    return found


def plain(head: Any, rows: Any, target: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(head(rows).float(), target)


def capped(head: Any, rows: Any, target: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy((head(rows).float() / CAP).tanh() * CAP, target)


def smoothed(head: Any, rows: Any, target: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(head(rows).float(), target, label_smoothing=0.1)


def preferred(head: Any, rows: Any, target: Any) -> Any:
    """DPO: log-probabilities of texts, of which the first half is preferred to the second."""
    import torch.nn.functional as F

    chosen = head(rows).float().log_softmax(-1).gather(-1, target.clamp(min=0)[:, None])[:, 0] * (target != -100)
    first, second = chosen.view(TEXTS, -1).sum(1).chunk(2)
    return -F.logsigmoid(0.1 * (first - second)).mean()


LOSSES: dict[str, Callable[..., Any]] = {
    "plain": plain, "softcap": capped, "label smoothing": smoothed, "DPO": preferred,
}  # fmt: skip


def of_pytorch(head: Any, rows: Any, target: Any) -> Any:
    import torch.nn.functional as F

    linear_cross_entropy: Any = F.linear_cross_entropy  # type: ignore[attr-defined]
    return linear_cross_entropy(rows, head.weight, target)


def chunked(head: Any, rows: Any, target: Any) -> Any:
    """As Liger Kernel does: gradients in forward, in chunks of rows; in PyTorch's operators."""
    return _Chunked.of(rows, head.weight, target)


class _Chunked:
    @staticmethod
    @functools.cache
    def function() -> Any:
        import torch

        class Function(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, rows: Any, weight: Any, target: Any) -> Any:
                kept = target != -100
                count = kept.sum()
                of_rows, of_weight = torch.empty_like(rows), torch.zeros_like(weight)
                total = rows.new_zeros(())
                for start in range(0, len(rows), BY_HAND_ROWS):
                    x, t, keep = (each[start : start + BY_HAND_ROWS] for each in (rows, target, kept))
                    logits = x @ weight.t()
                    largest, safe = logits.logsumexp(1, keepdim=True), t.clamp(min=0)
                    total += ((largest[:, 0] - logits.gather(1, safe[:, None])[:, 0]) * keep).sum()
                    logits = logits.sub_(largest).exp_()
                    logits[torch.arange(len(t)), safe] -= 1
                    logits.mul_((keep / count)[:, None])
                    torch.mm(logits, weight, out=of_rows[start : start + BY_HAND_ROWS])
                    of_weight.addmm_(logits.t(), x)
                ctx.save_for_backward(of_rows, of_weight)
                return total / count

            @staticmethod
            def backward(ctx: Any, grad: Any) -> Any:
                of_rows, of_weight = ctx.saved_tensors
                return of_rows * grad, of_weight * grad, None

        return Function

    @classmethod
    def of(cls, rows: Any, weight: Any, target: Any) -> Any:
        return cls.function().apply(rows, weight, target)


def of_liger(head: Any, rows: Any, target: Any) -> Any:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(head.weight, rows, target)


BY_HANDS: dict[str, Callable[..., Any]] = {BY_HAND: chunked, LINEAR: of_pytorch, LIGER: of_liger}


def inductor_in_chunks(function: Any) -> Any:
    import torch

    return torch.compile(function, dynamic=False, options={"auto_chunker.enable": True})


def only_plain(parameters: Parameters, device: str) -> str:
    return "" if parameters["loss"] == "plain" else "it has plain cross-entropy alone"


def liger_missing(parameters: Parameters, device: str) -> str:
    return only_plain(parameters, device) or needs_liger(parameters, device)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    dtype = "bfloat16" if device == "cuda" else "float32"

    def group(loss: str, labelled: float, tokens: int, columns: int = 32000, hidden: int = 512) -> dict[str, Any]:
        return {
            "loss": loss, "labelled": labelled, "tokens": tokens, "columns": columns, "hidden": hidden, "dtype": dtype,
        }  # fmt: skip

    if quick:
        return [group("plain", 1.0, 1024, 16000, 128)]
    found = [group("plain", 1.0, 4096, 32000, 2048)] if device == "cuda" else []
    found += [group("plain", labelled, 2048) for labelled in (1.0, 0.3)]
    found += [group(loss, 0.3, 2048) for loss in ("softcap", "label smoothing", "DPO")]
    return [*found, group("plain", 1.0, 1024, 128000)]


CASE = Case(
    name="loss_head",
    title="Head and loss in chunks of rows",
    groups=groups,
    contenders=[
        *usual(build),
        ours(FULL, build, loss="full"),
        ours(CHUNKS, build, loss="chunks"),
        contender(BY_HAND, functools.partial(build, by_hand=BY_HAND), eager, unavailable=only_plain),
        contender(LINEAR, functools.partial(build, by_hand=LINEAR), eager, unavailable=only_plain),
        contender(LIGER, functools.partial(build, by_hand=LIGER), eager, unavailable=liger_missing),
        contender(AUTO, build, inductor_in_chunks),
    ],
    baseline=EAGER,
    x="tokens",
    expected=(
        "Three products take nearly all of the time, chunks or not; where 30 % of the rows have labels, 30 % of it. "
        "Chunks hold a part of the logits and one gradient. DPO's loss is not linear in the log-probabilities of rows, "
        "so that chunks need a fourth product: they are taken on request alone, and the rows that count stand in full."
    ),
    cpu_time=True,
    notes="A linear layer without bias and a loss, forward and backward. Chunks by hand are in PyTorch's operators.",
)
