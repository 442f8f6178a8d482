"""Which of several processes this one is."""

from __future__ import annotations

import os

import torch


def process_rank() -> int | None:
    """The process's rank, by `torch.distributed` or the launcher's environment; None for a single process."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    given = os.environ.get("RANK", "")
    return int(given) if given.isdecimal() else None
