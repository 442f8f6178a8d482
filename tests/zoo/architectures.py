"""Which architectures there are: the entries of transformers' mappings from types of model to classes."""

from __future__ import annotations

from dataclasses import dataclass

# A task, and the mapping that lists its classes.
MAPPINGS = {
    "causal": "CAUSAL_LM",
    "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM",
    "masked": "MASKED_LM",
    "classification": "SEQUENCE_CLASSIFICATION",
    "speech": "SPEECH_SEQ_2_SEQ",
    "ctc": "CTC",
    "vision-language": "IMAGE_TEXT_TO_TEXT",
}
# Tasks whose batches have more than text.
WITH_MEDIA = ("speech", "ctc", "vision-language")


@dataclass(frozen=True, order=True)
class Architecture:
    """A class of a type of model, for a task."""

    task: str
    model_type: str
    class_name: str

    @property
    def key(self) -> str:
        return f"{self.task}/{self.model_type}"


def architectures() -> list[Architecture]:
    """All of them, by task and type; a class that several tasks on text list stands under the first of these."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Architecture] = {}
    listed = {task: getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES") for task, mapping in MAPPINGS.items()}
    for task, classes in listed.items():
        for model_type, class_name in classes.items():
            if task == "seq2seq" and model_type in listed["speech"]:
                continue
            name = class_name if isinstance(class_name, str) else class_name[0]
            inputs = task if task in WITH_MEDIA else "text"
            found.setdefault(f"{inputs}/{model_type}/{name}", Architecture(task, model_type, name))
    return list(found.values())
