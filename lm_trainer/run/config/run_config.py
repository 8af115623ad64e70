"""`RunConfig`: the whole run as one validated value, and what of it decides the run's numbers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import NonNegativeFloat, PositiveInt, model_validator

from lm_trainer.core.config import Config, LocalPathOrHubName, PlacePath
from lm_trainer.core.credentials import without_credentials
from lm_trainer.core.errors import UserError
from lm_trainer.core.piecewise import TokenSchedule
from lm_trainer.core.result_keys import AffectsResults, Operational, result_values
from lm_trainer.data import DataConfig
from lm_trainer.harness.config import HarnessConfig
from lm_trainer.models import AnyModel, Gpt2Config
from lm_trainer.nn.lora_config import AnyAdapter
from lm_trainer.optim import AdamConfig, AnyOptimizer
from lm_trainer.optim.schedule import Schedule
from lm_trainer.run.config.earlier_runs import without_newer_defaults
from lm_trainer.run.config.refused_keys import REFUSED_AT_THE_TOP
from lm_trainer.run.config.trainer_config import TrainerConfig
from lm_trainer.step.dispatch.model_parallel_limits import check_length, check_model_parallel, model_parallel_axes


class RunConfig(Config):
    """A run is a function of this value, of the data that it names, and of the code."""

    refused_keys: ClassVar[Mapping[str, str]] = REFUSED_AT_THE_TOP

    model: AffectsResults[AnyModel] = Gpt2Config()
    """The model that is trained: a family and its sizes."""
    data: AffectsResults[DataConfig] = DataConfig()
    trainer: AffectsResults[TrainerConfig] = TrainerConfig()
    optimizer: AffectsResults[AnyOptimizer] = AdamConfig()
    """The rule that turns gradients into new weights, and the learning rate over time."""
    adapter: AffectsResults[AnyAdapter | None] = None
    """Freeze the model that the run starts from, and train an adapter for it; null: train all of it."""

    z_loss_weight: AffectsResults[NonNegativeFloat] = 0.0
    """Adds this times the mean of (log sum exp logits)^2 to what training minimises, so that the softmax's normalizer
    stays near 1; 1e-4 in PaLM. Logged as `train/z_loss`; `train/loss` and evaluations stay the cross-entropy alone."""
    log_entropy: Operational[bool] = False
    """Evaluations also measure the mean entropy of the distributions that the model predicts, in nats; logged as
    `eval/entropy` or, of several sets, `eval/NAME/entropy`."""

    eval_harness: Operational[HarnessConfig | None] = None
    """Tasks of EleutherAI's lm-evaluation-harness that the model is asked while it trains; logged as
    `lm_eval/TASK/METRIC`."""
    eval_harness_steps: Operational[PositiveInt | tuple[PositiveInt, ...]] = 10_000
    """Steps between two times that the tasks are asked, or a list of the steps after which to ask them; they are after
    the last step as well."""

    initialize_from_hf: AffectsResults[bool | LocalPathOrHubName] = False
    """Start from the weights of a Hugging Face checkpoint: a directory, or a name on the hub, with `@` and a revision
    if need be; `true`: `model.reference_checkpoint`, or the family's best known one. A run that has a checkpoint of its
    own resumes that."""
    use_hf_model_config: Operational[bool] = False
    """Take the model section from the config.json of that checkpoint. Keys that are written must not contradict it, but
    for a `seq_len` where positions are not learned; what config.json does not say can be set."""
    hf_save_path: Operational[PlacePath | None] = None
    """Export the model during training, for `transformers` (of a run that trains an adapter, the adapter for `peft`),
    to `hf_save_path`/id/step-N, as `trainer.checkpointer.append_run_id_to_base_path` says. It may be a URL of gs:// or
    s3://."""
    hf_save_steps: Operational[PositiveInt] = 10_000
    """Steps between exports; there is one after the last step as well."""
    hf_upload: Operational[bool | str] = False
    """Upload every export to the Hugging Face hub: to `ORG/NAME`, or with `true` to the run's id in the account of the
    token in HF_TOKEN. A repository that it makes is private."""
    hf_save_dtype: Operational[Literal["f32", "float32", "bf16", "bfloat16"] | None] = None
    """Numbers in the exported weights; null: as the parameters are."""

    def learning_rate(self) -> Schedule:
        """The learning rate as a function of the step, from 0."""
        tokens = TokenSchedule(self.trainer.batch_schedule, self.model.seq_len)
        return self.optimizer.schedule(self.trainer.num_train_steps, tokens)

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
    def _curvature_is_of_a_cross_entropy(self) -> RunConfig:
        if self.z_loss_weight and self.optimizer.curvature == "gauss_newton_bartlett":
            raise ValueError(
                f"z_loss_weight: optimizer.type: {self.optimizer.type} estimates the curvature of a cross-entropy "
                f"without a penalty; set z_loss_weight to 0, or write optimizer.type: sophia-h"
            )
        return self

    @model_validator(mode="after")
    def _microbatches_fit_mesh(self) -> RunConfig:
        plan = self.trainer.step_plan
        sizes = plan.mesh_shape._asdict()
        # Which model it is, is not known yet where config.json tells.
        if self.use_hf_model_config or not model_parallel_axes(sizes):
            return self
        try:
            check_length(self.model.seq_len, sizes)
            check_model_parallel(self.model.spec(vocab_size=1), plan.microbatch_rows, sizes)
        except UserError as error:
            raise ValueError(f"trainer: {error}") from None
        return self

    @model_validator(mode="after")
    def _model_hears_the_data(self) -> RunConfig:
        # Which model it is, is not known yet where config.json tells; and a program needs no data.
        if not self.use_hf_model_config and self.data.features_shape is not None:
            self.check_features()
        return self

    def check_features(self) -> None:
        """Raises `ValueError` where the data have other features than those that the model hears."""
        wanted, found = self.model.features_shape, self.data.features_shape
        if wanted == found:
            return
        if wanted is None:
            raise ValueError(f"data.format: audio needs a model that hears; {self.model.type} reads text alone")
        if found is None:
            raise ValueError("the model hears audio, but the data are text alone; write data.format: {type: audio}")
        raise ValueError(
            f"the model hears {wanted[0]} frames of {wanted[1]} channels (model.num_frames, model.num_mels), but "
            f"data.format makes {found[0]} of {found[1]}; make them agree by data.format.seconds and num_mels"
        )

    @model_validator(mode="after")
    def _schedule_fits(self) -> RunConfig:
        # Built here for its errors alone, long before the first step needs it.
        try:
            self.learning_rate()
        except ValueError as error:
            raise ValueError(f"optimizer: {error}") from None
        return self


def numeric_identity(config: Config) -> dict[str, Any]:
    """Takes the part of a configuration that decides the run's numbers, as plain data, without credentials in URLs.

    The marks of the fields of `config` and of its sections say what that is; deeper blocks count as a whole.
    """
    found = {}
    for key, value in result_values(config, config.model_dump(mode="json")).items():
        section = getattr(config, key)
        found[key] = result_values(section, value) if isinstance(section, Config) else value
    return without_credentials(found)


def config_hash(config: RunConfig) -> str:
    """Eight hex digits that two configurations share when they describe the same numbers."""
    text = json.dumps(without_newer_defaults(numeric_identity(config), config.trainer), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def numeric_differences(old: dict[str, Any], new: dict[str, Any], config: Any = None) -> list[str]:
    """One line for each key in which two results of `numeric_identity` differ; arguments as for `changed_keys`."""
    return [
        f"{key}: was {json.dumps(a)}, now {json.dumps(b)}" for key, (a, b) in changed_keys(old, new, config).items()
    ]


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], config: Any = None, prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """The keys in which two results of `numeric_identity` differ, with both values; None for one that is absent.

    Args:
        old: that of a run, perhaps written by older code.
        new: the other.
        config: what `new` is of, if it is known. Then a key that `old` lacks is no difference where it has its default
            now: older code, which did not have it, meant that. Nor is a key that no longer decides numbers.
        prefix: the section, with a dot at its end.
    """
    found: dict[str, tuple[Any, Any]] = {}
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = config.get(key) if isinstance(config, dict) else getattr(config, key, None)
            found |= changed_keys(a, b, inner, f"{prefix}{key}.")
        elif a != b and not (isinstance(config, Config) and _came_or_went(key, old, new, config)):
            found[prefix + key] = (a, b)
    return found


def _came_or_went(key: str, old: Mapping[str, Any], new: Mapping[str, Any], config: Config) -> bool:
    """True if the code alone made the difference: a key that is new and has its default, or that is operational now."""
    field = type(config).model_fields.get(key)
    if field is None or (key in old and key in new):
        return False
    if key in old:
        return True
    plain = config.model_copy(update={key: field.get_default(call_default_factory=True)})
    return not field.is_required() and plain.model_dump(mode="json", warnings=False)[key] == new[key]
