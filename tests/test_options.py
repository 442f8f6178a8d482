"""Options: what is accepted, and what a wrong one says."""

from __future__ import annotations

import pytest
import torch

import fxpasses
from fxpasses.options import Options


def test_defaults():
    options = Options.parse(None)
    assert options.attention == "auto"
    assert (options.passes, options.lowering, options.verify, options.strict) == (
        (
            "hoist_writes",
            "group_experts",
            "factor_adapters",
            "live_rows",
            "chunk_loss",
            "sparsify_attention",
            "hoist_metadata",
            "omit_masks",
            "coalesce_reads",
            "split_topk",
            "fold_layers",
            "offload_activations",
        ),
        "inductor",
        False,
        False,
    )


def test_other_keys_go_to_inductor():
    options = Options.parse({"shape_padding": True, "fastpack.verify": True})
    assert dict(options.inductor) == {"shape_padding": True}
    assert options.verify


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"fastpack.lowring": "eager"}, ["fastpack.lowring", "did you mean 'fastpack.lowering'"]),
        ({"fastpack.nonsense": 1}, ["fastpack.nonsense", "fastpack.passes", "fastpack.strict"]),
        ({"fastpack.lowering": "xla"}, ["fastpack.lowering", "'xla'", "inductor, aot_eager, eager"]),
        ({"fastpack.verify": "yes"}, ["fastpack.verify", "'yes'", "True or False"]),
        ({"fastpack.attention": "off"}, ["fastpack.attention", "'off'", "auto, dense"]),
        ({"fastpack.start": "later"}, ["fastpack.start", "'later'", "compiled, eager"]),
        ({"fastpack.strict": 1}, ["fastpack.strict", "1", "True or False"]),
        ({"shape_pading": True}, ["'shape_pading'", "Inductor", "did you mean 'shape_padding'"]),
        ({"lowering": "eager"}, ["'lowering'", "'fastpack.'"]),
        ({"fastpack.mode": "max-autotun"}, ["'max-autotun'", "did you mean 'max-autotune'"]),
        ({"fastpack.passes": "hoist_metadata"}, ["fastpack.passes", "a list"]),
        ({"fastpack.passes": ["hoist_metdata"]}, ["'hoist_metdata'", "did you mean 'hoist_metadata'"]),
        ({"fastpack.memory": "80"}, ["fastpack.memory", "'80'", "bytes", '"1%" to "100%"']),
        ({"fastpack.memory": 0}, ["fastpack.memory", "0", "from 1"]),
        ({"fastpack.memory": True}, ["fastpack.memory", "True"]),
        ({"fastpack.memory": "101%"}, ["fastpack.memory", "'101%'"]),
        ({"fastpack.memory": "40iB"}, ["fastpack.memory", "'40iB'", '"40GiB"']),
        ({"fastpack.offload.host_budget": "1 gigabyte"}, ["fastpack.offload.host_budget", "'1 gigabyte'", '"1GiB"']),
        ({"fastpack.memory.checkpoints": "off"}, ["fastpack.memory.checkpoints", "'off'", "keep, free"]),
        ({"fastpack.memory": "50%", "fastpack.lowering": "eager"}, ["fastpack.memory", "'50%'", "aot_eager"]),
        ({"fastpack.offload": "dsk"}, ["fastpack.offload", "'dsk'", "off, host, disk"]),
        ({"fastpack.offload.bufers": 2}, ["fastpack.offload.bufers", "did you mean 'fastpack.offload.buffers'"]),
        ({"fastpack.offload.buffers": 0}, ["fastpack.offload.buffers", "0", "buffers from 1"]),
        ({"fastpack.offload.min_bytes": 1.5}, ["fastpack.offload.min_bytes", "1.5", "bytes from 0"]),
        ({"fastpack.offload.keep_last": True}, ["fastpack.offload.keep_last", "True", "tensors from 0"]),
        ({"fastpack.offload.host_budget": -1}, ["fastpack.offload.host_budget", "-1", "bytes from 0, or None"]),
        ({"fastpack.offload.directory": "/no/such"}, ["fastpack.offload.directory", "'/no/such'", "directory"]),
        ({"fastpack.offload": "disk", "fastpack.lowering": "eager"}, ["fastpack.offload", "disk", "aot_eager"]),
        ({"fastpack.lowering": "eager", "shape_padding": True}, ["'shape_padding'", "fastpack.lowering", "eager"]),
    ],
)
def test_wrong_options_say_what_and_what_instead(given, words):
    with pytest.raises(ValueError) as error:
        Options.parse(given)
    for word in words:
        assert word in str(error.value)


def test_wrong_options_reach_the_user_of_compile_at_once():
    with pytest.raises(ValueError, match="lowring"):
        fxpasses.compile(torch.nn.Linear(2, 2), options={"fastpack.lowring": "eager"})


def test_wrong_options_reach_the_user_of_the_backend_name():
    compiled = torch.compile(lambda x: x + 1, backend="fastpack", options={"fastpack.lowring": "eager"})
    with pytest.raises(Exception, match=r"did you mean 'fastpack\.lowering'"):
        compiled(torch.ones(2))


def test_mode_as_an_argument_and_as_an_option():
    assert Options.parse(None, mode="max-autotune").mode == Options.parse({"fastpack.mode": "max-autotune"}).mode
    with pytest.raises(ValueError, match="give one"):
        Options.parse({"fastpack.mode": "default"}, mode="max-autotune")


@pytest.mark.slow
def test_mode_and_inductor_options_reach_inductor():
    def program(x, lengths):
        return x * lengths.max().item() + lengths.max().item()

    x, lengths = torch.randn(4), torch.tensor([1, 2])
    options = {"fastpack.mode": "max-autotune", "shape_padding": True, "fastpack.strict": True}
    for compiled in (
        torch.compile(program, backend="fastpack", options=options),
        torch.compile(program, backend="fastpack", mode="max-autotune"),
        fxpasses.compile(program, mode="max-autotune", options={"shape_padding": True}),
    ):
        torch._dynamo.reset()
        torch.testing.assert_close(compiled(x, lengths), program(x, lengths))


def test_mode_needs_inductor():
    with pytest.raises(ValueError, match="max-autotune"):
        Options.parse({"fastpack.lowering": "eager"}, mode="max-autotune")


@pytest.mark.parametrize(
    ("text", "number"), [("40GiB", 40 << 30), ("1.5 GB", 1_500_000_000), ("512KiB", 1 << 19), ("7B", 7)]
)
def test_bytes_may_have_a_unit(text: str, number: int) -> None:
    given = {"fastpack.memory": text, "fastpack.offload.host_budget": text, "fastpack.offload.min_bytes": text}
    found = Options.parse(given)
    assert (found.memory.budget, found.offload.host_budget, found.offload.min_bytes) == (number,) * 3
