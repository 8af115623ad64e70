"""The first steps of small runs, as numbers to compare with; `python -m tests.run.first_steps` writes them anew."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("golden") / "first_steps.json"
STEPS = 4
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"type": "gpt2", "seq_len": 32, "hidden_dim": 32, "num_layers": 2, "num_heads": 2, "resid_pdrop": 0.1},
    "mixtral": {
        "type": "mixtral",
        "seq_len": 32,
        "hidden_dim": 32,
        "intermediate_dim": 48,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "lbl_over": "microbatch",
    },
}


def first_steps(model: dict[str, Any], directory: Path) -> dict[str, list[float]]:
    """Trains `STEPS` steps through `Trainer`; returns the metrics of each step, and the norm of all parameters."""
    import jax.numpy as jnp
    import numpy as np
    from flax import nnx
    from pydantic import TypeAdapter

    from lm_trainer.data import DataConfig, open_data
    from lm_trainer.data.sources.in_memory import InMemory
    from lm_trainer.models import AnyModel
    from lm_trainer.optim import AdamConfig
    from lm_trainer.run.build.model import next_token_loss
    from lm_trainer.run.config.trainer_config import TrainerConfig
    from lm_trainer.run.trainer import Trainer
    from lm_trainer.step.state.train_state import to_host

    config: Any = TypeAdapter(AnyModel).validate_python(model)
    # Text of the test's own: that of the standard library differs between versions of Python.
    texts = InMemory(train=[f"{i} times {j} is {i * j}." for i in range(40) for j in range(40)])
    settings = TrainerConfig.model_validate(
        {
            "id": model["type"],
            "max_devices": 1,
            "num_train_steps": STEPS,
            "train_batch_size": 16,
            "tracker": (),
            "log_dir": str(directory / "logs"),
            "checkpointer": {"base_path": str(directory / "checkpoints"), "save_interval": "1h"},
        }
    )
    data = open_data(
        DataConfig(source=texts, tokenizer="bytes", cache_dir=str(directory / "cache")), seq_len=32, seed=0
    )
    metrics: dict[str, list[float]] = {"loss": [], "grad_norm": [], "param_norm": []}
    with Trainer(settings, AdamConfig(learning_rate=3e-3, warmup=0), next_token_loss(jnp.float32)) as trainer:
        vocab_size = data.tokenizer.vocab_size
        state = trainer.initial_state(model_init=lambda: config.build(vocab_size, rngs=nnx.Rngs(0)))
        for info in trainer.training_steps(state, trainer.data_loader(data)):
            metrics["loss"].append(float(info.metrics["loss"]))
            metrics["grad_norm"].append(float(info.metrics["grad_norm"]))
            # On the host: operations on arrays that are cut over emulated devices are programs with collectives, of
            # which several at once can wait for one another until XLA gives up.
            squares = [np.square(x, dtype=np.float64).sum() for x in to_host(info.state.params).values()]
            metrics["param_norm"].append(float(np.sqrt(sum(squares))))
    data.close()
    return metrics


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        golden = {name: first_steps(model, Path(directory)) for name, model in MODELS.items()}
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
