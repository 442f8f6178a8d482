"""Architectures of transformers, restored from their traces: eager mode's loss and gradients, and nothing is traced.

Their tiny models and batches are the zoo's. `REFUSED` has those whose traces are not kept, and why.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")
if torch.__version__ < "2.13":  # no mark: cases with a `skipif` of their own are not counted (`conftest.py`)
    pytest.skip("traces are kept from torch 2.13 on", allow_module_level=True)

from fxpasses.restart import recording, restoring
from tests.restart.restarting import counting, forget
from tests.support import compiled
from tests.zoo import media, tiny
from tests.zoo.architectures import Architecture, architectures
from tests.zoo.measuring import Numbers, difference, step

CAUSAL = (
    "llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "phi3", "olmo2",
    "granite", "starcoder2", "opt", "falcon", "bloom", "falcon_h1", "mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3",
    "mamba2", "jamba", "llama4_text",
)  # fmt: skip
OTHERS = (
    "masked/bert", "masked/albert", "masked/roberta", "masked/modernbert", "masked/deberta-v2", "seq2seq/t5",
    "seq2seq/bart", "seq2seq/led", "classification/llama", "speech/whisper", "ctc/wav2vec2", "vision-language/llava",
    "vision-language/gemma3", "vision-language/qwen2_5_vl",
)  # fmt: skip
CASES = [
    *((f"causal/{name}", layout) for name in CAUSAL for layout in ("packed", "padded")),
    *((key, "padded") for key in OTHERS),
]
REFUSED = {
    "vision-language/llava": "has hooks",  # by which transformers records hidden states
    # Its vision tower's sizes are computed on the host.
    "vision-language/qwen2_5_vl": "functions of the process|looks for an object",
}
WITHOUT_CACHE = ("causal/jamba",)  # its own fails in eager mode
TOLERANCE = 2e-6  # of a mixture's or a state-space model's sums, as where the frame is traced


@pytest.fixture(scope="module")
def known() -> dict[str, Architecture]:
    return {each.key: each for each in architectures()}


def steps(model: Any, batches: list[Any], is_compiled: bool) -> tuple[list[Numbers], list[str]]:
    """The numbers of each batch's step, and what was traced."""
    model = copy.deepcopy(model)
    program = compiled(model) if is_compiled else model
    with counting() as traced:
        return [step(model, program, batch) for batch in batches], traced


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("key", "layout"), CASES)
def test_an_architecture_is_not_traced_again(key: str, layout: str, known: dict[str, Architecture]) -> None:
    model = tiny.model(known[key])
    batches = [media.batch(known[key].task, model, layout, number) for number in (0, 1)]
    if key not in WITHOUT_CACHE:
        for batch in batches:
            batch.pop("use_cache", None)  # the model's own default is a cache, whose objects the trace returns
    expected, _ = steps(model, batches, is_compiled=False)
    forget()
    recording.start()
    steps(model, batches, is_compiled=True)
    traces, refusals = recording.saved(), recording.refusals()
    if key in REFUSED:
        assert not traces and re.search(REFUSED[key], "".join(refusals.values()))
        return
    assert traces and not refusals
    forget()
    restoring.load(traces)
    actual, traced = steps(model, batches, is_compiled=True)
    assert traced == []
    for each, wanted in zip(actual, expected, strict=True):
        assert difference(each, wanted)[0] <= TOLERANCE
