"""`get_rope_index` of vision-language models: one graph for all batches if its results have the tokens' sizes."""

from __future__ import annotations

import gc
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses.inspect
from tests.support import compiled

pytestmark = pytest.mark.usefixtures("capture_flags")

WIDTH = 4
BATCHES = [
    torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]),
    torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 1, 0]]),
]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(8, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, kinds: Tensor, x: Tensor | None = None) -> Tensor:
        ids = kinds + 2
        positions, deltas = self.get_rope_index(ids, kinds, attention_mask=None)
        return (self.linear(self.embedding(ids)) * (positions.sum(0) + deltas)[..., None]).sin()

    def get_rope_index(
        self, input_ids: Tensor, kinds: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Images stand still in the first row, as in Qwen2-VL."""
        positions, deltas = torch.zeros(3, *input_ids.shape, dtype=input_ids.dtype), []
        for row, types in enumerate(kinds):
            place = 0
            for kind, group in itertools.groupby(enumerate(types.tolist()), lambda pair: pair[1]):
                for number, _ in list(group):
                    positions[:, row, number] = torch.tensor([place, number, number])
                    place += kind == 0
            deltas.append(positions[:, row].max() + 1 - len(types))
        return positions, torch.tensor(deltas).unsqueeze(1)

    get_rope_index.__module__ = "transformers.models.toy"


class Longer(Model):
    def forward(self, kinds: Tensor, x: Tensor | None = None) -> Tensor:
        return super().forward(kinds)[:, : kinds.shape[1]]

    def get_rope_index(self, input_ids: Tensor, kinds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        positions, deltas = Model.get_rope_index(self, input_ids, kinds)
        return positions, deltas.expand(-1, input_ids.shape[1])

    get_rope_index.__module__ = "transformers.models.toy"


def graphs_of(model: Model) -> int:
    """The number of graphs. Numbers are eager mode's, bit for bit."""
    parameters = list(model.parameters())
    program = compiled(model, "aot_eager")
    with fxpasses.inspect.record() as record:
        for kinds in BATCHES:
            expected, actual = model(kinds), program(kinds)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
            gradients = [torch.autograd.grad(found.sum(), parameters) for found in (actual, expected)]
            torch.testing.assert_close(*gradients, rtol=0, atol=0)
    return len([graph for graph in record.graphs if graph.outcome != "retraced"])


def test_one_graph_for_all_batches() -> None:
    assert graphs_of(Model()) == 1


class Chosen(Model):
    """Qwen2.5-Omni: an argument that is no tensor."""

    def forward(self, kinds: Tensor, x: Tensor | None = None, sound: bool = False) -> Tensor:
        positions, _ = self.get_rope_index(kinds + 2, kinds, None, sound)
        return self.linear(self.embedding(kinds)) * positions.sum(0)[..., None]

    def get_rope_index(self, input_ids: Tensor, kinds: Tensor, mask: Any = None, sound: bool = False) -> Any:
        positions, deltas = Model.get_rope_index(self, input_ids, kinds)
        return positions + (10 if sound is True else 5) * sound, deltas

    get_rope_index.__module__ = "transformers.models.toy"


def test_constants_are_passed_on() -> None:
    model = Chosen()
    assert graphs_of(model) == 1
    program = compiled(model, "aot_eager")
    for sound in (False, True, 1, 0, False, True):
        torch.testing.assert_close(program(BATCHES[0], sound=sound), model(BATCHES[0], sound=sound), rtol=0, atol=0)


class Scaled(Model):
    """What the method computes depends on the model."""

    def __init__(self, scale: int) -> None:
        super().__init__()
        self.scale = [scale]

    def get_rope_index(self, input_ids: Tensor, kinds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        positions, deltas = Model.get_rope_index(self, input_ids, kinds)
        return positions * self.scale[0], deltas

    get_rope_index.__module__ = "transformers.models.toy"


def test_each_model_has_its_own_positions() -> None:
    """As a student and its teacher, or one model that was deleted and another that came after it."""
    for scale in (1, 100, 7):
        model = Scaled(scale)
        program = compiled(model, "aot_eager")
        for changed in (scale, scale + 1):
            model.scale[0] = changed
            torch.testing.assert_close(program(BATCHES[0]), model(BATCHES[0]), rtol=0, atol=0)
        if scale == 1:
            first, first_program = model, program
        del model, program
        gc.collect()
    torch.testing.assert_close(first_program(BATCHES[0]), first(BATCHES[0]), rtol=0, atol=0)


def test_results_of_other_sizes_are_left_to_dynamo() -> None:
    assert graphs_of(Longer()) > 1


def test_an_error_is_eager_modes() -> None:
    class Wrong(Model):
        def get_rope_index(self, input_ids: Tensor, kinds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
            raise ValueError(f"{kinds.max().item()} kinds")

        get_rope_index.__module__ = "transformers.models.toy"

    for program in (Wrong(), compiled(Wrong(), "aot_eager")):
        with pytest.raises(ValueError, match="1 kinds"):
            program(BATCHES[0])
