"""litgpt: the YAML of `litgpt pretrain` and `litgpt finetune`."""

from __future__ import annotations

from typing import Any

from lm_trainer.config.imports.base import (
    ALPACA,
    AUTOMATIC,
    DEVICES,
    PLACE,
    USED,
    Dialect,
    Lost,
    NoEqualError,
    Values,
    precision,
)

_SIZES = {
    "block_size": "model.seq_len",
    "n_layer": "model.num_layers",
    "n_embd": "model.hidden_dim",
    "n_head": "model.num_heads",
    "n_query_groups": "model.num_kv_heads",
    "intermediate_size": "model.intermediate_dim",
    "head_size": "model.head_dim",
    "norm_eps": "model.layer_norm_epsilon",
}


def _weights(value: Any, values: Values) -> dict[str, Any]:
    del values
    return {"initialize_from_hf": str(value).removeprefix("checkpoints/"), "use_hf_model_config": True}


def _name(value: Any, values: Values) -> dict[str, Any]:
    if any(key.startswith("model_config.") for key in values) or values.get("checkpoint_dir"):
        return {}
    raise NoEqualError(f"the sizes of {value} are not known here; write a model section, or use_hf_model_config")


def _sizes(block: str) -> dict[str, Any]:
    """Rules for the keys of a model's configuration below `block`."""
    return {f"{block}.{key}": ours for key, ours in _SIZES.items()}


def _optimizer(value: Any, values: Values) -> dict[str, Any]:
    del values
    if not str(value).lower().endswith("adamw"):
        raise NoEqualError(f"optimizer {value}; AdamW takes its place")
    return {"optimizer.type": "adam"}


def _betas(value: Any, values: Values) -> dict[str, Any]:
    del values
    return dict(zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True))


def _steps(value: Any, values: Values) -> dict[str, Any]:
    lengths = ("train.max_seq_length", "model_config.block_size", "model.block_size")
    length = next((values[key] for key in lengths if key in values), None)
    rows = values.get("train.global_batch_size")
    if values.get("train.max_steps") or not length or not rows:
        raise NoEqualError("a length in tokens; trainer.num_train_steps is in steps")
    return {"trainer.num_train_steps": max(1, int(value) // (int(length) * int(rows)))}


def _epochs(value: Any, values: Values) -> dict[str, Any]:
    del values
    raise NoEqualError(f"{value} passes; the length is trainer.num_train_steps, and data begin anew by themselves")


def _min_lr(value: Any, values: Values) -> dict[str, Any]:
    if not (rate := values.get("optimizer.init_args.lr") or values.get("train.learning_rate")):
        raise NoEqualError("a part of the learning rate, which the file does not give")
    return {"optimizer.min_lr_ratio": float(value) / float(rate)}


def _data(value: Any, values: Values) -> dict[str, Any]:
    kind, path = str(value).rpartition(".")[2], values.get("data.init_args.json_path")
    path = path or values.get("data.init_args.train_data_path")
    if path is None:
        raise NoEqualError(
            f"the data module {kind}; name files as data.train_urls, or a data set of the hub as data.id"
        )
    found: dict[str, Any] = {"data.train_urls": [str(path)]}
    if kind == "JSON":
        found["data.format"] = ALPACA
    return found


_ARCHITECTURE = Lost("model is that of Llama; what else its family may be is its type")

LITGPT = Dialect(
    "litgpt",
    frozenset(
        {"train.micro_batch_size", "train.global_batch_size", "train.lr_warmup_steps", "model_config.n_embd", "lora_r"}
    ),
    {
        "model_name": _name,
        **_sizes("model_config"),
        **_sizes("model"),
        "model_config": _ARCHITECTURE,
        "model": _ARCHITECTURE,
        "model.name": USED,
        "checkpoint_dir": _weights,
        "initial_checkpoint_dir": _weights,
        "tokenizer_dir": "data.tokenizer",
        "precision": lambda value, _: precision(value),
        "seed": "trainer.seed",
        "train.global_batch_size": "trainer.train_batch_size",
        "train.micro_batch_size": "trainer.per_device_parallelism",
        "train.max_steps": "trainer.num_train_steps",
        "train.max_tokens": _steps,
        "train.epochs": _epochs,
        "train.max_seq_length": "model.seq_len",
        "train.lr_warmup_steps": "optimizer.warmup",
        "train.lr_warmup_fraction": "optimizer.warmup",
        "train.max_norm": "optimizer.max_grad_norm",
        "train.min_lr": _min_lr,
        "train.tie_embeddings": "model.tie_word_embeddings",
        "train.log_interval": "trainer.steps_per_log",
        "train.save_interval": lambda value, _: {"trainer.checkpointer.keep": [{"every": value}]},
        "eval.interval": "trainer.steps_per_eval",
        "eval.max_iters": "trainer.max_eval_batches",
        "eval": Lost("evaluations are every trainer.steps_per_eval steps and after the last one"),
        "train.learning_rate": "optimizer.learning_rate",
        "train.weight_decay": "optimizer.weight_decay",
        "train.beta1": "optimizer.beta1",
        "train.beta2": "optimizer.beta2",
        "optimizer": _optimizer,
        "optimizer.class_path": _optimizer,
        "optimizer.init_args.lr": "optimizer.learning_rate",
        "optimizer.init_args.weight_decay": "optimizer.weight_decay",
        "optimizer.init_args.betas": _betas,
        "data": _data,
        "data.class_path": _data,
        "data.init_args.json_path": USED,
        "data.init_args.train_data_path": USED,
        "lora_r": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "quantize": Lost("weights are not kept in four or eight bits while they train"),
        "resume": AUTOMATIC,
        "out_dir": PLACE,
        "devices": DEVICES,
        "num_nodes": DEVICES,
        "logger_name": Lost("TensorBoard is the default; others are trainer.tracker"),
    },
    always={"model.type": "llama"},
)
