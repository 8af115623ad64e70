"""A model is found wherever it lies, and its card says how it was trained."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.checkpoint.policy import CheckpointerConfig
from lm_trainer.checkpoint.store import CheckpointStore
from lm_trainer.core.errors import UserError
from lm_trainer.core.tree import named_leaves
from lm_trainer.export.huggingface import ExportOptions, write_hf
from lm_trainer.generate.engine import generate
from lm_trainer.generate.sampling import GenerateSettings
from lm_trainer.run.weights.hf_transfer import import_model
from lm_trainer.run.weights.open_model import open_model
from tests.export.test_huggingface import make_model


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same model as a Hugging Face directory and as a checkpoint directory with step 0."""
    home = tmp_path_factory.mktemp("places")
    write_hf(home / "hf", make_model(), ExportOptions())
    import_model(str(home / "hf"), home / "run")
    return home / "hf", home / "run"


def test_both_layouts_hold_the_same_model(places: tuple[Path, Path]) -> None:
    hf, run = (open_model(str(path)) for path in places)
    assert (hf.name, run.name) == ("hf", "run")
    assert hf.config == run.config
    assert hf.vocab_size == run.vocab_size == 257
    assert hf.tokenizer.fingerprint() == run.tokenizer.fingerprint()
    assert run.facts == hf.facts
    jax.tree.map(np.testing.assert_array_equal, hf.params, run.params)


def bytes_on(device: Any, params: Any) -> int:
    shards = [shard for x in jax.tree.leaves(params) for shard in x.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.slow
def test_a_model_of_a_run_lies_cut_on_all_devices_and_writes_the_same_files_and_text(
    places: tuple[Path, Path], tmp_path: Path
) -> None:
    devices = jax.local_devices()
    assert len(devices) == 8
    alone, sharded = open_model(str(places[1]), devices=devices[:1]), open_model(str(places[1]))
    full_bytes = sum(x.nbytes for x in jax.tree.leaves(alone.params))
    assert [bytes_on(device, alone.params) for device in devices[:2]] == [full_bytes, 0]
    # The vectors of layers are whole on each device.
    assert max(bytes_on(device, sharded.params) for device in devices) < full_bytes / 4
    for name, model in (("alone", alone), ("cut", sharded)):
        write_hf(tmp_path / name, model, ExportOptions(max_shard_size=20_000))
    files = sorted(path.name for path in (tmp_path / "alone").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "cut").iterdir())
    assert len([name for name in files if name.endswith("safetensors")]) > 3
    for name in files:
        assert (tmp_path / "alone" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    settings = GenerateSettings(max_new_tokens=4, temperature=0)
    assert generate(sharded.build(), [[1, 2], [3]], settings) == generate(alone.build(), [[1, 2], [3]], settings)


def test_the_facts_of_a_trained_step(places: tuple[Path, Path], tmp_path: Path) -> None:
    _, run = places
    params = open_model(str(run)).params
    arrays = {"params." + name: jax.numpy.asarray(x) for name, x in named_leaves(dict(params)).items()}
    store = CheckpointStore(run, CheckpointerConfig())
    record = {"vocab_size": 257, "train_loss": math.nan, "eval_losses": {"wiki": 2.5, "code": math.inf}}
    store.save(3, arrays, record)
    store.close()
    trained = open_model(str(run), step=3)
    assert trained.facts.step == 3
    assert trained.facts.tokens == 3 * 512 * 40
    assert trained.facts.train_loss is None
    assert trained.facts.validation_losses == {"wiki": 2.5}
    write_hf(tmp_path / "out", trained, ExportOptions())
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| Training tokens | 61,440 |" in card
    assert "| Validation loss on wiki (nats per token) | 2.5000 |" in card


def test_a_step_of_a_model_without_steps(places: tuple[Path, Path]) -> None:
    with pytest.raises(UserError, match="has no steps"):
        open_model(str(places[0]), step=1)


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing"):
        open_model(str(tmp_path / "missing"))
