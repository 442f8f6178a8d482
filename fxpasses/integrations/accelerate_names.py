"""The objects in which accelerate keeps the names of backends, checked with accelerate 1.15.0 on Python 3.11.

- `accelerate.utils.dataclasses.DynamoBackend`: a backend's name has to be a member of this enumeration, whose value is
  passed to `torch.compile` in lower case. `TrainingArguments.torch_compile_backend` ends there as well.
- `accelerate.commands.config.config_utils.DYNAMO_BACKENDS`: the list behind `accelerate config` and the choices of
  `accelerate launch --dynamo_backend`.
"""

from __future__ import annotations

import enum
from types import ModuleType

CHECKED = ("1.15.0",)
ENUMERATION = "accelerate.utils.dataclasses"
MENU = "accelerate.commands.config.config_utils"
NAME = "FASTPACK"


def add_to_enumeration(module: ModuleType) -> None:
    """Make `FASTPACK` a member of `DynamoBackend`; raises an error if the enumeration is not as expected."""
    backends = module.DynamoBackend
    if NAME in backends.__members__:
        return
    if not (issubclass(backends, enum.Enum) and issubclass(backends, str)):
        raise TypeError(f"{backends} is no enumeration of strings")
    # `Enum` has no public way to add a member to an existing class; these names are the same in Python 3.10 to 3.14.
    member = str.__new__(backends, NAME)
    member._name_, member._value_, member.__objclass__ = NAME, NAME, backends
    member._sort_order_ = len(backends._member_names_)
    type.__setattr__(backends, NAME, member)
    backends._member_names_.append(NAME)
    backends._member_map_[NAME] = member
    backends._value2member_map_[NAME] = member
    if backends(NAME) is not member:
        raise LookupError(f"{backends} does not find the new member {NAME}")


def add_to_menu(module: ModuleType) -> None:
    if NAME not in module.DYNAMO_BACKENDS:
        module.DYNAMO_BACKENDS.append(NAME)
