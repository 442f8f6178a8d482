"""Failed guards in the user's terms: what differed, and what to change if it goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fxpasses.graph.provenance import in_program


@dataclass(frozen=True)
class Cause:
    """text: what differed from the calls before. advice: what to change; "" where one more graph is as it should be."""

    text: str
    advice: str = ""


_SIZES = (
    "Sizes that go on changing: pad to a few of them (a collator's pad_to_multiple_of; for lengths, "
    "fxpasses.data.BucketCollator), drop the last incomplete batch (dataloader_drop_last), or pass dynamic=True "
    "(accelerate launch: --dynamo_use_dynamic)."
)
_ANSWERS = (
    "The program branches on its batch, and each answer is a graph: branch on sizes or on fixed settings instead, or "
    "make batches alike."
)
_HOOKS = "Hooks are added or removed between calls: add them once, before the first step."
_MODES = ""  # train and eval, with and without gradients: a graph each is as it should be
_NUMBERS = "A Python number changes from call to call: pass it as a tensor, or keep it fixed."
_GENERATION = "Generation shares the model's frame: generate from another copy of the model, or with use_cache=False."
_OBJECTS = "A Python object that the model reads changes from call to call: set it once, before the first step."

# The first pattern that is found in a guard says what it is about; groups go into the text.
_KINDS: tuple[tuple[str, str, str], ...] = (
    (r"^(\w+(?:Error|Exception)\b.*)", "a batch that lacks what a guard reads ({0})", _OBJECTS),
    (r"___fxpasses_batch\(.*?\)\s*#\s*(.+)", "an answer of the batch, no longer {0}", _ANSWERS),
    (r"_(?:forward|backward)\w*_hooks|_hooks", "the hooks of a module", _HOOKS),
    (r"past_key_values|use_cache|[Cc]ache\b", "the cache of keys and values", _GENERATION),
    (r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\S+), actual (\S+)",
     "size {1} of {0}: {2} became {3}", _SIZES),
    (r"tensor '(.+?)' (?:rank|stride) mismatch.*", "the layout of {0}", _SIZES),
    (r"tensor '(.+?)' requires_grad mismatch.*", "whether {0} requires a gradient", _MODES),
    (r"tensor '(.+?)' dispatch key set mismatch.*", "the kind of tensor of {0}", _OBJECTS),
    (r"tensor '(.+?)' dtype mismatch.*", "the dtype of {0}", _OBJECTS),
    (r"GLOBAL_STATE changed: (.+?)\s*$", "a mode of the process: {0}", _MODES),
    (r"\.training\b|'training'", "train() or eval()", _MODES),
    (r"___check_type_id\((.+?), ", "the type of {0}", _OBJECTS),
    (r"size\(\)\[|\.shape\[|\.size\[", "a size, no longer {whole}", _SIZES),
    (r"^len\((.+?)\) == (\d+)", "the length of {0}, no longer {1}", _OBJECTS),
    (r"^(\S+) == (-?\d+(?:\.\d+)?)\b", "{0}, no longer {1}", _NUMBERS),
)  # fmt: skip


def cause(guard: str) -> Cause:
    """guard: as Dynamo prints it: `tensor 'x' size mismatch at index 0. expected 3, actual 5`."""
    line = guard.split("\n")[0]
    condition = re.split(r"\s{2,}#", line)[0].strip() if "___fxpasses_batch" not in line else line
    for pattern, text, advice in _KINDS:
        if found := re.search(pattern, condition):
            groups = [in_program(group) for group in found.groups() if group is not None]
            return Cause(text.format(*groups, whole=in_program(condition)), advice)
    return Cause(f"a condition that no longer holds: {in_program(condition)}", _OBJECTS)
