"""Direct preference optimisation with TRL: LoRA and checkpoints, on a small random model. `fxpasses` is one argument.

python examples/dpo.py [--eager] [--lowering aot_eager] [--steps 6]
"""

import tempfile

import torch
from datasets import Dataset
from finetune_trl import TEXT, arguments, model_of, report, tokenizer_of
from peft import LoraConfig, get_peft_model
from trl import DPOConfig, DPOTrainer

import fxpasses.inspect


def preferences(text):
    """Each line's beginning, and its end as preferred to the end of the line before."""
    halves = [(words[: len(words) // 2], words[len(words) // 2 :]) for words in (line.split() for line in text)]
    return Dataset.from_list(
        [
            {"prompt": " ".join(start) + " ", "chosen": " ".join(end), "rejected": " ".join(other)}
            for (start, end), (_, other) in zip(halves[1:], halves, strict=False)
        ]
    )


def main():
    asked = arguments()
    torch.manual_seed(0)
    fxpasses.set_default_options({"fastpack.lowering": asked.lowering})  # Trainer passes no options on
    tokenizer = tokenizer_of(TEXT)
    model = get_peft_model(model_of(len(tokenizer)), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with tempfile.TemporaryDirectory() as folder, fxpasses.inspect.record() as record:
        settings = DPOConfig(
            folder, max_steps=asked.steps, learning_rate=1e-2,
            per_device_train_batch_size=2, max_length=48, activation_checkpointing=True,
            pad_to_multiple_of=48, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True, bf16=False,
            disable_tqdm=True, torch_compile_backend=None if asked.eager else "fastpack",
        )  # fmt: skip
        trainer = DPOTrainer(model, args=settings, train_dataset=preferences(TEXT), processing_class=tokenizer)
        trainer.train()
    report(trainer, record)


if __name__ == "__main__":
    main()
