"""Fine-tune with TRL: packed text, LoRA and checkpoints, on a small random model. `fxpasses` is one argument.

python examples/finetune_trl.py [--eager] [--lowering aot_eager] [--steps 6]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tabulate import tabulate
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import fxpasses.inspect

TEXT = [line for line in (Path(__file__).parents[1] / "README.md").read_text().splitlines() if len(line.split()) > 3]


def tokenizer_of(text):
    """A tokenizer whose vocabulary is the words of the text."""
    special, words = ["<pad>", "<eos>"], sorted({word for line in text for word in line.split()})
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def model_of(vocabulary):
    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="eager",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--eager", action="store_true", help="train without fxpasses")
    parser.add_argument("--lowering", default="inductor", choices=["inductor", "aot_eager"])
    parser.add_argument("--steps", type=int, default=6)
    return parser.parse_args()


def report(trainer, record):
    """Print the loss of each step, and what was compiled."""
    rows = [(entry["step"], f"{entry['loss']:.6f}") for entry in trainer.state.log_history if "loss" in entry]
    graphs = sum(graph.outcome == "rewritten" for graph in record.graphs)
    print(tabulate([*rows, ("graphs", graphs)], headers=["step", "loss"], disable_numparse=True), record, sep="\n\n")


def main():
    asked = arguments()
    torch.manual_seed(0)
    fxpasses.set_default_options({"fastpack.lowering": asked.lowering})  # Trainer passes no options on
    tokenizer = tokenizer_of(TEXT)
    model = get_peft_model(model_of(len(tokenizer)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with tempfile.TemporaryDirectory() as folder, fxpasses.inspect.record() as record:
        settings = SFTConfig(
            folder, max_steps=asked.steps, learning_rate=1e-2,
            per_device_train_batch_size=2, max_length=64, packing=True,
            activation_checkpointing=True, logging_steps=1, save_strategy="no", report_to=[],
            use_cpu=True, bf16=False, disable_tqdm=True, torch_compile_backend=None if asked.eager else "fastpack",
        )  # fmt: skip
        trainer = SFTTrainer(
            model, settings, train_dataset=Dataset.from_dict({"text": TEXT}), processing_class=tokenizer
        )
        trainer.train()
    report(trainer, record)


if __name__ == "__main__":
    main()
