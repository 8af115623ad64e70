"""`RunConfig`, the complete configuration of a run, and the part of it that determines the numerical results."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from lm_trainer.core.config import Config, LocalPathOrHubName, StorageLocation
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.core.result_keys import AffectsResults, Operational, select_result_values
from lm_trainer.data import DataConfig
from lm_trainer.harness.config import HarnessConfig
from lm_trainer.models import AnyModel, Gpt2Config
from lm_trainer.nn.lora_config import AnyAdapter
from lm_trainer.objectives import AnyLoss, NextTokenConfig
from lm_trainer.optim import AdamConfig, AnyOptimizer
from lm_trainer.optim.schedule import Schedule
from lm_trainer.run.config.default_shards import with_default_shards
from lm_trainer.run.config.logit_limit import check_logit_limit
from lm_trainer.run.config.loss_checks import check_loss
from lm_trainer.run.config.parametrization import AnyParametrization, StandardConfig, check_parametrization
from lm_trainer.run.config.recorded_keys import without_newer_defaults
from lm_trainer.run.config.refused_keys import REFUSED_TOP_LEVEL_KEYS
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_model_parallel, model_parallel_axes


class RunConfig(Config):
    """Configuration of a run. The results depend only on this value, the data that it refers to, and the code."""

    refused_keys: ClassVar[Mapping[str, str]] = REFUSED_TOP_LEVEL_KEYS

    model: AffectsResults[AnyModel] = Gpt2Config()
    """The model to train: a model family and its sizes."""
    data: AffectsResults[DataConfig] = DataConfig()
    trainer: AffectsResults[TrainerConfig] = TrainerConfig()
    optimizer: AffectsResults[AnyOptimizer] = AdamConfig()
    """The optimizer and the learning rate schedule."""
    parametrization: AffectsResults[AnyParametrization] = StandardConfig()
    """Rules for initial values, learning rates, epsilon and weight decay of each parameter, so that values that were
    chosen for a small model suit a larger one."""
    adapter: AffectsResults[AnyAdapter | None] = None
    """Freeze the initial model and train an adapter for it. null trains all parameters."""

    loss: AffectsResults[AnyLoss] = NextTokenConfig()
    """The training loss: the cross-entropy of the next token, or a preference loss on pairs of answers."""
    z_loss_weight: AffectsResults[NonNegativeFloat] = 0.0
    """Weight of the z-loss. The training objective includes this weight times the mean of (log sum exp logits)^2, which
    keeps the softmax normalizer near 1. PaLM uses 1e-4. The z-loss is logged as `train/z_loss`, while `train/loss` and
    evaluations remain the plain cross-entropy."""
    log_entropy: Operational[bool] = False
    """In evaluations, also measure the mean entropy of the model's predictions in nats. It is logged as `eval/entropy`
    or, with several sets, `eval/NAME/entropy`."""

    eval_harness: Operational[HarnessConfig | None] = None
    """Tasks of EleutherAI's lm-evaluation-harness to run during training. Results are logged as
    `lm_eval/TASK/METRIC`."""
    eval_harness_steps: Operational[PositiveInt | tuple[PositiveInt, ...]] = 10_000
    """Number of steps between runs of the harness tasks, or a list of the steps after which to run them. They also run
    after the last step."""

    initialize_from_hf: AffectsResults[bool | LocalPathOrHubName] = False
    """Start from the weights of a Hugging Face checkpoint: a directory, or a name on the hub, optionally with `@` and a
    revision. `true` means `model.reference_checkpoint`, or the best-known checkpoint of the family. If the run already
    has a checkpoint, it resumes from that instead."""
    use_hf_model_config: Operational[bool] = False
    """Take the model section from the config.json of the Hugging Face checkpoint. Keys that you set must not contradict
    config.json, except for `seq_len` if positions are not learned. Keys that are missing in config.json can be set."""
    hf_save_path: Operational[StorageLocation | None] = None
    """Export the model during training to `hf_save_path`/id/step-N, in the format of `transformers`. A run that trains
    an adapter exports the adapter in the format of `peft`. `trainer.checkpointer.append_run_id_to_base_path` determines
    whether the ID is part of the path. The path may be a gs:// or s3:// URL."""
    hf_save_steps: Operational[PositiveInt] = 10_000
    """Number of steps between exports. The model is also exported after the last step."""
    hf_upload: Operational[bool | str] = False
    """Upload every export to the Hugging Face hub. The value is the name of a repository (`ORG/NAME`), or `true` for a
    repository that is named after the run ID, in the account of the token in HF_TOKEN. New repositories are private."""
    hf_save_dtype: Operational[Literal["f32", "float32", "bf16", "bfloat16"] | None] = None
    """Dtype of the exported weights; null keeps the dtype of the parameters."""

    def learning_rate(self) -> Schedule:
        """Returns the learning rate as a function of the step, counted from 0."""
        tokens = TokenSchedule(self.trainer.batch_schedule, self.model.seq_len)
        return self.optimizer.schedule(self.trainer.num_train_steps, tokens)

    @model_validator(mode="after")
    def _default_shards_fit_the_rows(self) -> RunConfig:
        frames = self.model.features_shape[0] if self.model.features_shape else 0
        # Runs before the validators that check the microbatches. The section is copied, because configurations may
        # share it.
        object.__setattr__(self, "trainer", with_default_shards(self.trainer, self.model.seq_len + frames))
        return self

    @model_validator(mode="after")
    def _hf_keys_fit(self) -> RunConfig:
        if self.initialize_from_hf == "":
            raise ValueError("initialize_from_hf is empty; write a directory or a name on the hub, or remove it")
        if self.initialize_from_hf and (self.trainer.initialize_from or self.trainer.load_checkpoint_path):
            raise ValueError(
                "initialize_from_hf and trainer.initialize_from or trainer.load_checkpoint_path each say where to "
                "start; remove one of them"
            )
        if self.use_hf_model_config and not self.initialize_from_hf:
            raise ValueError("use_hf_model_config has no effect without initialize_from_hf; set it as well")
        if self.hf_upload and self.hf_save_path is None:
            raise ValueError("hf_upload uploads what is exported to hf_save_path; set it as well")
        return self

    @model_validator(mode="after")
    def _adapter_has_a_base(self) -> RunConfig:
        if self.adapter is not None and not (self.trainer.initialize_from or self.initialize_from_hf):
            raise ValueError(
                "adapter: there is no model to adapt; name a run or checkpoint as trainer.initialize_from, or a "
                "Hugging Face checkpoint as initialize_from_hf"
            )
        return self

    @model_validator(mode="after")
    def _loss_fits(self) -> RunConfig:
        check_loss(self)
        return self

    @model_validator(mode="after")
    def _parametrization_fits(self) -> RunConfig:
        check_parametrization(self)
        return self

    @model_validator(mode="after")
    def _curvature_is_of_a_cross_entropy(self) -> RunConfig:
        if self.z_loss_weight and self.optimizer.curvature == "gauss_newton_bartlett":
            raise ValueError(
                f"z_loss_weight: optimizer.type: {self.optimizer.type} estimates the curvature of a cross-entropy "
                f"without a penalty; set z_loss_weight to 0, or write optimizer.type: sophia-h"
            )
        if getattr(self.model, "mtp_depth", 0) and self.optimizer.curvature == "gauss_newton_bartlett":
            raise ValueError(
                f"model.mtp_depth: optimizer.type: {self.optimizer.type} estimates the curvature of the next token's "
                f"cross-entropy alone; set mtp_depth to 0, or write optimizer.type: sophia-h"
            )
        return self

    @model_validator(mode="after")
    def _logits_can_be_clipped(self) -> RunConfig:
        check_logit_limit(self)
        return self

    @model_validator(mode="after")
    def _microbatches_fit_mesh(self) -> RunConfig:
        plan = self.trainer.step_plan
        sizes = plan.mesh_shape._asdict()
        # With `use_hf_model_config` the model is not known yet.
        if self.use_hf_model_config or not model_parallel_axes(sizes):
            return self
        if self.model.own_code:
            keys = ", ".join(f"{axis}_axis_size={sizes[axis]}" for axis in model_parallel_axes(sizes))
            raise ValueError(f"trainer: {keys} cannot split a model with code of your own; set it to 1")
        try:
            check_length(self.model.seq_len, sizes)
            check_model_parallel(self.model.spec(vocab_size=1), plan.microbatch_rows, sizes)
        except UserError as error:
            raise ValueError(f"trainer: {error}") from None
        return self

    @model_validator(mode="after")
    def _features_match_the_model(self) -> RunConfig:
        # With `use_hf_model_config` the model is not known yet. A plan may be made without data.
        if not self.use_hf_model_config and self.data.features_shape is not None:
            self.check_features()
        return self

    def check_features(self) -> None:
        """Raises `ValueError` if the audio features of the data do not match the model."""
        expected, actual = self.model.features_shape, self.data.features_shape
        if expected == actual:
            return
        if expected is None:
            raise ValueError(f"data.format: audio needs a model that hears; {self.model.type} reads text alone")
        if actual is None:
            raise ValueError("the model hears audio, but the data are text alone; write data.format: {type: audio}")
        raise ValueError(
            f"the model hears {expected[0]} frames of {expected[1]} channels (model.num_frames, model.num_mels), but "
            f"data.format makes {actual[0]} of {actual[1]}; make them agree by data.format.seconds and num_mels"
        )

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunConfig:
        # The schedule is built here only to report errors early, long before the first step needs it.
        try:
            self.learning_rate()
        except ValueError as error:
            raise ValueError(f"optimizer: {error}") from None
        return self


def numeric_identity(config: Config) -> dict[str, Any]:
    """Returns the part of a configuration that affects numerical results, as plain data without credentials in URLs.

    The field annotations of `config` and of its sections determine this part. Blocks inside sections are included in
    full.
    """
    identity = {}
    for key, value in select_result_values(config, config.model_dump(mode="json")).items():
        section = getattr(config, key)
        identity[key] = select_result_values(section, value) if isinstance(section, Config) else value
    return without_credentials(identity)


def config_hash(config: RunConfig) -> str:
    """Returns eight hexadecimal digits that are the same for configurations with the same numerical results."""
    text = json.dumps(without_newer_defaults(numeric_identity(config), config.trainer, config.model), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def numeric_differences(old: dict[str, Any], new: dict[str, Any], config: Any = None) -> list[str]:
    """Returns a line for each key whose values differ in two numeric identities.

    For the arguments see `changed_keys`.
    """
    return [
        f"{key}: was {json.dumps(a)}, now {json.dumps(b)}" for key, (a, b) in changed_keys(old, new, config).items()
    ]


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], config: Any = None, prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Returns the keys whose values differ in two numeric identities, each with both values (None if missing).

    Args:
        old: numeric identity of a run, which may have been written by older code.
        new: the numeric identity to compare with.
        config: the configuration of `new`, if known. In that case, a key that is missing in `old` and has its default
            in `new` is not a difference, because the default is the behaviour of older code without the key. A key that
            no longer affects numerical results is not a difference either.
        prefix: name of the section with a trailing dot.
    """
    changed: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
            changed |= changed_keys(a, b, inner, f"{prefix}{key}.")
        elif a != b and not (isinstance(config, Config) and _only_code_changed(key, old, new, config)):
            changed[prefix + key] = (a, b)
    return changed


def _only_code_changed(key: str, old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> bool:
    """Returns True if only the code changed: the key is new and has its default, or no longer affects the results."""
    field = type(config).model_fields.get(key)
    if field is None or (key in old and key in new):
        return False
    if key in old:
        return True
    plain = config.model_copy(update={key: field.get_default(call_default_factory=True)})
    return not field.is_required() and plain.model_dump(mode="json", warnings=False)[key] == new[key]
