"""A sample of the zoo: never worse than without this package. `make zoo` runs all of it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers", minversion="5.23")

from tests.support import thorough
from tests.zoo import results
from tests.zoo.architectures import Architecture, architectures
from tests.zoo.run import run_one

# Of the kinds that differ most: windows, latent attention with a mixture, an encoder, a pair of both.
SAMPLE = ["causal/gemma3_text", "causal/deepseek_v3", "masked/modernbert", "seq2seq/t5"]
MORE = [
    "causal/llama", "causal/gpt2", "causal/mamba2", "causal/gpt_neox", "causal/opt", "causal/falcon", "causal/bamba",
    "causal/qwen3_moe", "masked/bert", "masked/deberta-v2", "masked/electra", "seq2seq/led", "classification/llama",
    "classification/bert", "speech/whisper", "vision-language/llava",
]  # fmt: skip


@pytest.fixture(scope="module")
def known() -> dict[str, Architecture]:
    return {each.key: each for each in architectures()}


@pytest.mark.all_cases
@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("key", [*SAMPLE, *(pytest.param(key, marks=thorough) for key in MORE)])
def test_never_worse_than_without(key: str, known: dict[str, Architecture]) -> None:
    lines = run_one(known[key], limit_s=900)
    runs = results.runs(lines)
    assert not results.not_run(lines)
    assert runs and all(run.comparable for run in runs)
    assert {run.arrangement: run.violations(timed=False) for run in runs} == {run.arrangement: [] for run in runs}


def test_results_of_the_last_run_are_never_worse() -> None:
    """Of `make zoo`, if it was run here. A compilation may take longer where stock leaves more to eager mode."""
    runs = results.runs(results.read())
    if not runs:
        pytest.skip("make zoo was not run")
    found = [(run, word) for run in runs for word in run.violations() if results.LEAVES_MORE not in word]
    assert [f"{run.architecture}, {run.arrangement}: {word}" for run, word in found] == []
