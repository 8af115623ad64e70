"""The dialect of TRL and of the Trainer of transformers: flat YAML or JSON of TrainingArguments, script arguments and
model arguments, with the keys of accelerate's YAML.
"""

from __future__ import annotations

from lm_trainer.config.imports.base import (
    AUTOMATIC,
    COMPILED,
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

_EIGHT_BITS = Unsupported("weights are not kept in eight bits while they train; load_in_4bit keeps them in four")
_BY_TIME = Unsupported("checkpoints are saved by time: trainer.checkpointer.save_interval, and keep for steps")
_ONE_LENGTH = Unsupported("documents are packed into rows of one length, so nothing is padded or collated")
_NO_HUB = Unsupported("hf_save_path and hf_upload export and upload the model")
_LOADER = Unsupported("batches are read ahead by threads; data.num_workers is for tokenising")
_EPOCHS = "num_train_epochs"
_PREFERENCE_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "simpo": "simpo"}
_OPTIMIZERS = {"adafactor": "adafactor", "lion_32bit": "lion", "lion": "lion", "muon": "muon"}
_SCHEDULES = {
    "linear": {"optimizer.lr_schedule": "linear", "optimizer.min_lr_ratio": 0.0},
    "cosine": {"optimizer.lr_schedule": "cosine", "optimizer.min_lr_ratio": 0.0},
    "constant": {"optimizer.lr_schedule": "constant"},
    "constant_with_warmup": {"optimizer.lr_schedule": "constant"},
}


def _convert_model(value: object, values: Values) -> Settings:
    revision = values.get("model_revision") or "main"
    name = f"{value}@{revision}" if revision != "main" else str(value)
    return {"initialize_from_hf": name, "use_hf_model_config": True, "data.tokenizer": str(value)}


def _convert_dataset(value: object, values: Values) -> Settings:
    splits = [str(values.get("dataset_train_split", "train"))]
    if values.get("eval_strategy", values.get("evaluation_strategy", "no")) != "no" or values.get("do_eval"):
        splits.append(str(values.get("dataset_test_split", "test")))
    settings: dict[str, object] = {"data.id": value, "data.splits": splits}
    if "beta" in values or "loss_type" in values:
        return {**settings, "data.format": {"type": "preference"}}
    if "dataset_text_field" in values:
        return settings
    # Without the key, the loss of a chat counts all tokens.
    chat: dict[str, object] = {"type": "chat", "mask_user_turns": bool(values.get("assistant_only_loss"))}
    if "chat_template_path" in values:
        chat["chat_template"] = values["chat_template_path"]
    return {**settings, "data.format": chat}


def _convert_batch_size(value: int, values: Values) -> Settings:
    per_device = value * values["gradient_accumulation_steps"]
    if (processes := values.get("num_processes")) is not None:
        return {"trainer.train_batch_size": per_device * processes}
    raise NoEqualError(
        f"the batch is {per_device} rows for each device, and the file does not give their number. This is for one; "
        f"give the number with --processes, or multiply trainer.train_batch_size",
        {"trainer.train_batch_size": per_device},
    )


def _convert_epochs(value: float, values: Values) -> Settings:
    if isinstance(values.get("max_steps"), int) and values["max_steps"] > 0:
        return {}
    settings = {"data.epochs": value, "data.stop_strategy": "first_exhausted"}
    raise NoEqualError(
        f"{value} passes over the data are data.epochs; the number of steps depends on the tokens: lmt train --dry-run "
        f"says how many there are, for trainer.num_train_steps",
        settings,
    )


def _convert_steps(value: int, values: Values) -> Settings:
    del values
    return {"trainer.num_train_steps": value} if value > 0 else {}


def _convert_schedule(value: object, values: Values) -> Settings:
    del values
    if str(value) not in _SCHEDULES:
        raise NoEqualError(f"schedule {value}; see optimizer.lr_schedule")
    return _SCHEDULES[str(value)]


def _convert_schedule_options(value: object, values: Values) -> Settings:
    del values
    if isinstance(value, dict) and value.keys() == {"min_lr_rate"}:
        return {"optimizer.min_lr_ratio": value["min_lr_rate"]}
    raise NoEqualError("options of a schedule; see optimizer.min_lr_ratio and optimizer.lr_schedule")


def _convert_optimizer(value: object, values: Values) -> Settings:
    del values
    name = str(value)
    if name.startswith("adamw") or name == "paged_adamw_32bit":
        return {"optimizer.type": "adam"}
    if name in _OPTIMIZERS:
        return {"optimizer.type": _OPTIMIZERS[name]}
    raise NoEqualError(f"optimizer {name}; AdamW takes its place")


def _convert_beta2(value: object, values: Values) -> Settings:
    return {"optimizer.beta2": value} if str(values["optim"]).startswith("adamw") else {}


def _convert_dtype(value: object, values: Values) -> Settings:
    # The dtype of the loaded weights; the Trainer's bf16 trains in mixed precision.
    del value, values
    return {}


def _convert_bf16(value: object, values: Values) -> Settings:
    del values
    return convert_precision("bf16") if value else {}


def _convert_mixed_precision(value: object, values: Values) -> Settings:
    del values
    return {} if value in ("no", False) else convert_precision(value)


def _refuse_if_enabled(value: object, values: Values) -> Settings:
    del values
    if value in (False, "", "no", 0):
        return {}
    raise NoEqualError("not available; bf16 computes in bfloat16, and weights stay in float32")


def _convert_loss_type(value: object, values: Values) -> Settings:
    del values
    if str(value) not in _PREFERENCE_LOSSES:
        raise NoEqualError(f"loss {value}; loss.type is dpo, ipo, simpo, orpo or kto")
    return {"loss.type": _PREFERENCE_LOSSES[str(value)]}


def _convert_beta(value: object, values: Values) -> Settings:
    kind = _PREFERENCE_LOSSES.get(str(values.get("loss_type", "sigmoid")), "dpo")
    return {"loss.type": kind, "loss.beta": value}


def _convert_eval_steps(value: object, values: Values) -> Settings:
    del values
    if isinstance(value, float) and value < 1:
        raise NoEqualError("a share of the steps; trainer.steps_per_eval is a number of steps")
    return {"trainer.steps_per_eval": value}


def _convert_tracker(value: object, values: Values) -> Settings:
    names = [str(name) for name in (value if isinstance(value, list) else [value])]
    if names == ["none"]:
        return {"trainer.tracker": []}
    trackers: list[dict[str, object]] = []
    if {"wandb", "all"} & {*names}:
        trackers.append({"type": "wandb", **({"name": values["run_name"]} if values.get("run_name") else {})})
    if {"tensorboard", "all"} & {*names}:
        trackers.append({"type": "tensorboard"})
    if not trackers:
        raise NoEqualError(f"{', '.join(names)}; trainer.tracker lists what there is")
    return {"trainer.tracker": trackers}


def _convert_adapter(value: object, values: Values) -> Settings:
    if not value:
        return {}
    names = {
        "lora_r": "rank",
        "lora_alpha": "alpha",
        "lora_dropout": "dropout",
        "lora_target_modules": "target_modules",
    }
    defaults = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
    settings = {f"adapter.{name}": values.get(key, defaults.get(key)) for key, name in names.items()}
    return {"adapter.type": "lora", **{key: item for key, item in settings.items() if item is not None}}


def _convert_quantization(value: object, values: Values) -> Settings:
    if not value:
        return {}
    kind, nested = values.get("bnb_4bit_quant_type", "nf4"), values.get("use_bnb_nested_quant", False)
    if not values.get("use_peft") or kind != "nf4" or not nested:
        raise NoEqualError(
            "adapter.base_quantization: nf4 is for the frozen base of an adapter (use_peft), in nf4 "
            "(bnb_4bit_quant_type), with scales in 8 bits (use_bnb_nested_quant)"
        )
    return {"adapter.base_quantization": "nf4"}


def _default_values(values: Values) -> Values:
    """Returns the defaults of TRL's trainers or, without a key of TRL, of TrainingArguments."""
    defaults: dict[str, object] = {
        **{"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "learning_rate": 5e-5},
        **{"lr_scheduler_type": "linear", "weight_decay": 0.0, "optim": "adamw_torch", "adam_beta2": 0.999},
        **{"seed": 42, "warmup_ratio": 0.0},
    }
    if "beta" in values or "loss_type" in values:
        defaults["learning_rate"] = 1e-6
    elif {"max_length", "max_seq_length", "packing", "dataset_name", "dataset_text_field"} & values.keys():
        defaults["learning_rate"] = 2e-5
    if "warmup_steps" in values:
        del defaults["warmup_ratio"]
    if not (isinstance(values.get("max_steps"), int) and values["max_steps"] > 0):
        defaults[_EPOCHS] = 3.0
    return defaults


_KEYS: dict[str, Rule] = {
    "model_name_or_path": _convert_model,
    "model_revision": USED,
    "tokenizer_name_or_path": "data.tokenizer",
    "torch_dtype": _convert_dtype,
    "dtype": _convert_dtype,
    "attn_implementation": lambda _, __: {"model.attn_backend": "auto"},
    "trust_remote_code": _refuse_if_enabled,
    "dataset_name": _convert_dataset,
    "dataset_config": "data.name",
    "dataset_train_split": USED,
    "dataset_test_split": USED,
    "dataset_text_field": "data.text_key",
    "dataset_num_proc": "data.num_workers",
    "chat_template": Unsupported("write the template to a file, and name it as data.format.chat_template"),
    "chat_template_path": USED,
    "assistant_only_loss": USED,
    "max_length": "model.seq_len",
    "max_seq_length": "model.seq_len",
    "packing": lambda value, _: {"data.packing": "best_fit"} if value else {},
    "beta": _convert_beta,
    "loss_type": _convert_loss_type,
    "precompute_ref_log_probs": "loss.precompute",
    "max_prompt_length": _ONE_LENGTH,
    "use_peft": _convert_adapter,
    **dict.fromkeys(("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_task_type"), USED),
    "load_in_4bit": _convert_quantization,
    "bnb_4bit_quant_type": USED,
    "use_bnb_nested_quant": USED,
    "load_in_8bit": _EIGHT_BITS,
    "per_device_train_batch_size": _convert_batch_size,
    "gradient_accumulation_steps": USED,
    "num_processes": USED,
    "per_device_eval_batch_size": Unsupported("evaluations use batches of the size of training"),
    _EPOCHS: _convert_epochs,
    "max_steps": _convert_steps,
    "learning_rate": "optimizer.learning_rate",
    "lr_scheduler_type": _convert_schedule,
    "lr_scheduler_kwargs": _convert_schedule_options,
    "warmup_ratio": "optimizer.warmup",
    "warmup_steps": "optimizer.warmup",
    "weight_decay": "optimizer.weight_decay",
    "optim": _convert_optimizer,
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": _convert_beta2,
    "adam_epsilon": "optimizer.epsilon",
    "max_grad_norm": lambda value, _: {"optimizer.max_grad_norm": value or None},
    "bf16": _convert_bf16,
    "fp16": _refuse_if_enabled,
    "tf32": _refuse_if_enabled,
    "mixed_precision": _convert_mixed_precision,
    "gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing_kwargs": Unsupported("model.gradient_checkpointing has its own settings"),
    "eval_steps": _convert_eval_steps,
    **dict.fromkeys(("eval_strategy", "evaluation_strategy", "do_eval", "do_train"), USED),
    "save_steps": _BY_TIME,
    "save_strategy": _BY_TIME,
    "save_total_limit": _BY_TIME,
    "logging_steps": lambda value, _: {"trainer.steps_per_log": value} if int(value) == value and value >= 1 else {},
    **dict.fromkeys(("logging_strategy", "logging_first_step", "log_level", "run_name", "remove_unused_columns"), USED),
    "report_to": _convert_tracker,
    "seed": "trainer.seed",
    "data_seed": Unsupported("trainer.seed also orders the data"),
    "output_dir": OUTPUT_PATHS,
    "logging_dir": OUTPUT_PATHS,
    "overwrite_output_dir": AUTOMATIC,
    "resume_from_checkpoint": AUTOMATIC,
    "load_best_model_at_end": Unsupported("all checkpoints of trainer.checkpointer.keep stay; lmt eval compares them"),
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_token"), _NO_HUB),
    **dict.fromkeys(("dataloader_num_workers", "dataloader_pin_memory", "dataloader_drop_last"), _LOADER),
    "group_by_length": _ONE_LENGTH,
    "padding_free": _ONE_LENGTH,
    "neftune_noise_alpha": Unsupported("no noise is added to embeddings"),
    "use_liger_kernel": COMPILED,
    "torch_compile": COMPILED,
    **dict.fromkeys(
        ("deepspeed", "fsdp", "fsdp_config", "deepspeed_config", "distributed_type", "num_machines", "machine_rank"),
        DEVICES,
    ),
    **dict.fromkeys(
        ("compute_environment", "debug", "downcast_bf16", "main_training_function", "rdzv_backend", "same_network"),
        DEVICES,
    ),
    **dict.fromkeys(("tpu_env", "tpu_use_cluster", "tpu_use_sudo", "use_cpu", "main_process_port"), DEVICES),
}

_FLAGS = {
    "per_device_train_batch_size": "trainer.train_batch_size counts the rows of all devices and accumulated batches "
    "together",
    "gradient_accumulation_steps": "trainer.train_batch_size is the batch of a step, which is divided by itself",
    "per_device_eval_batch_size": "evaluations use batches of the size of training",
    _EPOCHS: "write data.epochs and data.stop_strategy=first_exhausted; with these, --dry-run gives the number of "
    "steps, for trainer.num_train_steps",
    "max_steps": "write trainer.num_train_steps",
    "lr_scheduler_type": "write optimizer.lr_schedule: linear, cosine or constant",
    "optim": "write optimizer.type",
    "bf16": "write trainer.mp=p=f32,c=bfloat16",
    "fp16": "write trainer.mp=p=f32,c=bfloat16: float16 needs a scaled loss, which is not available",
    "report_to": "write trainer.tracker.type",
    "save_steps": "trainer.checkpointer.save_interval is the time between checkpoints, and trainer.checkpointer.keep "
    "keeps some of them by step",
    "deepspeed": "sharding needs no file: trainer.gather=layer needs as little memory as ZeRO-3",
    "fsdp": "sharding needs no setting: trainer.gather=layer needs as little memory as FSDP",
}

TRL = Dialect(
    "TRL",
    frozenset(
        {
            "model_name_or_path",
            "per_device_train_batch_size",
            "lr_scheduler_type",
            "num_train_epochs",
            "dataset_name",
            "torch_dtype",
            "report_to",
        }
    ),
    _KEYS,
    _default_values,
    flags=_FLAGS,
)
