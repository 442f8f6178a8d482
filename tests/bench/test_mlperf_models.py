"""Each small workload of MLPerf takes a step in eager mode, on every batch of the case."""

import pytest

from bench.cases.mlperf_models import WORKLOADS, loss_of, missing, workload


@pytest.mark.parametrize("name", WORKLOADS)
def test_every_batch_has_a_loss_and_gradients(name: str) -> None:
    if name in ("BERT", "ResNet", "RT-DETR", "MaskFormer"):
        pytest.importorskip("transformers")
    if why := missing(name):
        pytest.skip(why)
    model, batches = workload(name, "cpu")
    for batch in batches:
        loss = loss_of(model(**batch))
        loss.backward()
        assert loss.isfinite()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.grad is not None for p in model.parameters()) > len(list(model.parameters())) // 2
