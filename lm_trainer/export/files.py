"""Files of a published model, and how import and export treat each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lm_trainer.data.tokenizer.files import CONFIG_FILE, COPIED_FILES, TOKENIZER_FILE

Treatment = Literal["written", "merged", "carried"]
"""`written`: generated from the model. `merged`: all fields of the source are kept, except for the user's changes.
`carried`: a byte-for-byte copy of the source."""

CONFIG, GENERATION, PREPROCESSOR = "config.json", "generation_config.json", "preprocessor_config.json"

PROCESSOR_FILES = ("processor_config.json", "video_preprocessor_config.json", "audio_tokenizer_config.json")
"""Settings of audio and image preprocessing, in addition to preprocessor_config.json."""

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
    **dict.fromkeys((TOKENIZER_FILE, *COPIED_FILES, *PROCESSOR_FILES), "carried"),
}
"""Patterns of paths allowed in a model directory; other files are not read, exported or pushed."""

DOWNLOADED = (*(name for name in FILES if name != "README.md"), "*.safetensors", "*.safetensors.index.json")
"""Patterns of files to download from the hub. Weight files may have any name, because the index lists them."""
