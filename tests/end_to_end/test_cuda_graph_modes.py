"""The modes that record CUDA graphs, where there is no CUDA: they compile, and what they compile equals eager mode."""

from __future__ import annotations

import pytest
import torch

import fxpasses.inspect
from fxpasses import fastpack_backend
from tests.end_to_end.test_training_step import Decoder, batches
from tests.support import results


@pytest.mark.slow
def test_reduce_overhead_equals_eager_mode_and_compiles_once_for_all_batches(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # what a cache has is not partitioned, so not reported
    model = Decoder(1, checkpointed=False)
    with fxpasses.inspect.record() as record:
        program = torch.compile(model, backend=fastpack_backend, mode="reduce-overhead")
        for batch in batches():
            torch.testing.assert_close(results(program, batch), results(model, batch), rtol=1e-5, atol=1e-5)
    (graph,) = record.graphs
    assert graph.outcome == "rewritten" and list(graph.cuda_graphs) == ["graph", "forward", "backward"]
    for found in graph.cuda_graphs.values():
        assert found.whole and [number.kind for number in found.numbers] == ["int"]
