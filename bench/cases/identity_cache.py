"""What a library does by hand in its own models to ask a batch once: keep the last answer, for the same tensor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor

Answer = TypeVar("Answer")


class IdentityCache(Generic[Answer]):
    """The last batch's answer, found again by the identity of the tensor that was asked."""

    def __init__(self, ask: Callable[..., Answer]) -> None:
        self.ask = ask
        self.asked: Callable[[], Tensor | None] = lambda: None
        self.answer: Answer | None = None

    def __call__(self, tensor: Tensor, *more: object) -> Answer:
        if self.asked() is not tensor or self.answer is None:
            self.asked, self.answer = weakref.ref(tensor), self.ask(tensor, *more)
        return self.answer
