"""Functions of the batch's metadata are operators: one graph for all batches, with positions, windows and lengths of
images as eager mode computes them."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxpasses.inspect
from fxpasses.dynamo.rules.module_reads import constants_read
from fxpasses.inspect import Record
from tests.support import assert_same, compiled, reports_of

vision = pytest.importorskip("transformers.vision_utils")
pytestmark = pytest.mark.usefixtures("capture_flags")

WIDTH = 4
BATCHES = [
    torch.tensor([[0, 1, 1, 0, 0], [0, 0, 1, 1, 1]]),
    torch.tensor([[1, 1, 1, 1, 0], [0, 1, 0, 1, 0]]),
]


calls: list[Tensor] = []


# `get_rope_index`


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


class FourAxes(Model):
    """HunYuan-VL."""

    def get_rope_index(self, input_ids: Tensor, kinds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        positions, deltas = Model.get_rope_index(self, input_ids, kinds)
        return torch.cat([positions, positions[:1]]), deltas

    get_rope_index.__module__ = "transformers.models.toy"


def test_positions_of_any_number_of_axes() -> None:
    assert graphs_of(FourAxes()) == 1


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


class Configured(Model):
    """A constant, read by a method that the method calls."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vision=SimpleNamespace(scale=2))

    def scaled(self, positions: Tensor, scale: int) -> Tensor:
        calls.append(positions)
        return positions * scale * self.config.vision.scale

    def get_rope_index(self, input_ids: Tensor, kinds: Tensor, attention_mask: Any = None, **kwargs: Any) -> Any:
        positions = torch.stack([torch.arange(len(row)) for row in kinds.tolist()]).expand(3, -1, -1)
        return self.scaled(positions, 3), kinds.sum(1, keepdim=True)

    get_rope_index.__module__ = "transformers.models.toy"


def test_a_method_that_reads_constants_runs_once_per_batch() -> None:
    model = Configured()
    program = compiled(model, "aot_eager")
    program(BATCHES[0])
    calls.clear()
    batch = BATCHES[1].clone()
    results = [program(batch) for _ in range(2)]
    assert len(calls) == 1
    model.config.vision.scale = 5
    for actual, expected in zip([*results, program(batch)], [2, 2, 5], strict=True):
        model.config.vision.scale = expected
        torch.testing.assert_close(actual, model(batch), rtol=0, atol=0)


class Reads(nn.Linear):
    """What methods may do with their module."""

    table = [1]
    size = 4

    def constants(self, x: Tensor) -> Any:
        return [x + self.size for _ in range(self.in_features)], self.training

    def calls_another(self, x: Tensor) -> Any:
        return self.constants(x), self.bias is None

    def a_list(self, x: Tensor) -> Any:
        return x + self.table[0]

    def a_parameter(self, x: Tensor) -> Any:
        return x + self.weight

    def itself(self, x: Tensor) -> Any:
        return getattr(self, "size")  # noqa: B009

    def its_class(self, x: Tensor) -> Any:
        return self.__class__.size

    def calls_a_list(self, x: Tensor) -> Any:
        return self.constants(x), self.a_list(x)

    def writes(self, x: Tensor) -> None:
        self.size = 5

    def extends(self, x: Tensor) -> Any:
        return super().extra_repr()


@pytest.mark.parametrize("name", ["constants", "calls_another"])
def test_constants_that_a_method_reads(name: str) -> None:
    module = Reads(2, 2, bias=False)
    found = constants_read(getattr(Reads, name), module)
    assert found is not None and {("size",), ("in_features",), ("training",)} <= {*found}


@pytest.mark.parametrize(
    "name", ["a_list", "a_parameter", "itself", "its_class", "calls_a_list", "writes", "extends", "forward"]
)
def test_other_uses_of_a_module(name: str) -> None:
    assert constants_read(getattr(Reads, name), Reads(2, 2)) is None


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


# Functions of grids: frames, heights and widths, [images, 3]


def batch(*images: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
    """Rows of all images, and the grid."""
    rows = sum(frames * height * width for frames, height, width in images)
    return torch.linspace(-1, 1, 2 * rows).view(rows, 2).requires_grad_(), torch.tensor(images)


IMAGES = [  # as many as the grid has columns, or the rows, and Dynamo would take the numbers for one
    batch((1, 4, 4), (1, 10, 4), (1, 4, 6), (1, 4, 4)),
    batch((1, 6, 6), (1, 4, 4), (2, 4, 4)),
    batch((1, 4, 6), (1, 8, 4)),
    batch((3, 8, 8), (1, 4, 4)),
]


def served(record: Record) -> list[str]:
    """The functions that are operators of the captured graphs."""
    nodes = [node for graph in record.graphs for region in graph.captured.regions or () for node in region.nodes]
    return [node.name for node in nodes if "fxpasses.host_" in node.target or "fxpasses::host_" in node.target]


class Vision(nn.Module):
    """The functions as Qwen2.5-VL calls them, with attention whose weights are equal within a window or an image."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, grid_thw: Tensor, **kwargs: Any) -> Tensor:
        positions = vision.get_vision_position_ids(grid_thw, 2, kwargs=kwargs)
        lengths = vision.get_vision_cu_seqlens(grid_thw, kwargs=kwargs)
        index, windows = vision.get_vision_window_index(grid_thw, 2, window_size=16, patch_size=4, kwargs=kwargs)
        x = self.linear(x * positions).view(-1, 4, 2)[index].view(-1, 2)
        for ends in (windows, lengths):
            place = torch.searchsorted(ends, torch.arange(x.shape[0], dtype=ends.dtype), right=True)
            x = (place[:, None] == place).float() @ x
        return x.view(-1, 8)[index.argsort()]


def test_images_of_any_number_and_size_are_one_graph() -> None:
    record = assert_same(Vision(), IMAGES, "aot_eager", tolerance=1e-5, dynamic=True)
    assert len(record.graphs) == 1
    assert served(record) == ["get_vision_position_ids", "get_vision_cu_seqlens", "get_vision_window_index"]
    (report,) = reports_of(record)
    assert {"get_vision_position_ids", "get_vision_window_index"} <= {change.split()[0] for change in report.changes}


def get_vision_frame_index(grid_thw: Tensor, scale: int = 1, kwargs: dict[str, Any] | None = None) -> Tensor:
    if kwargs is not None and (frame_index := kwargs.pop("frame_index", None)) is not None:
        return frame_index
    calls.append(grid_thw)
    return scale * torch.cat([torch.arange(t).repeat_interleave(h * w) + h for t, h, w in grid_thw.tolist()])


def of_transformers(function: Callable[..., Any], name: str = "get_vision_frame_index") -> Any:
    function.__module__, function.__name__, function.__qualname__ = "transformers.models.toy", name, name
    return function


frame_index = of_transformers(get_vision_frame_index)


def frames(x: Tensor, grid_thw: Tensor, negative: bool = False, **kwargs: Any) -> Tensor:
    for _ in range(2):
        x = x.sin() * frame_index(grid_thw, -1 if negative else 1, kwargs=kwargs)[:, None]
    return x * len(kwargs)


def test_a_function_runs_once_per_batch() -> None:
    program = compiled(frames, dynamic=True)
    program(*IMAGES[0], other=1)
    for x, grid in IMAGES[1:]:
        calls.clear()
        program(x, grid, other=1)
        assert len(calls) == 1
        torch.testing.assert_close(program(x, grid, other=1), frames(x, grid, other=1), rtol=0, atol=0)


def test_arguments_of_a_function_are_passed_on() -> None:
    program = compiled(frames)
    with fxpasses.inspect.record() as record:
        for negative in (False, True, False):
            actual, expected = (each(*IMAGES[0], negative, other=1) for each in (program, frames))
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert len(served(record)) == 4


def test_results_that_are_given_are_taken() -> None:
    """The function removes them from the dict, so the second call computes them."""
    x, grid = IMAGES[0]
    program = compiled(frames)
    for given in ({}, {"frame_index": torch.arange(len(x))}, {"frame_index": None}, {"other": 1}):
        with fxpasses.inspect.record() as record:
            actual = program(x, grid, **given)
        torch.testing.assert_close(actual, frames(x, grid, **given), rtol=0, atol=0)
        assert len(served(record)) == 2 - ("frame_index" in given)


def test_a_size_that_should_follow_from_constants_is_checked() -> None:
    wide = of_transformers(lambda grid: torch.ones(grid[:, 0].sum().item(), len(grid)))
    program = compiled(lambda x, grid: x[: len(grid)].sum() * wide(grid), dynamic=True)
    program(*IMAGES[0])
    with pytest.raises(RuntimeError, match="for the batch that was compiled"):
        program(*IMAGES[1])


# What is left to Dynamo


weight = torch.ones(3, requires_grad=True)


def writes(grid: Tensor) -> Tensor:
    grid[:, 0] = grid[:, 0] + 1
    return torch.arange(int(grid[0, 0]))


def raises(grid: Tensor) -> Tensor:
    if len(grid) == 4:
        raise ValueError(f"{len(grid)} images")
    return grid


def learns(grid: Tensor) -> Tensor:
    return grid * weight


def counts(grid: Tensor) -> int:
    return len(grid.tolist())


def nests(grid: Tensor) -> Any:
    return [grid * 2]


@pytest.mark.parametrize("function", [writes, raises, learns, counts, nests], ids=lambda function: function.__name__)
def test_other_functions_are_left_to_dynamo(function: Callable[..., Any]) -> None:
    called = of_transformers(function)

    def program(x: Tensor, grid: Tensor) -> Any:
        return x.sin() * 2, called(grid), grid

    def outcome(program: Any) -> Any:
        try:
            return program(IMAGES[0][0], IMAGES[0][1].clone())
        except ValueError as error:
            return [ord(letter) for letter in str(error)]

    with fxpasses.inspect.record() as record:
        torch.testing.assert_close(outcome(compiled(program)), outcome(program), rtol=0, atol=0)
    assert served(record) == []


def test_a_default_device_is_heeded() -> None:
    x, grid = IMAGES[0]
    with torch.device("meta"), fxpasses.inspect.record() as record:
        found = compiled(lambda x, grid: x.sin() * frame_index(grid)[:1].numel() + len(x))(x, grid)
    assert served(record) == [] and found.shape == x.shape
