"""LoRA on the weights of experts (PEFT's `target_parameters`): a mixture of transformers, forward and backward."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from bench.case import Case, Parameters, Program
from bench.cases.compilers import EAGER, STOCK, Compiler, contender, eager, inductor, ours

GROUPED = "eager, grouped_mm"
MERGED, FACTORED, REGISTERED = "fastpack", "fastpack, factored", 'fastpack, factored, experts "fastpack"'
RANK, BATCHES, VOCABULARY = 8, 3, 2048


def build(compiler: Compiler, parameters: Parameters, device: str, implementation: str = "eager") -> Program:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from bench.cases.training import training_program

    torch.manual_seed(0)
    hidden = parameters["hidden"]
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden, moe_intermediate_size=hidden,
        num_hidden_layers=parameters["layers"], num_attention_heads=8, num_key_value_heads=4, head_dim=hidden // 8,
        num_experts=parameters["experts"], num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation(implementation)
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapters = LoraConfig(r=RANK, target_modules=["q_proj", "v_proj"], target_parameters=weights)
    model = get_peft_model(model, adapters).to(device, getattr(torch, parameters["dtype"])).train()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    forward = compiler(model)

    def loss_of(batch: Any) -> Any:
        return forward(**batch).loss

    return training_program(model, loss_of, batches(parameters, device))


def batches(parameters: Parameters, device: str) -> list[dict[str, Any]]:
    import torch

    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(BATCHES):
        ids = torch.randint(0, VOCABULARY, (1, parameters["tokens"]), generator=generator).to(device)
        found.append({"input_ids": ids, "labels": ids, "use_cache": False})
    return found


def without_peft(parameters: Parameters, device: str) -> str:
    missing = [name for name in ("peft", "transformers") if importlib.util.find_spec(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else ""


def groups(device: str, quick: bool) -> list[dict[str, Any]]:
    dtype = "bfloat16" if device == "cuda" else "float32"
    sizes = {"layers": 4, "hidden": 512, "dtype": dtype}
    if quick:
        return [{"experts": 8, "tokens": 128, "layers": 2, "hidden": 64, "dtype": dtype}]
    return [{"experts": experts, "tokens": tokens, **sizes} for experts, tokens in ((8, 1024), (32, 1024))]


CASE = Case(
    name="lora_experts",
    title="LoRA on the weights of experts",
    groups=groups,
    contenders=[
        contender(EAGER, build, eager, unavailable=without_peft),
        contender(GROUPED, functools.partial(build, implementation="grouped_mm"), eager),
        contender(STOCK, build, inductor),
        ours(MERGED, build),
        ours(FACTORED, build, adapters="factored"),
        ours(REGISTERED, functools.partial(build, implementation="fastpack"), adapters="factored"),
    ],
    baseline=EAGER,
    x="experts",
    expected=(
        "PEFT makes the adapted weights of all experts, and backward the gradient of each. Factored, neither is made, "
        "which saves one of three products, and memory for the weights twice."
    ),
    cpu_time=True,
    notes="A Qwen3-MoE of transformers, which loops over its experts unless the contender names another way.",
)
