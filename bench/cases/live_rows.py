"""Padded, prompted batches: most tokens cannot reach the loss. Beside the compilers, the same text packed by hand."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import (
    EAGER,
    LIGER,
    Compiler,
    contender,
    eager,
    fastpack,
    inductor,
    needs_liger,
    ours,
    usual,
)

LIVE, ALL_ROWS = "fastpack, live rows", "fastpack, all rows"
BY_HAND, BY_HAND_OURS = "by hand, Inductor", "by hand, fastpack, all rows"
BATCHES, ROWS = 4, 4
LABELLED = 0.4  # the part of each text that has labels, where its prompt has none
SIZES = {"hidden": 512, "layers": 4, "heads": 8, "vocabulary": 32000}
WIDE = {"hidden": 2048, "layers": 8, "heads": 16, "vocabulary": 32000}  # on a GPU, which the others leave idle
SMALL = {"hidden": 128, "layers": 2, "heads": 4, "vocabulary": 4000}
# Of the model of transformers: its class, and what its configuration takes besides the sizes.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", {}),
    "Qwen3": ("Qwen3ForCausalLM", {"head_dim": 64}),
    "DPO": ("LlamaForCausalLM", {}),
    "BERT": ("BertForSequenceClassification", {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
    "embedding": ("BertModel", {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}),
    "BART": ("BartForConditionalGeneration", {"dropout": 0.0}),
}
CAUSAL = ("Llama", "Qwen3")


def build(
    compiler: Compiler, parameters: Parameters, device: str, by_hand: bool = False, liger: bool = False
) -> Program:
    import torch

    from bench.cases.training import training_program

    torch.manual_seed(0)
    model = model_of(parameters).to(device, getattr(torch, parameters["dtype"])).train()
    if liger:
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    loss = compiler(LOSSES.get(parameters["model"], causal_loss)(model))
    batches = padded_batches(parameters, device)
    if by_hand:
        batches = [packed(batch) for batch in batches]
    return training_program(model, lambda batch: loss(**batch), batches)


def model_of(parameters: Parameters) -> Any:
    import transformers

    name, more = MODELS[parameters["model"]]
    kind = getattr(transformers, name)
    hidden, layers, heads = parameters["hidden"], parameters["layers"], parameters["heads"]
    sizes = {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads,
        "intermediate_size": hidden * 11 // 4, "use_cache": False,
    }  # fmt: skip
    if parameters["model"] == "BART":
        sizes = {"d_model": hidden, "use_cache": False}
        for part in ("encoder", "decoder"):
            sizes |= {f"{part}_layers": layers // 2, f"{part}_attention_heads": heads, f"{part}_ffn_dim": 4 * hidden}
    positions = 2 * max(parameters["tokens"], 512)
    return kind(
        kind.config_class(
            **sizes, **more, vocab_size=parameters["vocabulary"], pad_token_id=0, max_position_embeddings=positions
        )
    )


def causal_loss(model: Any) -> Callable[..., Any]:
    def loss(**batch: Any) -> Any:
        return model(**batch).loss

    return loss


def preference_loss(model: Any) -> Callable[..., Any]:
    """DPO: the first half of the batch is preferred to the second. [ROWS, T]"""
    import torch.nn.functional as F

    def loss(input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
        is_labelled = targets != -100
        chosen = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)
        preferred, other = (chosen * is_labelled).sum(1).chunk(2)
        return -F.logsigmoid(0.1 * (preferred - other)).mean()

    return loss


def class_loss(model: Any) -> Callable[..., Any]:
    import torch.nn.functional as F

    def loss(input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        logits = model(input_ids=input_ids, attention_mask=attention_mask).logits
        return F.cross_entropy(logits, input_ids[:, 0] % 2)

    return loss


def contrastive_loss(model: Any) -> Callable[..., Any]:
    """Each text of the first half belongs to one of the second, by the mean of its tokens."""
    import torch
    import torch.nn.functional as F

    def loss(input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        hidden = model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        seen = attention_mask[..., None].to(hidden.dtype)
        queries, keys = F.normalize((hidden * seen).sum(1) / seen.sum(1), dim=-1).chunk(2)
        return F.cross_entropy(queries @ keys.T * 20, torch.arange(len(queries), device=hidden.device))

    return loss


LOSSES: dict[str, Callable[[Any], Callable[..., Any]]] = {
    "DPO": preference_loss,
    "BERT": class_loss,
    "embedding": contrastive_loss,
}


def padded_batches(parameters: Parameters, device: str) -> list[dict[str, Any]]:
    """input_ids, attention_mask, labels: int64 [ROWS, tokens]; of BART the labels are the target's, as long."""
    import torch

    generator = torch.Generator().manual_seed(3)
    tokens, dead = parameters["tokens"], parameters["dead"]
    found = []
    for _ in range(BATCHES):
        lengths = torch.full((ROWS,), tokens)
        if "padding" in dead:
            lengths = torch.randint(tokens // 6, tokens + 1, (ROWS,), generator=generator)
        place = torch.arange(tokens)
        seen = place < lengths[:, None]
        ids = torch.randint(1, parameters["vocabulary"], (ROWS, tokens), generator=generator) * seen
        is_labelled = seen
        if "prompts" in dead:
            is_labelled = seen & (place >= (lengths * (1 - LABELLED)).round()[:, None])
        batch = {"input_ids": ids, "attention_mask": seen.long(), "labels": torch.where(is_labelled, ids, -100)}
        found.append({name: value.to(device) for name, value in batch.items()})
    return found


def packed(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch as a flattening collator writes it: int64 [1, N], with positions that start again in each text."""
    import torch

    seen = batch["attention_mask"].bool()
    positions = torch.arange(seen.shape[1]).expand_as(seen)[seen]
    labels = batch["labels"][seen]
    labels[positions == 0] = -100
    return {"input_ids": batch["input_ids"][seen][None], "position_ids": positions[None], "labels": labels[None]}


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    if quick:
        return [{"model": "Llama", "dead": "padding and prompts", "tokens": 128, **SMALL, "dtype": dtype}]
    both = "padding and prompts"
    shapes = [("Llama", both), ("Llama", "padding"), ("Llama", "nothing"), ("Qwen3", both), ("DPO", both)]
    shapes += [(model, "padding") for model in ("BERT", "embedding", "BART")]
    sizes = WIDE if device == "cuda" else SIZES
    found = [{"model": model, "dead": dead, "tokens": 384, **sizes, "dtype": dtype} for model, dead in shapes]
    return [group | ({"vocabulary": 128000} if group["model"] == "Qwen3" else {}) for group in found]


def not_by_hand(parameters: Parameters, device: str) -> str:
    return "" if parameters["model"] in CAUSAL else "transformers packs causal language models alone"


def not_by_liger(parameters: Parameters, device: str) -> str:
    return needs_liger(parameters, device) if parameters["model"] in CAUSAL else "it is measured on causal ones alone"


def as_by_default(parameters: Parameters, device: str) -> str:
    return "" if device == "cuda" else 'on a CPU it is the default, "auto"'


CASE = Case(
    name="live_rows",
    title="Live rows: padding and prompts, which no loss reads",
    groups=groups,
    contenders=[
        *usual(build),
        dataclasses.replace(ours(LIVE, build, rows="live"), unavailable=as_by_default),
        ours(ALL_ROWS, build, rows="all"),
        contender(BY_HAND, functools.partial(build, by_hand=True), inductor, unavailable=not_by_hand),
        contender(
            BY_HAND_OURS,
            functools.partial(build, by_hand=True),
            functools.partial(fastpack, rows="all"),
            ours=True,
            unavailable=not_by_hand,
        ),
        contender(LIGER, functools.partial(build, liger=True), eager, unavailable=not_by_liger),
    ],
    baseline=EAGER,
    x="tokens",
    expected=(
        "Padding is 42 % of the tokens, and of the rest 60 % are prompts. What goes through every layer grows with the "
        "tokens that are not padding, and the head, which is a third of the products here, with those that have labels."
    ),
    cpu_time=True,
    notes=(
        "The models are transformers' own; the loss alone is returned. Padding is on the right. Packing by hand is "
        "what a flattening collator does: padding is left out, prompts are not; another program of the user's."
    ),
)
