"""QLoRA with TRL: a Qwen3 in 4 bits, LoRA, packed text and checkpoints. `fxpasses` is one argument.

python examples/qlora.py [--eager] [--lowering aot_eager] [--steps 6]

It needs bitsandbytes, whose 4-bit products run on CPUs as well: pip install 'fxpasses[qlora]'.
"""

import tempfile

import torch
from datasets import Dataset
from finetune_trl import TEXT, arguments, report, tokenizer_of
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

import fxpasses.inspect

FOUR_BITS = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def model_of(vocabulary):
    """A random model, written and loaded in 4 bits, as a pretrained one is."""
    with tempfile.TemporaryDirectory() as folder:
        Qwen3ForCausalLM(Qwen3Config(vocab_size=vocabulary, **SIZES)).save_pretrained(folder)
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=FOUR_BITS, dtype=torch.float32)


def main():
    asked = arguments()
    torch.manual_seed(0)
    fxpasses.set_default_options({"fastpack.lowering": asked.lowering})  # Trainer passes no options on
    tokenizer = tokenizer_of(TEXT)
    with tempfile.TemporaryDirectory() as folder, fxpasses.inspect.record() as record:
        settings = SFTConfig(
            folder, max_steps=asked.steps, learning_rate=1e-2,
            per_device_train_batch_size=2, max_length=64, packing=True, padding_free=True,
            activation_checkpointing=True, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, bf16=False, disable_tqdm=True, torch_compile_backend=None if asked.eager else "fastpack",
        )  # fmt: skip
        trainer = SFTTrainer(
            model_of(len(tokenizer)), settings, train_dataset=Dataset.from_dict({"text": TEXT}),
            processing_class=tokenizer, peft_config=LoraConfig(r=4, target_modules="all-linear"),
        )  # fmt: skip
        trainer.train()
    report(trainer, record)


if __name__ == "__main__":
    main()
