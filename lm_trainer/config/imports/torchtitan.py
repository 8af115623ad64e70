"""The dialect of torchtitan: a TOML file with sections, which selects a model by name and flavor."""

from __future__ import annotations

from lm_trainer.config.imports.base import (
    AUTOMATIC,
    COMPILED,
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

_LLAMA = ("model.hidden_dim", "model.num_layers", "model.num_heads", "model.num_kv_heads", "model.intermediate_dim")
_FLAVORS = {
    ("llama3", "debugmodel"): (256, 6, 16, 16, 768),
    ("llama3", "8B"): (4096, 32, 32, 8, 14336),
    ("llama3", "70B"): (8192, 80, 64, 8, 28672),
    ("llama3", "405B"): (16384, 126, 128, 8, 53248),
}


def _convert_flavor(value: object, values: Values) -> Settings:
    sizes = _FLAVORS.get((str(values.get("model.name")), str(value)))
    if sizes is None:
        raise NoEqualError(f"the sizes of {values.get('model.name')} {value} are not known here; write a model section")
    return {
        "model.type": "llama",
        **dict(zip(_LLAMA, sizes, strict=True)),
        "model.rope": {"type": "default", "theta": 5e5},
    }


def _convert_optimizer(value: object, values: Values) -> Settings:
    del values
    if str(value).lower() not in ("adamw", "adam"):
        raise NoEqualError(f"optimizer {value}; AdamW takes its place")
    return {"optimizer.type": "adam"}


def _convert_decay_type(value: object, values: Values) -> Settings:
    del values
    if value not in ("linear", "cosine"):
        raise NoEqualError(f"decay_type {value}: there are linear, cosine, inv_sqrt, inv and power")
    return {"optimizer.lr_schedule": value}


def _convert_local_batch_size(value: object, values: Values) -> Settings:
    if values.get("training.global_batch_size", -1) > 0:
        return {"trainer.per_device_parallelism": value}
    raise NoEqualError(
        "rows of each device, whose number the file does not tell; trainer.train_batch_size is of all of them, and "
        "is that of one device here",
        {"trainer.train_batch_size": value},
    )


def _convert_dataset(value: object, values: Values) -> Settings:
    if path := values.get("training.dataset_path"):
        return {"data.train_urls": [f"{path}/*"]}
    if value == "c4_test":
        return {"data.train_urls": ["tests/assets/c4_test/*"]}
    if value != "c4":
        raise NoEqualError(f"the data set {value} of its registry; name files as data.train_urls")
    return {"data.id": "allenai/c4", "data.name": "en"}


def _convert_global_batch_size(value: int, values: Values) -> Settings:
    del values
    return {"trainer.train_batch_size": value} if value > 0 else {}


def _axis_size_rule(key: str) -> Rule:
    return lambda value, _: {key: value} if value > 1 else {}


def _convert_remat(value: object, values: Values) -> Settings:
    del values
    if value not in ("none", "full"):
        raise NoEqualError(f"mode {value}: layers are recomputed, or not, or as lmt plan --search finds")
    return {"model.gradient_checkpointing": value == "full"}


_SHARDED = Unsupported(
    "all devices share parameters and batch by themselves; see trainer.gather: layer for less memory"
)

TORCHTITAN = Dialect(
    "torchtitan",
    frozenset({"model.flavor", "training.local_batch_size", "lr_scheduler.warmup_steps", "job.dump_folder"}),
    {
        "job.dump_folder": OUTPUT_PATHS,
        "job": Unsupported("nothing here needs it"),
        "profiling": Unsupported("trainer.profiler records a trace of some steps"),
        "metrics.log_freq": "trainer.steps_per_log",
        "metrics": Unsupported("metrics go to metrics.jsonl and TensorBoard; other trackers are trainer.tracker"),
        "model.name": USED,
        "model.flavor": _convert_flavor,
        "model.hf_assets_path": "data.tokenizer",
        "model.tokenizer_path": "data.tokenizer",
        "optimizer.name": _convert_optimizer,
        "optimizer.lr": "optimizer.learning_rate",
        "optimizer.eps": "optimizer.epsilon",
        "optimizer.beta1": "optimizer.beta1",
        "optimizer.beta2": "optimizer.beta2",
        "optimizer.weight_decay": "optimizer.weight_decay",
        "lr_scheduler.warmup_steps": "optimizer.warmup",
        "lr_scheduler.decay_ratio": "optimizer.decay",
        "lr_scheduler.decay_type": _convert_decay_type,
        "lr_scheduler.min_lr_factor": "optimizer.min_lr_ratio",
        "training.seq_len": "model.seq_len",
        "training.steps": "trainer.num_train_steps",
        "training.seed": "trainer.seed",
        "training.max_norm": "optimizer.max_grad_norm",
        "training.local_batch_size": _convert_local_batch_size,
        "training.batch_size": _convert_local_batch_size,
        "training.compile": COMPILED,
        "training.global_batch_size": _convert_global_batch_size,
        "training.dataset": _convert_dataset,
        "training.dataset_path": USED,
        "training.mixed_precision_param": lambda value, _: convert_precision(value),
        "training.mixed_precision_reduce": Unsupported("gradients are summed in float32"),
        "parallelism.data_parallel_replicate_degree": _axis_size_rule("trainer.replica_ici_axis_size"),
        "parallelism.data_parallel_shard_degree": _SHARDED,
        "parallelism.fsdp_reshard_after_forward": _SHARDED,
        "parallelism.tensor_parallel_degree": _axis_size_rule("trainer.model_axis_size"),
        "parallelism.context_parallel_degree": _axis_size_rule("trainer.context_axis_size"),
        "parallelism.pipeline_parallel_degree": _axis_size_rule("trainer.pipeline_axis_size"),
        "parallelism.expert_parallel_degree": _axis_size_rule("trainer.expert_axis_size"),
        "checkpoint.interval": lambda value, _: {"trainer.checkpointer.keep": [{"every": value}]},
        "checkpoint": AUTOMATIC,
        "validation.freq": "trainer.steps_per_eval",
        "validation": Unsupported("name held-out files as data.validation_urls"),
        "activation_checkpoint.mode": _convert_remat,
        "activation_checkpoint": USED,
        "compile": COMPILED,
        "float8": Unsupported("int8, fp8 and mxfp8 products are trainer.quantization"),
        "quantize": Unsupported("int8, fp8 and mxfp8 products are trainer.quantization"),
    },
    {
        "optimizer.lr": 8e-4,
        "lr_scheduler.warmup_steps": 200,
        "lr_scheduler.decay_type": "linear",
        "training.steps": 10_000,
        "lr_scheduler.min_lr_factor": 0.0,
        "optimizer.weight_decay": 0.1,
        "training.seq_len": 2048,
        "training.mixed_precision_param": "bfloat16",
        "training.max_norm": 1.0,
    },
)
