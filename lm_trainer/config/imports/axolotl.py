"""The dialect of axolotl: a flat YAML file for fine-tuning."""

from __future__ import annotations

from lm_trainer.config.imports.base import (
    ALPACA,
    AUTOMATIC,
    COMPILED,
    DEVICES,
    OUTPUT_PATHS,
    USED,
    Dialect,
    NoEqualError,
    Settings,
    Unsupported,
    Values,
)


def _convert_base_model(value: object, values: Values) -> Settings:
    del values
    return {"initialize_from_hf": value, "use_hf_model_config": True}


def _convert_datasets(value: object, values: Values) -> Settings:
    del values
    if not isinstance(value, list) or len(value) != 1:
        raise NoEqualError("several data sets; write each below data.configs, with data.train_weights")
    data_set = value[0]
    kind = str(data_set.get("type", ""))
    settings: dict[str, object] = {}
    if str(data_set.get("path", "")).endswith((".json", ".jsonl", ".parquet")) or data_set.get("ds_type"):
        settings["data.train_urls"] = [str(data_set["path"])]
    else:
        settings |= {"data.id": data_set["path"], "data.splits": [data_set.get("split", "train")]}
    if kind == "completion":
        settings["data.text_key"] = data_set.get("field", "text")
    elif kind == "chat_template":
        settings["data.format"] = _convert_chat_format(data_set)
    elif kind.startswith("sharegpt"):
        settings["data.format"] = _convert_chat_format(
            {
                "field_messages": "conversations",
                "message_field_role": "from",
                "message_field_content": "value",
                **data_set,
            }
        )
    elif kind == "alpaca":
        settings["data.format"] = ALPACA
    else:
        raise NoEqualError(f"rows of type {kind!r}; data.format is text, chat, supervised or ids")
    return settings


def _convert_chat_format(data_set: Values) -> Settings:
    """Returns our data format for the conversations of a data set."""
    mapped = data_set.get("message_property_mappings") or {}
    names = {key: mapped.get(key) or data_set.get(f"message_field_{key}") or key for key in ("role", "content")}
    roles = {str(alias): role for role, aliases in (data_set.get("roles") or {}).items() for alias in aliases}
    return {
        "type": "chat",
        "messages_field": data_set.get("field_messages", "messages"),
        **{f"{key}_field": name for key, name in names.items() if name != key},
        **({"roles": roles} if roles else {}),
    }


def _convert_adapter(value: object, values: Values) -> Settings:
    del values
    if value not in ("lora", "qlora"):
        raise NoEqualError(f"adapter {value}: there are lora and qlora")
    return {"adapter.type": "lora", **({"adapter.base_quantization": "nf4"} if value == "qlora" else {})}


def _convert_optimizer(value: object, values: Values) -> Settings:
    del values
    name = str(value)
    if name.startswith("adamw") or name == "paged_adamw_32bit":
        return {"optimizer.type": "adam"}
    if name in ("lion", "muon", "adafactor"):
        return {"optimizer.type": name}
    raise NoEqualError(f"optimizer {name}; AdamW takes its place")


def _convert_beta2(value: object, values: Values) -> Settings:
    return {"optimizer.beta2": value} if "adamw" in str(values["optimizer"]) else {}


def _convert_schedule(value: object, values: Values) -> Settings:
    del values
    if value not in ("cosine", "linear", "constant"):
        raise NoEqualError(f"schedule {value}; see optimizer.lr_schedule")
    return {"optimizer.lr_schedule": value}


def _convert_batch_size(value: int, values: Values) -> Settings:
    return {"trainer.train_batch_size": value * values["gradient_accumulation_steps"]}


def _convert_bf16(value: object, values: Values) -> Settings:
    del values
    return {"trainer.mp": "p=f32,c=bfloat16"} if value in (True, "auto", "full") else {}


def _convert_grad_clip(value: object, values: Values) -> Settings:
    del values
    return {"optimizer.max_grad_norm": value}


def _convert_val_set_size(value: object, values: Values) -> Settings:
    del values
    if not value:
        return {}
    raise NoEqualError(f"{value} of the rows; data.num_validation_sequences holds a number of rows out")


def _refuse_epochs(value: object, values: Values) -> Settings:
    del values
    raise NoEqualError(f"{value} passes; the length is trainer.num_train_steps, in steps, 400,000 by default")


def _convert_tracker(value: object, values: Values) -> Settings:
    if not value:
        return {}
    names = {"entity": values.get("wandb_entity"), "name": values.get("wandb_name")}
    return {"trainer.tracker": {"type": "wandb", "project": value, **{k: v for k, v in names.items() if v}}}


def _default_values(values: Values) -> Values:
    """Returns the defaults of axolotl, and of the transformers Trainer that it uses, for missing keys."""
    defaults = {
        **{"gradient_accumulation_steps": 1, "optimizer": "adamw_torch", "adam_beta2": 0.999, "weight_decay": 0.0},
        **{"lr_scheduler": "cosine", "cosine_min_lr_ratio": 0.0},
    }
    if not {"warmup_steps", "warmup_ratio"} & values.keys():
        has_steps = isinstance(values.get("max_steps"), int)
        defaults |= {"warmup_steps": min(3 * values["max_steps"] // 100, 100)} if has_steps else {_WARMUP: 0.03}
    return defaults


_WARMUP = "the warm-up that no key gives"


def _convert_default_warmup(value: float, values: Values) -> Settings:
    del values
    raise NoEqualError(
        f"{value:.0%} of the steps, but at most 100; optimizer.warmup is {value} here, as no key gives the steps",
        {"optimizer.warmup": value},
    )


AXOLOTL = Dialect(
    "axolotl",
    frozenset({"base_model", "sequence_len", "micro_batch_size", "datasets", "sample_packing", "lora_target_linear"}),
    {
        "base_model": _convert_base_model,
        "model_type": USED,
        "tokenizer_type": USED,
        "datasets": _convert_datasets,
        "val_set_size": _convert_val_set_size,
        "dataset_prepared_path": "data.cache_dir",
        "sequence_len": "model.seq_len",
        "sample_packing": lambda value, _: {"data.packing": "best_fit"} if value else {},
        "pad_to_sequence_len": Unsupported("rows have one length"),
        "train_on_inputs": Unsupported("data.format says what the loss counts: mask_inputs, mask_user_turns"),
        "adapter": _convert_adapter,
        "lora_r": "adapter.rank",
        "lora_alpha": "adapter.alpha",
        "lora_dropout": "adapter.dropout",
        "lora_target_modules": "adapter.target_modules",
        "lora_target_linear": USED,
        "load_in_8bit": lambda value, _: _refuse_if_enabled(value),
        "load_in_4bit": lambda value, values: {} if values.get("adapter") == "qlora" else _refuse_if_enabled(value),
        "micro_batch_size": _convert_batch_size,
        "gradient_accumulation_steps": USED,
        "num_epochs": _refuse_epochs,
        "max_steps": "trainer.num_train_steps",
        "optimizer": _convert_optimizer,
        "lr_scheduler": _convert_schedule,
        "cosine_min_lr_ratio": "optimizer.min_lr_ratio",
        "learning_rate": "optimizer.learning_rate",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.beta1",
        "adam_beta2": _convert_beta2,
        "max_grad_norm": _convert_grad_clip,
        "warmup_steps": "optimizer.warmup",
        "warmup_ratio": "optimizer.warmup",
        _WARMUP: _convert_default_warmup,
        "eval_steps": "trainer.steps_per_eval",
        "evals_per_epoch": Unsupported("evaluations are every trainer.steps_per_eval steps"),
        "saves_per_epoch": Unsupported(
            "checkpoints are saved by time: trainer.checkpointer.save_interval, and keep for steps"
        ),
        "save_steps": lambda value, _: {"trainer.checkpointer.keep": [{"every": value}]},
        "logging_steps": "trainer.steps_per_log",
        "bf16": _convert_bf16,
        "fp16": lambda value, _: _refuse_if_enabled(value),
        "tf32": lambda value, _: _refuse_if_enabled(value),
        "gradient_checkpointing": "model.gradient_checkpointing",
        "flash_attention": lambda value, _: {"model.attn_backend": "auto"} if value else {},
        "attn_implementation": lambda _, __: {"model.attn_backend": "auto"},
        "seed": "trainer.seed",
        "wandb_project": _convert_tracker,
        "wandb_entity": USED,
        "wandb_name": USED,
        "wandb_watch": USED,
        "wandb_log_model": USED,
        "output_dir": OUTPUT_PATHS,
        "deepspeed": DEVICES,
        "fsdp": DEVICES,
        "fsdp_config": DEVICES,
        "torch_compile": COMPILED,
        "resume_from_checkpoint": AUTOMATIC,
        "strict": USED,
        "special_tokens": Unsupported(
            "the tokenizer's own are taken; data.tokenizer.eos_token names the one that ends a document"
        ),
    },
    _default_values,
)


def _refuse_if_enabled(value: object) -> Settings:
    """Returns no settings for a disabled option. Raises NoEqualError if the option is enabled."""
    if value in (None, False, ""):
        return {}
    raise NoEqualError("not available; bf16 computes in bfloat16, and weights stay in float32")
