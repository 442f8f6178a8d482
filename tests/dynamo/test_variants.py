"""Which guard makes a frame's variants: only a question whose guard failed is given up, once, and it is named."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import Tensor, nn

from fxpasses.dynamo import variants
from fxpasses.dynamo.trace import Trace
from fxpasses.inspect import record
from fxpasses.metadata.runtime.prologue import live_prologues
from tests.support import assert_same, compiled, instructions, instructions_of_stock

X = torch.linspace(-1, 1, 24).view(12, 2)


@pytest.fixture(autouse=True)
def nothing_is_remembered(capture_flags: None) -> Iterator[None]:
    torch._dynamo.reset()
    variants.forget()
    programs.clear()
    yield
    torch._dynamo.reset()


programs: dict[Any, Any] = {}  # compiled, for each test alone


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.linear(x)
        return x.sin() if lengths.max().item() > 6 else x.cos()


def warnings_of(program: Any, batches: Any, before_each: Any = lambda: None) -> tuple[list[str], int]:
    """What is said, and how many graphs are made; each step equals eager mode's."""
    step = programs.setdefault(program, compiled(program, strict=False))
    with warnings.catch_warnings(record=True) as caught, record() as found:
        warnings.simplefilter("always")
        for batch in batches:
            before_each()
            torch.testing.assert_close(step(X, batch), program(X, batch))
    return [str(one.message) for one in caught if "fxpasses" in str(one.message)], len(found.graphs)


def test_a_guard_of_something_else_counts_against_no_question_and_is_named() -> None:
    model = Asks()
    batches = [torch.tensor([8, 4])] * 6
    (said,), graphs = warnings_of(model, batches, lambda: model.linear.register_forward_hook(doubles))
    assert graphs == 6
    assert "_forward_hooks" in said and "batches differ" not in said and "lengths.max" not in said


def test_a_question_is_still_answered_after_variants_that_something_else_made() -> None:
    model = Asks()
    step = compiled(model)
    for _ in range(5):
        model.linear.register_forward_hook(doubles)
        step(X, torch.tensor([8, 4]))
    with record() as found:
        model.linear.register_forward_hook(doubles)
        step(X, torch.tensor([8, 4]))
    assert "assumed: lengths.max() > 6" in str(found)


def repeated(x: Tensor, lengths: Tensor) -> Tensor:
    for step in range(lengths.max().item()):
        x = x + step
    return x


def both(x: Tensor, lengths: Tensor) -> Tensor:
    x = x.sin() if lengths.min().item() > 2 else x.cos()
    return repeated(x, lengths)


def test_the_question_that_made_most_variants_is_given_up_and_no_other() -> None:
    batches = [torch.tensor([n, 1]) for n in range(3, 11)]
    said, _ = warnings_of(both, batches)
    assert any("lengths.max()" in text and "batches differ" in text for text in said)
    assert not any("lengths.min()" in text for text in said)


def first(x: Tensor, lengths: Tensor) -> Tensor:
    for step in range(lengths.max().item()):
        x = x + step
    return x.sin()


def second(x: Tensor, lengths: Tensor) -> Tensor:
    for step in range(lengths.max().item()):
        x = x * (step + 1)
    return x.cos()


def third(x: Tensor, lengths: Tensor) -> Tensor:
    for step in range(lengths.max().item()):
        x = x - step
    return x.tanh()


def asks_in_three_places(x: Tensor, lengths: Tensor) -> Tensor:
    return third(second(first(x, lengths), lengths), lengths)


def test_a_question_is_given_up_in_all_places_at_once() -> None:
    """Before, the rest of the frame, compiled as a frame of its own, asked again, six times; and so on."""
    said, _ = warnings_of(asks_in_three_places, [torch.tensor([n, 1]) for n in range(2, 12)])
    assert sum("batches differ" in text for text in said) == 1
    _, more = warnings_of(asks_in_three_places, [torch.tensor([n, 1]) for n in range(12, 15)])
    assert more == 0


def test_each_batch_finds_its_variant_and_nothing_is_given_up() -> None:
    batches = [torch.tensor([n, 4]) for n in (8, 2, 8, 2, 9, 3)]
    said, graphs = warnings_of(Asks(), batches)
    assert said == [] and graphs == 2


def test_a_place_that_asks_for_each_token_gets_no_more_answers() -> None:
    """Each batch would be a program of its own, and its trace as long as the batch (Qwen4's indexer of tokens)."""

    def program(x: Tensor, n: Tensor) -> Tensor:
        found = []
        for token, number in zip(x, n, strict=True):
            found.append(token * 2 if number.item() > 2 else token.sin())
        return torch.stack(found)

    x = torch.linspace(-1, 2, 300).view(100, 3).requires_grad_()
    batches = [(x, (torch.arange(100) * seed) % 5) for seed in (1, 2, 3)]
    with pytest.warns(UserWarning, match="asks for 8 numbers of one batch, and their answers differ"):
        record = assert_same(program, batches, "aot_eager")
    assert len([graph for graph in record.graphs if graph.outcome == "rewritten"]) <= 1
    torch._dynamo.reset()
    assert len(assert_same(program, [(x, torch.full((100,), 7))], "aot_eager").graphs) == 1


def test_frames_inside_do_not_ask_such_a_place_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph breaks in each frame on the way to the loop; each was traced up to its 8th question."""
    asked: list[Any] = []
    count = Trace._count
    monkeypatch.setattr(Trace, "_count", lambda *args: (asked.append(args[2]), count(*args)))

    def each(x: Tensor, n: Tensor) -> Tensor:
        return torch.stack([row * 2 if number.item() > 2 else row.sin() for row, number in zip(x, n, strict=True)])

    def layer(x: Tensor, n: Tensor) -> Tensor:
        return each(x + 1, n) + 1

    def program(x: Tensor, n: Tensor) -> Tensor:
        return layer(x.cos(), n).tanh()

    x = torch.linspace(-1, 2, 300).view(100, 3).requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same(program, [(x, torch.arange(100) % 5)], "aot_eager")
    assert len(asked) == 8


def chosen(x: Tensor, n: Tensor) -> Tensor:
    x = x.sin().cos()
    keep = [place for place, number in enumerate(n.tolist()) if number > 2]
    return x[keep].tanh()


def test_as_many_questions_as_are_answered_give_nothing_up() -> None:
    n = torch.arange(8) % 5
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(assert_same(chosen, [(torch.linspace(-1, 2, 8), n)]).graphs) == 1


def test_a_place_where_the_graph_cannot_break_is_traced_as_stock_traces_it() -> None:
    """Dynamo does not break a graph inside a comprehension: the whole frame ran uncompiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = assert_same(chosen, [(torch.linspace(-1, 2, 9), torch.arange(9) % 5)])
    assert len([graph for graph in record.graphs if graph.outcome != "retraced"]) == 2


class Looks(torch.nn.Module):
    """Dynamo does not free the guards of a module's frame."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.linear(x)
        return x.sin() if lengths.max() > 6 else x.cos()


def test_a_reset_frees_what_guards_hold() -> None:
    """Before, each model that was compiled and given up left its prologues to `PrefetchLoader`."""
    gc.collect()
    before = len(live_prologues())
    for _ in range(3):
        program = compiled(Looks())
        for length in (4, 8):
            program(torch.ones(2, 4), torch.tensor([length, 1]))
        torch._dynamo.reset()
    del program
    compiled(torch.sin)(torch.ones(2))
    gc.collect()
    assert len(live_prologues()) <= before


def layers(x: Tensor) -> Tensor:
    for _ in range(40):
        x = x.sin()
    return x


def each_repeated(x: Tensor, lengths: Tensor) -> Tensor:
    for length in lengths.tolist():
        for step in range(length):
            x = x + step
    return x


def layers_around(x: Tensor, lengths: Tensor) -> Tensor:
    return layers(each_repeated(layers(x), lengths))


LENGTHS = [[2, 3, 4, 5, 2], [3, 4, 2, 4, 3], [4, 2, 3, 2, 5], [2, 2, 5, 3, 4], [5, 3, 2, 2, 3], [3, 5, 3, 4, 2]]
LENGTHS += [[4, 4, 4, 2, 4], [2, 5, 2, 5, 5]]


@pytest.mark.filterwarnings("ignore")
def test_compiling_takes_at_most_twice_what_stock_takes_where_each_batch_has_other_answers() -> None:
    batches = [(X, torch.tensor(lengths)) for lengths in LENGTHS]
    stock = instructions_of_stock(layers_around, batches)
    torch._dynamo.reset()
    assert instructions(compiled(layers_around, strict=False), batches) <= 2 * stock


def pixels(x: Tensor, height: int, width: int) -> Tensor:
    for scale in (1, 2):
        for place in (torch.arange(height * width) % width).tolist():
            x = x + scale * place
    return x


@pytest.mark.filterwarnings("ignore")
def test_numbers_whose_count_several_sizes_determine_are_not_unrolled() -> None:
    """Before, each pair of sizes was a graph. A break in a loop leaves the frame to eager mode, as under stock."""
    step = compiled(pixels, strict=False)
    with record() as found:
        for sizes in [(2, 3), (4, 2), (3, 5), (5, 2), (2, 6)]:
            torch.testing.assert_close(step(X, *sizes), pixels(X, *sizes))
    assert len(found.graphs) <= 2


def test_a_batch_that_changes_many_numbers_is_the_last_to_be_asked() -> None:
    (said, *_), _ = warnings_of(each_repeated, map(torch.tensor, LENGTHS[:3]))
    assert "compiled 2 times because batches differ" in said


def branches(x: Tensor, lengths: Tensor) -> Tensor:
    for length in lengths.tolist():
        x = x.sin() if length > 2 else x.cos()
    return x


def test_combinations_of_branches_are_given_up_at_the_third() -> None:
    batches = [torch.tensor(n) for n in ([1, 2, 3, 4], [4, 2, 3, 4], [1, 2, 3, 4], [1, 4, 3, 4])]
    assert warnings_of(branches, batches[:3]) == ([], 2)
    (said, *_), _ = warnings_of(branches, batches)
    assert "compiled 3 times because batches differ" in said


def test_a_batch_without_the_numbers_of_a_guard_is_another_variant_and_nothing_is_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def program(x: Tensor, lengths: Tensor) -> Tensor:
        ends = lengths[lengths > 0]
        return x.sin() if len(ends) < 3 or ends[2] > 6 else x.cos()

    batches = [torch.tensor(n) for n in ([1, 2, 3, 4], [1, 2, 0, 0], [1, 2, 7, 8])]
    _, graphs = warnings_of(program, batches)
    assert graphs == 3
    assert "Traceback" not in capfd.readouterr().err
