"""Top-level keys and attributes of Levanter's programs and of ladders that the configuration of a run does not have."""

_LADDER = "of a ladder of runs; use `lmt ladder plan` or `lmt ladder run`"
_CHAT = "of a program for instruction data alone; use `data.train_urls` with `data.format: {type: chat}`"
_ADAPTER = (
    "use an `adapter` section, and `initialize_from_hf` or `trainer.initialize_from` for the model that it adapts"
)
_EXPORT = "use `hf_save_path`, which holds the adapter for `peft`; `lmt export-hf RUN OUT` merges it into the model"

REFUSED_TOP_LEVEL_KEYS = {
    "model_configurator": _LADDER,
    "run_configurator": _LADDER,
    "initialize_from_checkpoint_path": "use `trainer.initialize_from`, which loads weights alone",
    "data_seed": "the order of the data follows from `trainer.seed`; remove it",
    "epoch": "use `data.stop_strategy: first_exhausted` with `data.epochs`",
    "lora": _ADAPTER,
    "peft_save_path": _EXPORT,
    "peft_hf_upload": "use `hf_upload`",
    "merged_hf_save_path": _EXPORT,
    "merged_hf_upload": _EXPORT,
    "trust_remote_code": "no code of a checkpoint or data set is ever run; remove it",
    "max_train_length": "use `model.seq_len`",
    "supervised_data": "use `data.format: {type: supervised}`, and `data.configs` for several sets",
    "mixture_weights": "use `data.train_weights`",
    "dataset_type": _CHAT,
    "chat_train_urls": _CHAT,
    "messages_field": "use `data.format: {type: chat, messages_field: ...}`",
    "input_role": "the tokenizer's chat template knows the roles; use `data.format: {type: chat}`",
    "output_role": "the tokenizer's chat template knows the roles; use `data.format: {type: chat}`",
    "max_seq_len": "use `model.seq_len`",
    "model_name_or_path": "use `initialize_from_hf`",
    "tokenizer": "use `data.tokenizer`",
    "reinit_tokens": "not available; a tokenizer with other tokens than the checkpoint's is refused",
}
"""The replacement of each key, or the reason why it has none."""

ABSENT_TRAINER_ATTRIBUTES = {
    "TrainBatch": "axes have no objects; use batch_schedule.at(step)",
    "EvalBatch": "axes have no objects; use eval_batch_size",
    "batch_axis_at_step": "axes have no objects; use batch_schedule.at(step)",
    "initialize": "use `with Trainer(config, optimizer, loss) as trainer:`, which does it",
    "use_device_mesh": "shardings name their mesh; use jax.set_mesh(config.device_mesh) for code of yours",
    "num_slices": "it is not asked for; copies of the state over slices: use replica_dcn_axis_size",
    "num_devices_per_slice": "for each copy over slices use device_mesh.size // replica_dcn_axis_size",
    "data_ici_axis_size": "there is one data axis, inside and across slices; use device_mesh.shape['data']",
    "data_dcn_axis_size": "there is one data axis, inside and across slices; use device_mesh.shape['data']",
}
"""The replacement of attributes that Levanter's `TrainerConfig` has."""
