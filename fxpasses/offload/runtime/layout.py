"""A tensor as the bytes that it spans: memory is moved, so strides, gaps and overlaps come back as they were."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


def span(tensor: Tensor) -> int:
    """The bytes from the first to the last element; 0 for a tensor without elements."""
    if tensor.numel() == 0:
        return 0
    elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return elements * tensor.element_size()


def flat(tensor: Tensor) -> Tensor:
    """The span as a uint8 view [bytes]; shares the tensor's memory."""
    return tensor.as_strided((span(tensor) // tensor.element_size(),), (1,)).view(torch.uint8)


def empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    """Uninitialised memory of the same size, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


def shaped(memory: Tensor, like: Tensor) -> Tensor:
    """uint8 memory [bytes] as a tensor of the size, strides and dtype of another."""
    return memory.view(like.dtype).as_strided(like.shape, like.stride())


def alias(memory: Tensor) -> Tensor:
    """CPU bytes [n] as a tensor with a separate storage that does not keep the memory alive."""
    return torch.frombuffer((ctypes.c_char * memory.numel()).from_address(memory.data_ptr()), dtype=torch.uint8)
