"""Attention over packed, windowed and padded batches: the mask rules out most pairs of tokens."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import (
    EAGER,
    OURS,
    STOCK,
    STOCK_FLAGS,
    Compiler,
    contender,
    eager,
    fastpack,
    inductor,
    inductor_with_flags,
    ours,
)
from bench.results import find

DENSE, FLASH, BOUND = "fastpack, dense", "eager, flash path", "fastpack, no attention"
DENSELY = functools.partial(fastpack, attention="dense")
BATCHES = 2
WINDOW = 512
ROWS = 8  # of the padded batch, half of which is padding
SIZES: dict[str, dict[str, int]] = {
    "reduced": {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4},
    "full": {  # Llama-3.2-1B, except for the vocabulary
        "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
VOCABULARY = 512


def no_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **_: Any) -> tuple[Any, None]:
    """A sum that replaces attention, so that all projections have gradients. [B, H, T, D] -> [B, T, H, D]."""
    repeats = query.shape[1] // key.shape[1]
    return (query + (key + value).repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), None


def build(compiler: Compiler, parameters: Parameters, device: str, attention: str = "sdpa") -> Program:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    from bench.cases.training import training_program

    if attention == "flash":
        from examples.varlen_attention import install

        attention = install()
    if attention == "none":
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(attention, no_attention)
        AttentionMaskInterface.register(attention, lambda *_, **__: None)
    windowed = parameters["mask"] == "window"
    kind, config = (MistralForCausalLM, MistralConfig) if windowed else (LlamaForCausalLM, LlamaConfig)
    sizes = SIZES[parameters["width"]] | {"num_hidden_layers": parameters["layers"], "vocab_size": VOCABULARY}
    more = {"sliding_window": WINDOW} if windowed else {}
    model = kind(
        config(**sizes, **more, max_position_embeddings=1 << 15, use_cache=False, attn_implementation=attention)
    )
    model = model.to(device, getattr(torch, parameters["dtype"])).train()
    compiled = compiler(model)
    return training_program(model, lambda batch: compiled(**batch).loss, batches(parameters, device))


def batches(parameters: Parameters, device: str) -> list[dict[str, Any]]:
    """input_ids, labels: int64 [1, tokens], or [ROWS, tokens / ROWS] where padded; position_ids or attention_mask."""
    import torch

    generator = torch.Generator().manual_seed(2)
    tokens, mask = parameters["tokens"], parameters["mask"]
    found = []
    for _ in range(BATCHES):
        shape = (ROWS, tokens // ROWS) if mask == "padded" else (1, tokens)
        ids = torch.randint(VOCABULARY, shape, generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if mask == "padded":
            lengths = torch.linspace(0.1, 0.9, ROWS).mul(shape[1]).round().long()
            lengths = lengths[torch.randperm(ROWS, generator=generator)]
            batch["attention_mask"] = (torch.arange(shape[1]) < lengths[:, None]).long()
            batch["labels"][batch["attention_mask"] == 0] = -100
        else:
            batch["position_ids"] = torch.cat([torch.arange(n) for n in lengths_of(parameters, generator)])[None]
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def lengths_of(parameters: Parameters, generator: Any) -> list[int]:
    """The documents' lengths: random, or all the same if the group says so."""
    import torch

    tokens, documents = parameters["tokens"], parameters["documents"]
    if parameters["mask"] == "equal documents":
        return [tokens // documents] * documents
    cuts = (torch.randperm(tokens - 1, generator=generator)[: documents - 1] + 1).sort().values.tolist()
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, tokens], strict=True)]


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    rest = {"layers": 2, "width": "reduced", "dtype": "bfloat16" if device == "cuda" else "float32"}
    if quick:
        return [{"mask": "documents", "tokens": 1024, "documents": 6, **rest}]
    times = 2 if device == "cuda" else 1
    shapes = [("documents", 4096 * times, 12), ("padded", 2048 * times, ROWS), ("window", 2048 * times, 1)]
    shapes += [("one document", 1024 * times, 1)]
    shapes += [("equal documents", tokens * times, tokens * times // 512) for tokens in (1024, 2048, 4096)]
    return [{"mask": mask, "tokens": tokens, "documents": documents, **rest} for mask, tokens, documents in shapes]


def not_for_growth(parameters: Parameters, device: str) -> str:
    """Documents of the same length show how the time grows with the tokens."""
    return "equal documents are for growth alone" if parameters["mask"] == "equal documents" else ""


def same_as_with_flags(parameters: Parameters, device: str) -> str:
    """These models ask their batch nothing, so the capture flags change nothing."""
    slow = device == "cpu" and parameters["tokens"] > 2048
    return not_for_growth(parameters, device) or ("the same graph as with both flags" if slow else "")


def slow_as_eager(parameters: Parameters, device: str) -> str:
    slow = device == "cpu" and parameters["tokens"] > 4096
    return not_for_growth(parameters, device) or ("as slow as the other dense ones" if slow else "")


def arithmetic(entries: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Time per thousand tokens, at documents of 512 tokens: dense attention makes it grow with the tokens."""
    rows = []
    for entry in entries:
        parameters = entry["parameters"]
        if entry["contender"] != OURS or parameters["mask"] != "equal documents" or entry["outcome"] != "measured":
            continue
        row = {"tokens": parameters["tokens"]}
        for name in (EAGER, OURS):
            seconds = (find(entries, parameters, name) or {}).get("median_s")
            row[f"{name}, ms for 1,000 tokens"] = 1e6 * seconds / parameters["tokens"] if seconds else None
        rows.append(row)
    return rows


CASE = Case(
    name="packed_attention",
    title="Packed attention: documents, windows and padding, of which a mask leaves a part",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager),
        contender(STOCK, build, inductor, unavailable=same_as_with_flags),
        contender(STOCK_FLAGS, build, inductor_with_flags, unavailable=not_for_growth),
        contender(FLASH, functools.partial(build, attention="flash"), eager, unavailable=not_for_growth),
        contender(DENSE, build, DENSELY, ours=True, unavailable=slow_as_eager),
        ours(OURS, build),
        contender(BOUND, functools.partial(build, attention="none"), fastpack, ours=True, bound=True),
    ],
    baseline=EAGER,
    x="tokens",
    expected=(
        "Attention with a dense mask computes T² pairs; documents of n tokens leave n·T / 2 of them, and a window of w "
        "leaves w·T. The rest of a layer grows with T, so at a fixed length of documents the whole step should, too."
    ),
    arithmetic=arithmetic,
    cpu_time=True,
    notes=(
        "The models are transformers' own, with `sdpa`, and `position_ids` that start again at each document, or a "
        "padding mask. On a CPU the flash path ends in the operator of examples/varlen_attention.py, which is not a "
        "fused kernel. In the last column a sum of its operands replaces attention: that column is the rest of the "
        "step, compiled, and no attention can be faster than it."
    ),
)
