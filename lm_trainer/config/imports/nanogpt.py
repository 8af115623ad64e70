"""The dialect of nanoGPT: a Python file whose assignments override the defaults in nanoGPT's train.py."""

from __future__ import annotations

from lm_trainer.config.imports.base import (
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
    convert_precision,
)


def _convert_init_from(value: object, values: Values) -> Settings:
    del values
    if value == "resume":
        raise NoEqualError("a run resumes by itself, by the same command again")
    return {} if value == "scratch" else {"initialize_from_hf": "openai-community/" + str(value)}


def _convert_dataset(value: object, values: Values) -> Settings:
    if str(value).endswith("_char"):
        raise NoEqualError(
            "what the numbers in its train.bin mean only its meta.pkl knows, which is not read; input.txt beside them "
            "takes their place, its bytes are the tokens, and data.num_validation_sequences of it are held out",
            {
                "data.train_urls": [f"data/{value}/input.txt"],
                "data.tokenizer": "bytes",
                # About as many as nanoGPT's prepare.py holds out, which is a tenth of a million characters.
                "data.num_validation_sequences": max(1, 100_000 // int(values["block_size"])),
            },
        )
    return {
        "data.train_urls": [f"data/{value}/train.bin"],
        "data.validation_urls": [f"data/{value}/val.bin"],
        "data.source": {"type": "tokens", "dtype": "uint16"},
        "data.tokenizer": "gpt2",
    }


def _convert_min_lr(value: float, values: Values) -> Settings:
    return {"optimizer.min_lr_ratio": value / values["learning_rate"]}


def _convert_decay_lr(value: object, values: Values) -> Settings:
    del values
    return {"optimizer.lr_schedule": "cosine" if value else "constant"}


def _check_decay_steps(value: object, values: Values) -> Settings:
    if values["decay_lr"] and value != values["max_iters"]:
        raise NoEqualError(f"the learning rate decays to the last step, not to step {value}")
    return {}


def _convert_tracker(value: object, values: Values) -> Settings:
    if not value:
        return {}
    names = {"project": values.get("wandb_project"), "name": values.get("wandb_run_name")}
    return {"trainer.tracker": {"type": "wandb", **{key: name for key, name in names.items() if name}}}


def _convert_dropout(value: object, values: Values) -> Settings:
    del values
    return dict.fromkeys(("model.resid_pdrop", "model.attn_pdrop", "model.embed_pdrop"), value) if value else {}


def _convert_grad_clip(value: object, values: Values) -> Settings:
    del values
    return {"optimizer.max_grad_norm": value or None}


NANOGPT = Dialect(
    "nanoGPT",
    frozenset(
        {"n_embd", "block_size", "max_iters", "gradient_accumulation_steps", "n_layer", "eval_iters", "lr_decay_iters"}
    ),
    {
        "n_layer": "model.num_layers",
        "n_head": "model.num_heads",
        "n_embd": "model.hidden_dim",
        "block_size": "model.seq_len",
        "bias": "model.use_bias",
        "dropout": _convert_dropout,
        "dataset": _convert_dataset,
        "init_from": _convert_init_from,
        "batch_size": lambda value, values: {"trainer.train_batch_size": value * values["gradient_accumulation_steps"]},
        "gradient_accumulation_steps": USED,
        "max_iters": "trainer.num_train_steps",
        "eval_interval": "trainer.steps_per_eval",
        "eval_iters": "trainer.max_eval_batches",
        "log_interval": "trainer.steps_per_log",
        "learning_rate": "optimizer.learning_rate",
        "min_lr": _convert_min_lr,
        "decay_lr": _convert_decay_lr,
        "warmup_iters": "optimizer.warmup",
        "lr_decay_iters": _check_decay_steps,
        "weight_decay": "optimizer.weight_decay",
        "beta1": "optimizer.beta1",
        "beta2": "optimizer.beta2",
        "grad_clip": _convert_grad_clip,
        "dtype": lambda value, _: convert_precision(value),
        "wandb_log": _convert_tracker,
        "wandb_project": USED,
        "wandb_run_name": USED,
        "out_dir": OUTPUT_PATHS,
        "device": DEVICES,
        "backend": DEVICES,
        "compile": COMPILED,
        "eval_only": Unsupported("lmt eval RUN evaluates without training"),
        "always_save_checkpoint": AUTOMATIC,
    },
    {
        **{"n_layer": 12, "n_head": 12, "n_embd": 768, "block_size": 1024, "bias": False, "dataset": "openwebtext"},
        **{"batch_size": 12, "gradient_accumulation_steps": 40, "max_iters": 600_000, "dtype": "bfloat16"},
        **{"eval_interval": 2000, "eval_iters": 200, "learning_rate": 6e-4, "min_lr": 6e-5, "warmup_iters": 2000},
        **{
            "lr_decay_iters": 600_000,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "grad_clip": 1.0,
            "decay_lr": True,
        },
    },
    {"model.type": "gpt2"},
)
