"""The tiers by their names in `fastpack.offload`."""

from __future__ import annotations

from collections.abc import Callable

from fxpasses.offload.runtime.disk import DiskTier
from fxpasses.offload.runtime.host import HostTier
from fxpasses.offload.runtime.tier import Tier

TIERS: dict[str, Callable[[str, int | None], Tier]] = {
    "host": lambda directory, host_budget: HostTier(host_budget),
    "disk": lambda directory, host_budget: DiskTier(directory),
}


def of(name: str, directory: str = "", host_budget: int | None = None) -> Tier:
    """The tier of a name. directory: the disk tier's; "" is the system's temporary one. host_budget: bytes."""
    return TIERS[name](directory, host_budget)
