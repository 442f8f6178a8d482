"""QLoRA: a decoder in 4 bits whose adapters are trained, on packed text, under checkpoints."""

from __future__ import annotations

import importlib.util
import tempfile
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
)

SIZES: dict[str, dict[str, int]] = {
    "reduced": {
        "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 64,
    },
    "full": {  # Qwen3-0.6B
        "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128,
    },
}  # fmt: skip
VOCABULARY = 512
RANK = 16


def build(compiler: Compiler, parameters: Parameters, device: str) -> Program:
    import torch
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM

    from bench.cases.decoders import packed_batches
    from bench.cases.training import training_program

    dtype = getattr(torch, parameters["dtype"])
    config = Qwen3Config(
        **SIZES[parameters["width"]], num_hidden_layers=parameters["layers"], vocab_size=VOCABULARY, use_cache=False
    )
    torch.manual_seed(0)
    quantized = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )
    with tempfile.TemporaryDirectory() as folder:  # transformers quantizes what it loads
        Qwen3ForCausalLM(config).save_pretrained(folder)
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, quantization_config=quantized, dtype=dtype, device_map={"": device}
        )
    checkpoints = {"use_reentrant": False}
    model = prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs=checkpoints)
    # Without `init_lora_weights=False` one of an adapter's two gradients is zero.
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules="all-linear", init_lora_weights=False)).train()
    compiled = compiler(model)
    batches = packed_batches(parameters["tokens"], device, with_lengths=False)
    return training_program(model, lambda batch: compiled(**batch, use_cache=False).loss, batches)


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    if device == "cuda":
        return [{"tokens": 4096, "layers": 8, "width": "full", "dtype": "bfloat16"}]
    rest = {"layers": 2, "width": "reduced", "dtype": "float32"}
    return [{"tokens": tokens, **rest} for tokens in ([512] if quick else [1024, 4096])]


def missing(parameters: Parameters, device: str) -> str:
    absent = [name for name in ("bitsandbytes", "peft") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(absent)} not installed: see the extra `qlora`" if absent else ""


CASE = Case(
    name="qlora",
    title="QLoRA: a checkpointed decoder in 4 bits with adapters, on packed text",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager, unavailable=missing),
        contender(STOCK, build, inductor, unavailable=missing),
        contender(STOCK_FLAGS, build, inductor_with_flags, unavailable=missing),
        contender(OURS, build, fastpack, ours=True, unavailable=missing),
    ],
    baseline=EAGER,
    x="tokens",
    expected=(
        "Weights in 4 bits are turned into numbers in forward, in its recomputation and in backward, by operators of "
        "bitsandbytes, which cost all contenders the same. What is left to gain is attention to other texts, and the "
        "breaks of the graph at `requires_grad_`, which PEFT calls on what the embedding gives."
    ),
    cpu_time=True,
    notes=(
        "The model is transformers' own Qwen3, with `position_ids` that start again at each text. `live_rows` computes "
        "all rows: the products in 4 bits are an autograd function, of which the pass does not know that it works row "
        "by row."
    ),
)
