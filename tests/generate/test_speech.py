"""Transcription against `generate` of transformers: the same tokens, by the same rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from lm_trainer.core.errors import UserError
from lm_trainer.generate.speech import transcribe_features
from lm_trainer.generate.speech_rules import SpeechRules
from lm_trainer.models import WhisperConfig
from tests.models.speech import VOCAB, features
from tests.models.test_whisper import make, read_model

LANGUAGES = {"<|en|>": 40, "<|de|>": 41, "<|fr|>": 42}
TASKS = {"transcribe": 44, "translate": 45}
RULES: dict[str, Any] = {
    "decoder_start_token_id": 3,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "is_multilingual": True,
    "no_timestamps_token_id": 46,
    "max_initial_timestamp_index": 5,
    "suppress_tokens": [9, 17, 30, 40, 41, 42, 44, 45],
    "begin_suppress_tokens": [7, 2],
    "return_timestamps": False,
    "max_length": 16,
}
ROWS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("speech")
    reference = make(directory, init_std=0.4)
    config, params = read_model(directory)
    graph = nnx.split(nnx.eval_shape(lambda: config.build(VOCAB, rngs=nnx.Rngs(0))), nnx.Param)[0]
    return reference, nnx.merge(graph, params)


def trimmed(tokens: list[int], end: int) -> list[int]:
    """Up to the first end of text."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def theirs_of(
    model: Any, prompt: list[list[int]], count: int, *, timestamps: bool, raw: Any = RULES, **search: Any
) -> list[list[int]]:
    """The new tokens that transformers writes after each prompt, by the generation that all of its models share."""
    import torch
    from transformers import GenerationConfig, GenerationMixin, LogitsProcessorList

    begin = len(prompt[0])
    config = GenerationConfig(**{**raw, "return_timestamps": timestamps, "no_speech_threshold": None})
    processors = model._retrieve_logit_processors(config, None, begin, 1, "cpu")
    mels = torch.from_numpy(features(ROWS).transpose(0, 2, 1).copy())
    mixin: Any = GenerationMixin
    output = mixin.generate(
        model,
        mels,
        decoder_input_ids=torch.tensor(prompt),
        logits_processor=LogitsProcessorList(processors),
        generation_config=GenerationConfig(eos_token_id=raw["eos_token_id"], pad_token_id=0, decoder_start_token_id=3),
        max_new_tokens=count,
        do_sample=False,
        **search,
    )
    return [trimmed(row[begin:], raw["eos_token_id"]) for row in output.tolist()]


@pytest.mark.parametrize("timestamps", [False, True], ids=["words", "timestamps"])
def test_tokens_are_those_of_transformers(models: tuple[Any, Any], timestamps: bool) -> None:
    reference, model = models
    rules = SpeechRules.from_config(RULES, start_id=None, eos_id=None)
    actual = transcribe_features(model, features(ROWS), rules, language="de", task="translate", timestamps=timestamps)
    prompt = [3, 41, 45, *([] if timestamps else [46])]
    assert rules.prompt_tokens("de", "translate", timestamps=timestamps) == prompt
    expected = theirs_of(reference, [prompt] * ROWS, 16 - len(prompt), timestamps=timestamps)
    assert actual == expected
    assert len({tuple(row) for row in actual}) > 1, "rows are heard apart"
    assert any(token > 46 for row in actual for token in row) or not timestamps


@pytest.mark.parametrize(
    ("timestamps", "beams", "end", "penalty"),
    [
        # Tokens that end some texts of this model, and not all.
        pytest.param(False, 4, 22, None, id="words"),
        pytest.param(True, 3, 22, None, id="timestamps"),
        pytest.param(False, 4, 10, -2.0, id="short texts"),
        pytest.param(False, 4, 22, 3.0, id="long texts", marks=pytest.mark.slow),
        pytest.param(False, 7, 18, 0.0, id="no penalty", marks=pytest.mark.slow),
    ],
)
def test_beams_are_those_of_transformers(
    models: tuple[Any, Any], timestamps: bool, beams: int, end: int, penalty: float | None
) -> None:
    reference, model = models
    raw = {**RULES, "eos_token_id": end, "length_penalty": penalty}
    rules = SpeechRules.from_config(raw, start_id=None, eos_id=None)
    request: dict[str, Any] = {"language": "de", "task": "translate", "timestamps": timestamps}
    actual = transcribe_features(model, features(ROWS), rules, beams=beams, **request)
    prompt = [3, 41, 45, *([] if timestamps else [46])]
    search = {"num_beams": beams} | ({} if penalty is None else {"length_penalty": penalty})
    expected = theirs_of(reference, [prompt] * ROWS, 16 - len(prompt), timestamps=timestamps, raw=raw, **search)
    assert actual == expected
    assert actual != transcribe_features(model, features(ROWS), rules, **request), (
        "the likeliest tokens are not all there is"
    )
    assert min(map(len, actual)) < 16 - len(prompt) or timestamps, "texts end before there is no more room"


def test_the_whole_of_generate_agrees_and_hears_the_language(models: tuple[Any, Any]) -> None:
    """The language, the tokens that begin the text, and what is suppressed, as `generate` of the model does it all."""
    import torch
    from transformers import GenerationConfig

    reference, model = models
    # Timestamps, which would cut the text into segments.
    raw = {**RULES, "suppress_tokens": [*RULES["suppress_tokens"], *range(47, VOCAB)]}
    reference.generation_config = GenerationConfig(**raw)
    mels = torch.from_numpy(features(ROWS).transpose(0, 2, 1).copy())
    expected = reference.generate(mels, task="transcribe", max_new_tokens=9, do_sample=False)
    languages = reference.detect_language(mels, generation_config=reference.generation_config).tolist()
    rules = SpeechRules.from_config(raw, start_id=None, eos_id=None)
    actual = transcribe_features(model, features(ROWS), rules, task="transcribe", max_new_tokens=9)
    assert len(set(languages)) > 1, "the test needs rows of several languages"
    for row, theirs_row, language in zip(actual, expected.tolist(), languages, strict=True):
        text = [token for token in row if token != 2]
        assert theirs_row[: len(text)] == text
        assert not set(theirs_row[len(text) :]) - {0, 2}, "no text of theirs is left"
        alone = theirs_of(reference, [[3, language, 44, 46]] * ROWS, 9, timestamps=False, raw=raw)
        assert row in alone


@pytest.mark.parametrize(
    ("raw", "named", "timestamps", "prompt"),
    [
        ({}, (None, None), False, [3]),
        ({"forced_decoder_ids": [[1, None], [2, 44], [3, 46]], "no_timestamps_token_id": 46}, (None, None), False,
         [3, None, 44, 46]),
        ({"forced_decoder_ids": [[1, 41], [2, 44], [3, 46]], "no_timestamps_token_id": 46}, (None, None), True,
         [3, 41, 44]),
        (RULES, (None, None), False, [3, None, 46]),
        (RULES, ("en", None), True, [3, 40, 44]),
        (RULES, ("<|fr|>", "translate"), False, [3, 42, 45, 46]),
        ({**RULES, "language": "de", "task": "translate"}, (None, None), False, [3, 41, 45, 46]),
    ],
)  # fmt: skip
def test_tokens_that_begin_a_text(
    raw: dict[str, Any], named: tuple[str | None, str | None], timestamps: bool, prompt: list[int | None]
) -> None:
    rules = SpeechRules.from_config(raw, start_id=3, eos_id=2)
    assert rules.prompt_tokens(*named, timestamps=timestamps) == prompt


def test_what_the_model_lacks_is_refused(models: tuple[Any, Any]) -> None:
    rules = SpeechRules.from_config(RULES, start_id=None, eos_id=None)
    with pytest.raises(UserError, match="'xx' is unknown to the model; it knows: de, en, fr"):
        rules.prompt_tokens("xx", None, timestamps=False)
    with pytest.raises(UserError, match="'sing' is unknown to the model; it knows: transcribe, translate"):
        rules.prompt_tokens(None, "sing", timestamps=False)
    with pytest.raises(UserError, match="the model has no timestamps"):
        SpeechRules(start_id=3, eos_id=2).prompt_tokens(None, None, timestamps=True)
    with pytest.raises(UserError, match="decoder_start_token_id is None"):
        SpeechRules.from_config({}, start_id=None, eos_id=2)
    never = SpeechRules.from_config({"early_stopping": "never"}, start_id=3, eos_id=2)
    with pytest.raises(UserError, match="early_stopping is 'never', by which no beam search ends here; write false"):
        transcribe_features(models[1], features(1), never, beams=2)
    with pytest.raises(UserError, match="names the token 99, but the model knows 0 to 60"):
        transcribe_features(models[1], features(1), SpeechRules(start_id=99, eos_id=2))
    assert transcribe_features(models[1], np.zeros((0, 12, 5), np.float32), rules) == []


def test_rules_survive_a_configuration() -> None:
    config = WhisperConfig(generation_config=RULES, decoder_start_token_id=3)
    reloaded = WhisperConfig.model_validate_json(config.model_dump_json())
    assert SpeechRules.from_config(reloaded.generation_config, start_id=None, eos_id=None) == SpeechRules.from_config(
        RULES, start_id=None, eos_id=None
    )
