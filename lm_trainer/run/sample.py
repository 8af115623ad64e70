"""Draws a sample from the model at the end of a run."""

from __future__ import annotations

from typing import Any

import numpy as np

from lm_trainer.core.batch import Batch
from lm_trainer.data.dataset import Data
from lm_trainer.generate.engine import generate
from lm_trainer.generate.sampling import GenerateSettings
from lm_trainer.generate.speech import transcribe_features
from lm_trainer.generate.speech_rules import SpeechRules
from lm_trainer.generate.text import encode_prompt
from lm_trainer.run.build.setup import TrainingSetup
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.weights.local_params import gather_full_params
from lm_trainer.step.state.train_state import TrainState


def draw_sample(config: RunConfig, setup: TrainingSetup, data: Data, state: TrainState) -> str:
    """Returns a prompt and its continuation by the model.

    Without `sample_prompt`, the prompt is the start of a held-out document, or of the training text if there is no
    held-out text.
    """
    sets = list(data.validation().values())
    rows = next(iter(sets[0].batches(1, rows=range(1)))) if sets else next(data.train(1, rows=range(1), num_steps=1))
    if rows.features is not None:
        return _sample_transcription(setup, data, state, rows)
    if (text := config.trainer.sample_prompt) is not None:
        # Truncates a prompt that fills the context, so that a finished run does not fail because of its sample.
        prompt = encode_prompt(data.tokenizer, text)[-(config.model.seq_len // 2) :]
    else:
        prompt = [int(token) for token in rows.tokens[0, : min(32, config.model.seq_len // 4)]]
    weights = list(setup.weights_to_evaluate(state).values())[-1]
    params = gather_full_params(setup, weights)
    tokens = generate(
        setup.model.merge(params),
        [prompt],
        GenerateSettings(
            max_new_tokens=config.trainer.sample_tokens,
            temperature=0.6,
            top_p=0.9,
            eos_id=data.tokenizer.eos_id,
            seed=config.trainer.seed,
        ),
    )[0]
    return data.tokenizer.decode(prompt) + "⟫" + data.tokenizer.decode(tokens)


def _sample_transcription(setup: TrainingSetup, data: Data, state: TrainState, row: Batch) -> str:
    """Returns the reference transcript of a recording, and the model's transcription."""
    weights = list(setup.weights_to_evaluate(state).values())[-1]
    model: Any = setup.model.merge(gather_full_params(setup, weights))
    # The prompt consists of the tokens before the first target with a loss weight.
    count = int(np.argmax(row.weights[0] > 0)) + 1
    ids, eos_id = row.tokens[0][row.segments[0] >= 0].tolist(), data.tokenizer.eos_id
    rules = SpeechRules(start_id=ids[0], eos_id=eos_id)
    transcription = transcribe_features(model, np.asarray(row.features), rules, prompt=ids[:count])[0]
    return data.tokenizer.decode(ids[count:]) + "⟫" + data.tokenizer.decode(transcription)
