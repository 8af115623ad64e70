"""Exported adapters, loaded by PEFT onto the models of transformers on torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from lm_trainer.core.batch import Batch
from lm_trainer.core.tree import named_leaves
from lm_trainer.data.tokenizer.bytes import ByteTokenizer
from lm_trainer.export.adapter import AdapterModel, write_adapter
from lm_trainer.export.huggingface import ExportOptions
from lm_trainer.export.peft_files import AdaptedWeights
from lm_trainer.export.weights import Weights
from lm_trainer.models import DecoderConfig, hf
from lm_trainer.nn.lora import is_adapter_param, merge_lora
from lm_trainer.nn.lora_config import LoraConfig
from lm_trainer.optim import AdamConfig
from lm_trainer.run.build.model import loss_function, trace_model
from lm_trainer.run.build.setup import TrainingSetup, plan_training
from lm_trainer.run.config.run_config import RunConfig
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.state.train_state import TrainState, to_host
from tests.conftest import TINY_GPT2, MakeHfModel

pytestmark = pytest.mark.slow

SHARED: dict[str, Any] = {
    "vocab_size": 67,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "GPT2": TINY_GPT2,
    "GPTNeoX": SHARED,
    "Phi3": {**SHARED, "num_key_value_heads": 2},
    "Llama": {**SHARED, "num_key_value_heads": 2},
}
MIXTRAL: dict[str, Any] = {**SHARED, "num_key_value_heads": 2, "num_local_experts": 3}
OTHER_WEIGHTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "embedding and head": ("Llama", CHECKPOINTS["Llama"], ("embed_tokens", "lm_head", "q_proj")),
    "embedding of a tied head": ("Llama", {**CHECKPOINTS["Llama"], "tie_word_embeddings": True}, ("embed_tokens",)),
    "embedding of another name": ("GPT2", TINY_GPT2, ("wte", "c_fc")),
    "experts": ("Mixtral", MIXTRAL, ("gate_up_proj", "experts.down_proj", "v_proj")),
    "some experts": ("Mixtral", MIXTRAL, ("mlp.up",)),
}
RATE, STEPS = 1e-2, 2


@dataclasses.dataclass(frozen=True)
class Adapted:
    """A model of transformers with a random adapter, ready to be trained."""

    config: DecoderConfig
    vocab_size: int
    adapter: LoraConfig
    setup: TrainingSetup
    state: TrainState

    @classmethod
    def make(cls, checkpoint: Path, adapter: LoraConfig) -> Adapted:
        model, vocab_size = hf.config_from_hf(json.loads((checkpoint / "config.json").read_text()))
        model = model.model_copy(update={"gradient_checkpointing": False, "scan_layers": True})
        base = named_leaves(hf.params_from_hf(model, vocab_size, Weights(checkpoint)))
        config = RunConfig(
            model=model,  # pyright: ignore[reportArgumentType]
            adapter=adapter,
            trainer=TrainerConfig(initialize_from="elsewhere", train_batch_size=8, num_train_steps=STEPS),
            optimizer=AdamConfig(weight_decay=0.0, max_grad_norm=None),
        )
        definition, rng = trace_model(config, vocab_size), np.random.default_rng(5)

        def values(shapes: Any, shardings: Any) -> Any:
            drawn = {
                n: 0.2 * rng.standard_normal(x.shape, np.float32) for n, x in shapes.items() if is_adapter_param(n)
            }
            return {name: jax.device_put(x, shardings[name]) for name, x in {**base, **drawn}.items()}

        setup = plan_training(
            config.trainer,
            config.optimizer,
            dataclasses.replace(definition, load=values),
            loss_function(config),
            devices=jax.devices()[:1],
        )
        return cls(model, vocab_size, adapter, setup, setup.init())

    def logits(self, tokens_BS: np.ndarray) -> np.ndarray:
        positions = np.tile(np.arange(tokens_BS.shape[1], dtype=np.int32), (len(tokens_BS), 1))
        model = self.setup.model

        @jax.jit
        def run(params: Any) -> Any:
            return model.merge(params)(tokens_BS.astype(np.int32), positions, np.zeros_like(positions))

        return np.asarray(run({**self.state.params, **self.state.frozen}))

    def export(self, out: Path, state: TrainState) -> Path:
        described = AdapterModel(
            self.config, self.vocab_size, self.adapter, to_host(state.params), "base", ByteTokenizer(), "tuned"
        )
        write_adapter(out, described, ExportOptions())
        return out


def load_peft(checkpoint: Path, adapter: Path, *, train: bool = False) -> Any:
    peft = pytest.importorskip("peft", reason="compares with PEFT, which is not installed")
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="eager")
    return peft.PeftModel.from_pretrained(base, adapter, is_trainable=train)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("family", CHECKPOINTS)
def test_peft_computes_the_same_logits(family: str, make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    import torch

    checkpoint = make_hf_model(family, **CHECKPOINTS[family])
    reference = np.load(checkpoint / "reference.npz")
    adapted = Adapted.make(checkpoint, LoraConfig(rank=3, alpha=4.0, use_rslora=family == "Phi3"))
    actual = adapted.logits(reference["input_ids"])
    model = load_peft(checkpoint, adapted.export(tmp_path / "adapter", adapted.state)).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(reference["input_ids"])).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=1e-4)
    assert np.abs(actual - reference["logits"]).max() > 0.1, "the adapter is heard"


# PEFT warns that it ignores the ranks of parameters, but uses them.
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")
@pytest.mark.parametrize("case", OTHER_WEIGHTS)
def test_peft_computes_the_same_logits_with_other_weights(
    case: str, make_hf_model: MakeHfModel, tmp_path: Path
) -> None:
    import torch

    family, settings, targets = OTHER_WEIGHTS[case]
    checkpoint = make_hf_model(family, **settings)
    tokens = np.load(checkpoint / "reference.npz")["input_ids"]
    adapted = Adapted.make(checkpoint, LoraConfig(rank=3, alpha=4.0, target_modules=targets))
    actual = adapted.logits(tokens)
    directory = adapted.export(tmp_path / "adapter", adapted.state)
    model = load_peft(checkpoint, directory).eval()
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(actual, expected, atol=2e-4)
    # Merged here, from the trained adapter and from the exported one.
    merged = merge_lora(to_host({**adapted.state.frozen, **adapted.state.params}), adapted.adapter)
    read = named_leaves(hf.params_from_hf(adapted.config, adapted.vocab_size, AdaptedWeights(directory, checkpoint)))
    assert read.keys() == merged.keys()
    for name, x in merged.items():
        np.testing.assert_allclose(read[name], x, atol=1e-5, err_msg=name)
    changed = {name for name, x in to_host(adapted.state.frozen).items() if not np.array_equal(x, merged[name])}
    assert len(changed) == len({name.rpartition(".")[0] for name in adapted.state.params})


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_steps_of_adam_are_those_of_peft_on_torch(make_hf_model: MakeHfModel, tmp_path: Path) -> None:
    import torch

    checkpoint = make_hf_model("Llama", **CHECKPOINTS["Llama"])
    adapted = Adapted.make(checkpoint, LoraConfig(rank=3, alpha=4.0, target_modules=("q_proj", "o_proj", "up_proj")))
    model = load_peft(checkpoint, adapted.export(tmp_path / "before", adapted.state), train=True)
    config, tokens = adapted.setup.optimizer, np.random.default_rng(7).integers(0, 67, (STEPS, 8, 17))
    assert isinstance(config, AdamConfig)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    adam = torch.optim.Adam(trained, RATE, (config.beta1, config.beta2), config.epsilon)
    state, step = adapted.state, adapted.setup.step
    positions = np.tile(np.arange(16, dtype=np.int32), (8, 1))
    for rows in tokens:
        adam.zero_grad()
        loss = model(torch.from_numpy(rows), labels=torch.from_numpy(rows)).loss
        loss.backward()
        adam.step()
        left, right = rows[:, :-1].astype(np.int32), rows[:, 1:].astype(np.int32)
        batch = Batch(left, right, np.ones((8, 16), np.float32), positions, np.zeros_like(positions))
        if not state.step:
            step.compile(batch)
        state, metrics = step(state, step.put(batch), RATE)
        assert float(metrics["loss"]) == pytest.approx(loss.item(), abs=1e-5)
    actual, initial = _tensors(adapted.export(tmp_path / "after", state)), _tensors(tmp_path / "before")
    expected = {
        name.replace(".default", ""): parameter.detach().numpy()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    assert actual.keys() == expected.keys()
    for name, x in actual.items():
        np.testing.assert_allclose(x, expected[name], atol=1e-5, err_msg=name)
        assert np.abs(x - initial[name]).max() > RATE


def _tensors(directory: Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    return load_file(directory / "adapter_model.safetensors")
