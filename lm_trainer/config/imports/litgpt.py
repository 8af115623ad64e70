"""The dialect of litgpt: the YAML files of `litgpt pretrain` and `litgpt finetune`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_trainer.config.imports.base import (
    ALPACA,
    AUTOMATIC,
    DEVICES,
    OUTPUT_PATHS,
    USED,
    Dialect,
    NoEqualError,
    Rule,
    Settings,
    Unsupported,
    Values,
    convert_precision,
)

_VOCABULARY = Unsupported("the tokenizer tells the vocabulary")
_SIZES: dict[str, Rule] = {
    "block_size": "model.seq_len",
    "n_layer": "model.num_layers",
    "n_embd": "model.hidden_dim",
    "n_head": "model.num_heads",
    "n_query_groups": lambda value, values: _convert_for_family(
        "llama", "num_kv_heads", value, values, plain=_model_value(values, "n_head")
    ),
    "intermediate_size": "model.intermediate_dim",
    "head_size": lambda value, values: _convert_for_family(
        "llama", "head_dim", value, values, plain=_head_size(values)
    ),
    "norm_eps": "model.layer_norm_epsilon",
    "bias": "model.use_bias",
    "mlp_class_name": lambda value, _: _convert_family(value),
    "norm_class_name": lambda value, values: _check_fixed_by_family(
        value, {"llama": "RMSNorm", "gpt_neox": "LayerNorm"}, values
    ),
    "rotary_percentage": lambda value, values: _convert_for_family("gpt_neox", "rotary_pct", value, values, plain=1.0),
    "parallel_residual": lambda value, values: _convert_for_family(
        "gpt_neox", "use_parallel_residual", value, values, plain=False
    ),
    "rope_base": lambda value, _: {"model.rope": {"type": "default", "theta": float(value)}},
    "scale_embeddings": lambda value, values: _check_fixed_by_family(
        value, {"llama": False, "gpt_neox": False}, values
    ),
    **dict.fromkeys(("name", "hf_config"), USED),
    **dict.fromkeys(("vocab_size", "padded_vocab_size", "padding_multiple"), _VOCABULARY),
}
_FAMILIES = {"LLaMAMLP": "llama", "GptNeoxMLP": "gpt_neox"}
_ASSUMED_SIZES = {
    **{"block_size": 4096, "n_layer": 16, "n_embd": 4096, "n_head": 32, "norm_eps": 1e-5, "rope_base": 10_000},
    **{"mlp_class_name": "GptNeoxMLP", "norm_class_name": "LayerNorm", "rotary_percentage": 0.25},
    **{"parallel_residual": True, "bias": True},
}
_LLAMA = {
    **{"mlp_class_name": "LLaMAMLP", "norm_class_name": "RMSNorm", "rotary_percentage": 1.0},
    **{"parallel_residual": False, "bias": False},
}
_NAMED = {
    "pythia-14m": {"block_size": 512, "n_layer": 6, "n_embd": 128, "n_head": 4},
    "pythia-31m": {"block_size": 1024, "n_layer": 6, "n_embd": 256, "n_head": 8},
    "pythia-70m": {"block_size": 2048, "n_layer": 6, "n_embd": 512, "n_head": 8},
    "pythia-160m": {"block_size": 2048, "n_layer": 12, "n_embd": 768, "n_head": 12},
    "pythia-410m": {"block_size": 2048, "n_layer": 24, "n_embd": 1024, "n_head": 16},
    "tiny-llama-1.1b": {
        **{"block_size": 2048, "n_layer": 22, "n_embd": 2048, "n_head": 32, "n_query_groups": 4},
        **{"intermediate_size": 5632, **_LLAMA},
    },
}
"""Sizes of the models that litgpt's examples use, keyed by litgpt name."""


def _model_block(values: Values) -> str:
    return "model" if any(key.startswith("model.") for key in values) else "model_config"


def _is_fine_tuning(values: Values) -> bool:
    """Returns True for a file of a fine-tuning command."""
    return "checkpoint_dir" in values or "lora_r" in values


def _model_value(values: Values, key: str) -> Any:
    return values.get(f"{_model_block(values)}.{key}")


def _head_size(values: Values) -> int:
    return int(_model_value(values, "n_embd")) // int(_model_value(values, "n_head"))


def _model_type(values: Values) -> str | None:
    return _FAMILIES.get(str(_model_value(values, "mlp_class_name")))


def _convert_family(value: str) -> Settings:
    if value not in _FAMILIES:
        raise NoEqualError(f"{value}; the families are told apart by {', '.join(_FAMILIES)}: see model.type")
    return {"model.type": _FAMILIES[value]}


def _convert_for_family(kind: str, key: str, value: object, values: Values, *, plain: object) -> Settings:
    """Converts a key that our models of type `kind` have. In the other type, its value is fixed to `plain`."""
    if _model_type(values) == kind:
        return {f"model.{key}": value}
    return _check_fixed_value(value, plain, next(family for family in _FAMILIES.values() if family != kind))


def _check_fixed_by_family(value: object, by_type: Mapping[str, object], values: Values) -> Settings:
    kind = _model_type(values) or "llama"
    return _check_fixed_value(value, by_type[kind], kind)


def _check_fixed_value(value: object, plain: object, kind: str) -> Settings:
    if value != plain:
        raise NoEqualError(f"{value}: a model of type {kind} has {plain}; another family may have it, see model.type")
    return {}


def _default_values(values: Values) -> Values:
    """Returns litgpt's defaults for missing keys. They depend on the command, which is recognised by the keys."""
    tunes = _is_fine_tuning(values)
    defaults: dict[str, object] = {"seed": 1337 if tunes else 42, **(_TUNING if tunes else _PRETRAINING)}
    if "train.max_steps" in values or "train.epochs" in values:
        defaults.pop("train.max_tokens", None)
    if "train.learning_rate" not in values:
        # Defaults of PyTorch, which litgpt uses if a file only names the optimizer.
        defaults |= {f"optimizer.init_args.{key}": value for key, value in _ADAMW.items()}
    block = _model_block(values)
    named = _NAMED.get(str(values.get("model_name")).rpartition("/")[2])
    if any(key.startswith(f"{block}.") for key in values):
        sizes = _ASSUMED_SIZES
    elif named is not None and not tunes:
        sizes = {**_ASSUMED_SIZES, **named}
    else:
        return defaults
    defaults |= {f"{block}.{key}": value for key, value in sizes.items()}
    all_sizes = {**defaults, **values}
    if f"{block}.intermediate_size" not in all_sizes and _model_type(all_sizes) == "gpt_neox":
        defaults[f"{block}.intermediate_size"] = 4 * int(all_sizes[f"{block}.n_embd"])
    return defaults


_ADAMW = {"lr": 1e-3, "weight_decay": 0.01, "betas": [0.9, 0.999]}
_PRETRAINING = {
    **{"train.global_batch_size": 512, "train.lr_warmup_steps": 2000, "train.max_norm": 1.0, "train.min_lr": 4e-5},
    **{"train.max_tokens": 3_000_000_000_000, "eval.interval": 1000, "eval.max_iters": 100},
}
_TUNING = {
    **{"train.global_batch_size": 16, "train.lr_warmup_steps": 100, "train.max_norm": 0, "train.min_lr": 0.0},
    **{"eval.interval": 100, "eval.max_iters": 100},
}


def _convert_checkpoint_dir(value: object, values: Values) -> Settings:
    del values
    return {"initialize_from_hf": str(value).removeprefix("checkpoints/"), "use_hf_model_config": True}


def _convert_model_name(value: object, values: Values) -> Settings:
    if any(key.startswith(f"{_model_block(values)}.") for key in values) or values.get("checkpoint_dir"):
        return {}
    raise NoEqualError(f"the sizes of {value} are not known here; write a model section, or use_hf_model_config")


def _size_rules(block: str) -> dict[str, Rule]:
    """Returns the rules for the model keys below `block`."""
    return {f"{block}.{key}": rule for key, rule in _SIZES.items()}


def _convert_optimizer(value: object, values: Values) -> Settings:
    del values
    if not str(value).lower().endswith("adamw"):
        raise NoEqualError(f"optimizer {value}; AdamW takes its place")
    return {"optimizer.type": "adam"}


def _convert_betas(value: Sequence[float], values: Values) -> Settings:
    del values
    return dict(zip(("optimizer.beta1", "optimizer.beta2"), value, strict=True))


def _convert_max_tokens(value: int, values: Values) -> Settings:
    lengths = ("train.max_seq_length", "model_config.block_size", "model.block_size")
    length = next((values[key] for key in lengths if key in values), None)
    rows = values.get("train.global_batch_size")
    if values.get("train.max_steps") or not length or not rows:
        raise NoEqualError("a length in tokens; trainer.num_train_steps is in steps")
    return {"trainer.num_train_steps": max(1, int(value) // (int(length) * int(rows)))}


def _refuse_epochs(value: object, values: Values) -> Settings:
    del values
    raise NoEqualError(f"{value} passes; the length is trainer.num_train_steps, and data begin anew by themselves")


def _convert_min_lr(value: float, values: Values) -> Settings:
    if _is_fine_tuning(values):
        # litgpt's fine-tuning always decays to zero, regardless of this key.
        return {"optimizer.min_lr_ratio": 0.0}
    if not (rate := values.get("optimizer.init_args.lr") or values.get("train.learning_rate")):
        raise NoEqualError("a part of the learning rate, which the file does not give")
    return {"optimizer.min_lr_ratio": float(value) / float(rate)}


def _convert_data(value: object, values: Values) -> Settings:
    kind, path = str(value).rpartition(".")[2], values.get("data.init_args.json_path")
    path = path or values.get("data.init_args.train_data_path")
    if path is None:
        raise NoEqualError(
            f"the data module {kind}; name files as data.train_urls, or a data set of the hub as data.id"
        )
    settings: dict[str, object] = {"data.train_urls": [str(path)]}
    if kind == "JSON":
        settings["data.format"] = ALPACA
    return settings


_ARCHITECTURE = Unsupported("no key of ours is known for it; what else a family may be is its type")

LITGPT = Dialect(
    "litgpt",
    frozenset(
        {"train.micro_batch_size", "train.global_batch_size", "train.lr_warmup_steps", "model_config.n_embd", "lora_r"}
    ),
    {
        "model_name": _convert_model_name,
        **_size_rules("model_config"),
        **_size_rules("model"),
        "model_config": _ARCHITECTURE,
        "model": _ARCHITECTURE,
        "model.name": USED,
        "checkpoint_dir": _convert_checkpoint_dir,
        "initial_checkpoint_dir": _convert_checkpoint_dir,
        "tokenizer_dir": "data.tokenizer",
        "precision": lambda value, _: convert_precision(value),
        "seed": "trainer.seed",
        "train.global_batch_size": "trainer.train_batch_size",
        "train.micro_batch_size": "trainer.per_device_parallelism",
        "train.max_steps": "trainer.num_train_steps",
        "train.max_tokens": _convert_max_tokens,
        "train.epochs": _refuse_epochs,
        "train.max_seq_length": "model.seq_len",
        "train.lr_warmup_steps": "optimizer.warmup",
        "train.lr_warmup_fraction": "optimizer.warmup",
        "train.max_norm": lambda value, _: {"optimizer.max_grad_norm": value or None},
        "train.min_lr": _convert_min_lr,
        "train.tie_embeddings": "model.tie_word_embeddings",
        "train.log_interval": "trainer.steps_per_log",
        "train.save_interval": lambda value, _: {"trainer.checkpointer.keep": [{"every": value}]},
        "eval.interval": "trainer.steps_per_eval",
        "eval.max_iters": "trainer.max_eval_batches",
        "eval": Unsupported("evaluations are every trainer.steps_per_eval steps and after the last one"),
        "train.learning_rate": "optimizer.learning_rate",
        "train.weight_decay": "optimizer.weight_decay",
        "train.beta1": "optimizer.beta1",
        "train.beta2": "optimizer.beta2",
        "optimizer": _convert_optimizer,
        "optimizer.class_path": _convert_optimizer,
        "optimizer.init_args.lr": "optimizer.learning_rate",
        "optimizer.init_args.weight_decay": "optimizer.weight_decay",
        "optimizer.init_args.betas": _convert_betas,
        "data": _convert_data,
        "data.class_path": _convert_data,
        "data.init_args.json_path": USED,
        "data.init_args.train_data_path": USED,
        "lora_r": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "quantize": Unsupported("weights are not kept in four or eight bits while they train"),
        "resume": AUTOMATIC,
        "out_dir": OUTPUT_PATHS,
        "devices": DEVICES,
        "num_nodes": DEVICES,
        "logger_name": Unsupported("TensorBoard is the default; others are trainer.tracker"),
    },
    _default_values,
    {"optimizer.type": "adam"},
)
