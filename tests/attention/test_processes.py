"""Seen from outside: the memory of a process whose masks are not made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOKENS, DOCUMENTS = 16384, 16

# Two layers of a tiny Llama on packed text. It has been compiled for a short text before, in eager mode too: what the
# compiler itself takes is in both. The process waits to be looked at, and then ends.
TRAIN = """
import json, sys
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import fxpasses

mode, tokens, documents = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(1)
torch.manual_seed(0)
config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=64,
                     use_cache=False, max_position_embeddings=tokens, attn_implementation="sdpa")
model = LlamaForCausalLM(config)
options = {"fastpack.lowering": "aot_eager", "fastpack.strict": True}
compiled = torch.compile(model, backend="fastpack", dynamic=False, options=options)

def step(program, tokens):
    ids = torch.randint(64, (1, tokens))
    position_ids = torch.arange(tokens // documents).repeat(documents)[None]
    loss = program(input_ids=ids, position_ids=position_ids, labels=ids).loss
    loss.backward()
    return loss

step(compiled, 256)
loss = step(model if mode == "eager" else compiled, tokens)
print(json.dumps(loss.item()), flush=True)
sys.stdin.read()
"""


def peak_memory(mode: str) -> tuple[int, float]:
    """The peak of a process's resident memory in bytes, as the system counts it, and the loss."""
    # A fixed threshold, or the C library raises it as large tensors are freed, and keeps their memory for itself.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TRAIN, mode, str(TOKENS), str(DOCUMENTS)]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        loss = json.loads(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status").read_text()
        process.stdin.close()
    assert process.returncode == 0
    return 1024 * int(status.split("VmHWM:")[1].split()[0]), loss


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_peak_memory_is_below_that_of_eager_mode_by_the_masks():
    """By a byte a pair for the mask of bools, and four for an additive one, which SDPA makes of it in each layer."""
    pytest.importorskip("transformers")
    before, expected = peak_memory("eager")
    after, loss = peak_memory("compiled")
    assert loss == pytest.approx(expected, rel=1e-5)
    assert before - after >= 5 * TOKENS**2, (before, after)
