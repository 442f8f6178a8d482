"""Tiny configurations: sizes by name, one layer of each kind, special tokens apart from the text."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5.23")

from tests.zoo import batches, formats, measuring, media, tiny
from tests.zoo.architectures import Architecture, architectures
from tests.zoo.exceptions import LEFT_OUT, REASONS, SIZES


def test_a_size_is_recognised_by_its_name() -> None:
    config = tiny.configuration(Architecture("causal", "mixtral", "MixtralForCausalLM"))
    assert (config.hidden_size, config.num_hidden_layers, config.num_local_experts) == (64, 2, 4)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 16)


def test_there_is_a_layer_of_each_kind() -> None:
    config = tiny.configuration(Architecture("causal", "gemma3_text", "Gemma3ForCausalLM"))
    assert config.layer_types == ["sliding_attention", "full_attention"]


def test_nothing_is_random() -> None:
    config = tiny.configuration(Architecture("causal", "gpt2", "GPT2LMHeadModel"))
    assert config.resid_pdrop == config.embd_pdrop == config.attn_pdrop == 0.0


def test_special_tokens_are_not_in_the_text() -> None:
    config = tiny.configuration(Architecture("vision-language", "llava", "LlavaForConditionalGeneration"))
    assert tiny.LAST < config.image_token_id < tiny.VOCABULARY


def test_two_batches_differ_in_their_lengths_alone() -> None:
    for task, layout in [("causal", "packed"), ("masked", "padded"), ("seq2seq", "left")]:
        first, second = (batches.of_text(task, layout, number) for number in (0, 1))
        assert {name: value.shape for name, value in first.items()} == {n: v.shape for n, v in second.items()}
        lengths = "position_ids" if layout == "packed" else "attention_mask"
        assert not first[lengths].equal(second[lengths])


def test_the_tables_name_architectures_that_there_are() -> None:
    known = {name for each in architectures() for name in (each.key, each.model_type)}
    assert {*LEFT_OUT, *REASONS, *(name.removeprefix("default of ") for name in SIZES)} <= known


def test_a_loss_that_is_not_finite_is_no_comparison() -> None:
    class Diverges(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": super().forward(x).sum() / 0}

    with pytest.raises(ValueError, match="compare nothing"):
        measuring.measure(Diverges(2, 2), "eager", [{"x": torch.ones(1, 2)}], [])


def test_sound_has_a_frame_for_each_label() -> None:
    model = tiny.model(Architecture("ctc", "wav2vec2", "Wav2Vec2ForCTC"))
    for number in (0, 1):
        assert model(**media.batch("ctc", model, "padded", number)).loss.isfinite()


def test_features_of_a_batch_have_their_places() -> None:
    plain = batches.of_text("vision-language", "left", 0)
    found = formats.after({name: value[: formats.ROWS] for name, value in plain.items()}, token=64, total=7)
    assert (found["input_ids"] == 64).sum(1).tolist() == [4, 3]
    assert {value.shape for value in found.values()} == {(2, 20)}
