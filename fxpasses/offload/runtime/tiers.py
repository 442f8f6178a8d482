"""The tiers by their names in `fastpack.offload`."""

from __future__ import annotations

from fxpasses.offload.runtime.disk import DiskTier
from fxpasses.offload.runtime.host import HostTier
from fxpasses.offload.runtime.tier import Tier


def of(name: str, directory: str = "", host_budget: int | None = None) -> Tier:
    """name: "disk" or "host". directory: of the disk tier; "" is the system's temporary one. host_budget: bytes."""
    return DiskTier(directory) if name == "disk" else HostTier(host_budget)
