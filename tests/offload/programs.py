"""Programs whose activations are moved, and the ways in which a training loop runs them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, TOKENS = 16, 24


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(F.layer_norm(x, x.shape[-1:])).unflatten(-1, (3, 2, -1)).movedim(-3, 0).transpose(-2, -3)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(-2, -3).flatten(-2))
        return x + self.down(F.gelu(self.up(x)))


class Decoder(nn.Module):
    """Checkpointed layers."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))

    def hidden(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.hidden(x).float().square().mean()


class Broken(nn.Module):
    """Two decoders in two graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Decoder(2), Decoder(2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first.hidden(x)
        torch._dynamo.graph_break()
        return self.second(x)


class Plain(nn.Module):
    """No checkpoints: what is saved has all kinds of dtypes and strides."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).sin()
        turned = hidden.t().exp()  # saved with the strides of its input, the other way round
        part = (hidden * 2)[:, ::2].sigmoid().repeat(1, 2)
        scores, chosen = hidden[:, :4].topk(2)  # saves indices
        routed = torch.stack([hidden @ weight for weight in self.experts]).gather(
            0, chosen.t()[:, :, None].expand(2, hidden.shape[0], WIDTH)
        )
        wide = hidden.sum(0, keepdim=True).cos().expand_as(hidden)
        mixed = (routed * scores.t()[:, :, None]).sum(0) + wide * part + turned.t()
        return self.second(mixed).relu().square().mean()


class Packed(nn.Module):
    """Reads its batch's lengths in every layer, and runs a mixture of experts: the other passes work on it too."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def _layer(self, layer: nn.Module, x: Tensor, lengths: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 1, device=x.device, dtype=x.dtype)
        mask[: lengths.max().item()] = 1.0
        x = layer(x) * mask
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            out = out.index_add(0, rows, expert(x[rows]).to(out.dtype))
        return x + out

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(self._layer, layer, x, lengths, use_reentrant=False)
        return x.square().mean()


Step = Callable[[Any, torch.device], Any]


def inputs(device: torch.device, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, WIDTH, generator=torch.Generator().manual_seed(tokens)).to(device, dtype)


def one_step(program: Any, device: torch.device) -> Any:
    loss = program(inputs(device).requires_grad_())
    loss.backward()
    return loss


def accumulate(program: Any, device: torch.device, order: tuple[int, ...] = (0, 1, 2)) -> Any:
    losses = [program(inputs(device, TOKENS) * scale) for scale in (1.0, 2.0, 3.0)]
    for number in order:
        losses[number].backward()
    return losses


def accumulate_backwards(program: Any, device: torch.device) -> Any:
    return accumulate(program, device, (2, 1, 0))


def accumulate_mixed(program: Any, device: torch.device) -> Any:
    return accumulate(program, device, (1, 0, 2))


def dropped_forward(program: Any, device: torch.device) -> Any:
    program(inputs(device) * 5)  # nobody asks for its gradients
    return one_step(program, device)


def retain_graph(program: Any, device: torch.device) -> Any:
    loss = program(inputs(device))
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def one_after_the_other(program: Any, device: torch.device) -> Any:
    return [one_step(program, device) for _ in range(3)]


def sizes(program: Any, device: torch.device) -> Any:
    losses = []
    for tokens in (24, 40, 17, 24):
        x = inputs(device, tokens)
        torch._dynamo.mark_dynamic(x, 0)
        losses.append(program(x))
    for loss in losses:
        loss.backward()
    return losses


def autocast(program: Any, device: torch.device) -> Any:
    with torch.autocast(device.type, torch.bfloat16):
        loss = program(inputs(device))
    loss.backward()
    return loss


def in_bfloat16(program: Any, device: torch.device) -> Any:
    loss = program.to(torch.bfloat16)(inputs(device, dtype=torch.bfloat16))
    loss.backward()
    return loss


def in_float16(program: Any, device: torch.device) -> Any:
    loss = program.to(torch.float16)(inputs(device, dtype=torch.float16))
    loss.backward()
    return loss


def in_float64(program: Any, device: torch.device) -> Any:
    loss = program.double()(inputs(device, dtype=torch.float64))
    loss.backward()
    return loss


def other_thread(program: Any, device: torch.device) -> Any:
    """Backward is called from another thread, and on an accelerator on another stream."""
    loss = program(inputs(device))

    def backward() -> None:
        if device.type == "cpu":
            loss.backward()
            return
        stream = torch.Stream(device=device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            loss.backward()
        torch.accelerator.current_stream(device).wait_stream(stream)
        torch.accelerator.synchronize(device)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    return loss


def threads_at_once(program: Any, device: torch.device) -> Any:
    """Two backward passes alternate. Gradients are taken apart: the order in which they add up is not fixed."""
    losses = [program(inputs(device) * scale) for scale in (1.0, 2.0)]
    parameters = list(program.parameters())
    found: list[Any] = [None, None]

    def backward(number: int) -> None:
        found[number] = torch.autograd.grad(losses[number], parameters)

    threads = [threading.Thread(target=backward, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [losses, found]


class _Stop(torch.autograd.Function):
    """The gradient of its input raises while `armed`."""

    armed = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        if _Stop.armed:
            raise RuntimeError("stopped on the way")
        return gradient


def stopped_on_the_way(program: Any, device: torch.device) -> Any:
    """A backward pass that raises between two compiled parts, and is then run again."""
    x = inputs(device).requires_grad_()
    first = program(x)
    loss = program(_Stop.apply(x * first))
    _Stop.armed = True
    try:
        loss.backward(retain_graph=True)
        raise AssertionError("the backward pass was to be stopped")
    except RuntimeError as error:
        assert "stopped on the way" in str(error)
    finally:
        _Stop.armed = False
    for parameter in program.parameters():
        parameter.grad = None
    loss.backward()
    return loss


def packed(program: Any, device: torch.device) -> Any:
    losses = []
    for lengths in ([10, 14], [24, 0]):
        losses.append(program(inputs(device), torch.tensor(lengths, device=device)))
        losses[-1].backward()
    return losses
