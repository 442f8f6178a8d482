"""Options of compilations that give none: of the environment and of the process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import fxpasses
import fxpasses.inspect
from fxpasses import default_options
from fxpasses.dynamo import retracing


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(default_options.VARIABLE, raising=False)
    yield
    fxpasses.set_default_options()


def lowering(**arguments: object) -> str:
    """The lowering of a program that a framework compiles, which gives no options."""
    torch._dynamo.reset()
    with fxpasses.inspect.record() as record:
        torch.compile(torch.sin, backend="fastpack", **arguments)(torch.ones(3))  # type: ignore[call-overload]
    return str(record.graphs[0].options["lowering"])


def test_the_environment_gives_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_OPTIONS", '{"fastpack.lowering": "eager", "fastpack.capture": "off"}')
    assert lowering() == "eager"
    assert retracing.option(fxpasses.fastpack_backend, "capture") == "off"


def test_the_process_gives_options_over_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_OPTIONS", '{"fastpack.lowering": "eager", "fastpack.strict": true}')
    fxpasses.set_default_options({"fastpack.lowering": "aot_eager"})
    assert lowering() == "aot_eager"
    assert default_options.parse(None).strict


def test_a_calls_own_options_come_first() -> None:
    fxpasses.set_default_options({"fastpack.lowering": "aot_eager", "fastpack.strict": True})
    assert lowering(options={"fastpack.lowering": "eager"}) == "eager"
    fxpasses.set_default_options({"fastpack.mode": "reduce-overhead"})
    assert default_options.parse(None, "max-autotune").mode == "max-autotune"
    assert default_options.parse(None).mode == "reduce-overhead"


def test_a_later_call_replaces_the_earlier_one() -> None:
    fxpasses.set_default_options({"fastpack.strict": True})
    fxpasses.set_default_options({"fastpack.verify": True})
    assert not default_options.parse(None).strict and default_options.parse(None).verify


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{lowering: eager}", ["FASTPACK_OPTIONS", "not JSON", "'{lowering: eager}'", "such as"]),
        ('["eager"]', ["FASTPACK_OPTIONS", "a JSON object"]),
        ('{"fastpack.lowring": "eager"}', ["FASTPACK_OPTIONS", "did you mean 'fastpack.lowering'"]),
        ('{"lowering": "eager"}', ["FASTPACK_OPTIONS", "'lowering'", "'fastpack.'"]),
        ('{"fastpack.strict": "yes"}', ["FASTPACK_OPTIONS", "fastpack.strict", "True or False"]),
    ],
)
def test_a_wrong_environment_says_so(text: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_OPTIONS", text)
    with pytest.raises(ValueError) as raised:
        fxpasses.compile(torch.sin)
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_wrong_environment_fails_where_the_backend_is_named() -> None:
    """In `torch.compile`, and not in the model's first call."""
    program = "import torch; torch.compile(torch.sin, backend='fastpack'); print('compiled')"
    environment = {"FASTPACK_OPTIONS": '{"fastpack.lowering": "xla"}'}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert "compiled" not in done.stdout
    assert "ValueError: FASTPACK_OPTIONS: fastpack.lowering is 'xla'; choices: inductor, aot_eager" in done.stderr


def test_wrong_defaults_are_refused_where_they_are_set() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'fastpack\.verify'"):
        fxpasses.set_default_options({"fastpack.verfy": True})
    assert not default_options.parse(None).verify


def test_options_that_do_not_go_together_name_both_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTPACK_OPTIONS", '{"fastpack.lowering": "eager"}')
    with pytest.raises(ValueError, match=r"goes to Inductor.*the call gives .*shape_padding.*from FASTPACK_OPTIONS"):
        fxpasses.compile(torch.sin, options={"shape_padding": True})


def test_what_is_no_mapping_is_refused_in_words():
    with pytest.raises(ValueError, match="the options are 'fast'; pass a dict"):
        fxpasses.set_default_options("fast")
