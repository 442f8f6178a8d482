"""Writes a random program, as a user would write it: the source of a model, from a seed.

`Model.forward(ids, lengths, labels, target)` gives a loss, and what else the program returns. `ids` [B, T] are tokens,
of which the first `lengths` [B] of each text are real, 0 the others; `labels` [B, T] have -100 where nothing is learnt;
`target` [B] has a class for each text.
"""

from __future__ import annotations

import random
import re
import textwrap

from tests.programs.statements import CONDITIONS, LAYER, LOSSES, NUMBERS, ON_TOKENS, PARTS, POOLINGS

HEAD = """\
import math
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, VOCABULARY, EXPERTS = 8, 17, 3
"""


def source(seed: int) -> str:
    """The source of program number `seed`: it defines `Model`."""
    chance = random.Random(f"bounds of {seed}")
    return _BOUND.sub(
        lambda found: f": {found[1] or found[2]}{found[3]}" if chance.random() < 0.5 else found[0],
        _Writer(random.Random(seed)).program(),
    )


# A tensor as the bound of a slice may stay one: `x[:, : lengths.max()]`.
_LONGEST = r"(lengths\.(?:max|min|sum)\(\)|mask\.sum\(1\)\.max\(\)|lengths\[-1\])"
_BOUND = re.compile(rf": (?:{_LONGEST}\.item\(\)|int\({_LONGEST}\))([\],])")


class _Writer:
    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def program(self) -> str:
        kinds = [self._layer(f"Layer{at}") for at in range(self.chance.choice([1, 1, 2]))]
        names = [self.chance.randrange(len(kinds)) for _ in range(self.chance.choice([1, 2, 2, 3]))]
        return "\n\n".join([HEAD, *kinds, self._model([f"Layer{at}()" for at in names])])

    def _layer(self, name: str) -> str:
        body = [line for _ in range(self.chance.choice([1, 2, 2, 3])) for line in self._filled(self._pick(LAYER))]
        body = [*body, "return x, mask"]
        return _module(name, _method("forward", "self, x, mask, lengths", body))

    def _model(self, layers: list[str]) -> str:
        start = ["mask = torch.arange(ids.shape[1]) < lengths[:, None]", "x = self.embedding(ids)"]
        if self.chance.random() < 0.3:
            start[0] = "mask = ids != 0"
        if self.chance.random() < 0.2:
            start += ["x = x * mask[..., None]"]
        call = "layer(x, mask, lengths)"
        if self.chance.random() < 0.4:
            call = "checkpoint(layer, x, mask, lengths, use_reentrant=False)"
        loop = ["for layer in self.layers:", f"    x, mask = {call}"]
        loss = ["labels = labels[:, : x.shape[1]]", "x = x[:, : labels.shape[1]]", "mask = mask[:, : x.shape[1]]"]
        loss += self._filled(self._pick(LOSSES))
        returned = self.chance.choice(["loss", "loss", "loss, x", "loss, mask.sum()", "loss, NUMBER"])
        body = [*start, *loop, *loss, *self._filled(f"return {returned}")]
        made = [
            "self.embedding = nn.Embedding(VOCABULARY, WIDTH)",
            f"self.layers = nn.ModuleList([{', '.join(layers)}])",
        ]
        return _module("Model", _method("forward", "self, ids, lengths, labels, target", body), made)

    def _pick(self, table: list[str]) -> str:
        return textwrap.dedent(self.chance.choice(table)).strip()

    def _filled(self, text: str) -> list[str]:
        """The lines of a statement, with its placeholders replaced by random choices."""
        for word, table in (("POOLING", POOLINGS), ("CONDITION", CONDITIONS)):
            while re.search(rf"\b{word}\b", text):
                text = re.sub(rf"\b{word}\b", lambda _: self._pick(table), text, count=1)  # noqa: B023
        text = re.sub(r"ON_TOKENS\(([^()]*)\)", lambda found: self._on_tokens(found[1]), text)
        if (uses := len(re.findall(r"\bNUMBER\b", text))) and self.chance.random() < 0.5 and "n = " not in text:
            number = self.chance.choice(NUMBERS)  # read once, used several times
            return [f"n = {number}", *re.sub(r"\bNUMBER\b", "n", text).splitlines()]
        for _ in range(uses):
            text = re.sub(r"\bNUMBER\b", lambda _: self.chance.choice(NUMBERS), text, count=1)
        return text.splitlines()

    def _on_tokens(self, operand: str) -> str:
        return f"({self.chance.choice(ON_TOKENS)})".format(y=operand)


def _method(name: str, parameters: str, body: list[str]) -> str:
    return f"def {name}({parameters}):\n" + textwrap.indent("\n".join(body), "    ")


def _module(name: str, method: str, made: list[str] = []) -> str:  # noqa: B006
    parts = [*made]
    for part, value in PARTS.items():
        if re.search(rf"{re.escape(part)}\b", method):
            own = part.removeprefix("self.")
            parts.append(
                f'self.register_buffer("{own}", {value})' if value.startswith("torch.") else f"{part} = {value}"
            )
    start = _method("__init__", "self", ["super().__init__()", *parts])
    return f"class {name}(nn.Module):\n" + textwrap.indent(f"{start}\n\n{method}", "    ") + "\n"
