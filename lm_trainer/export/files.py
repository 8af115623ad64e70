"""Files of a published model, and what becomes of each of them between import and export."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lm_trainer.data.tokenizer.files import CARRIED_FILES, CONFIG_FILE, TOKENIZER_FILE

Treatment = Literal["written", "merged", "carried"]
"""`written`: made from the model. `merged`: every field of the source stays, but for what the user has changed.
`carried`: the bytes of the source."""

CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"

PROCESSOR_FILES = ("processor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json")
"""Settings of what prepares sounds and pictures for a model, beside preprocessor_config.json."""

FILES: Mapping[str, Treatment] = {
    "README.md": "written",
    "model.safetensors": "written",
    "model-*-of-*.safetensors": "written",
    "model.safetensors.index.json": "written",
    "adapter_config.json": "written",
    "adapter_model.safetensors": "written",
    CONFIG: "merged",
    GENERATION: "merged",
    PREPROCESSOR: "merged",
    CONFIG_FILE: "merged",
    **dict.fromkeys((TOKENIZER_FILE, *CARRIED_FILES, *PROCESSOR_FILES), "carried"),
}
"""Patterns of the paths that the directory of a model may hold; nothing else is read, exported or pushed."""

DOWNLOADED = (*(name for name in FILES if name != "README.md"), "*.safetensors", "*.safetensors.index.json")
"""Patterns of what is fetched of a model on the hub. Its weights may have any name, which an index tells."""
