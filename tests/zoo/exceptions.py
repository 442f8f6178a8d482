"""What the rules of `tiny` and `batches` do not find out by themselves.

SIZES: by type of model, or by task and type ("causal/NAME"), arguments of its configuration class that replace those of
the rules; by "default of TYPE", those without which not even the defaults can be had.
LEFT_OUT: architectures that are not run, by the same keys, and why.
REASONS: by the same keys, for docs/supported.md.
"""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {}

LEFT_OUT: dict[str, str] = {}

# Why an architecture is more than one graph, where the reason that Dynamo gives does not say it.
REASONS: dict[str, str] = {}
