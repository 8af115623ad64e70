"""Model and microbatch per device for each size of a ladder."""

from __future__ import annotations

import difflib
from abc import abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveInt, ValidationError, model_validator

from lm_trainer.core.config import Config, or_instance_of
from lm_trainer.core.errors import UserError
from lm_trainer.ladder.sizes import TransformerSize, olmo_microbatch_size, olmo_minimal_devices
from lm_trainer.models import AnyModel, Olmo3Config
from lm_trainer.models.base import DecoderConfig


class DeviceMeshSpec(NamedTuple):
    """The minimum number of devices for a size."""

    world_size: int
    """Number of devices."""
    dp_world_size: int | None
    """Number of devices that share the batch; None means all."""


class ModelConfigurator(Config):
    """Maps the name of a size to its model configuration.

    For use in Python, a subclass is enough. For configuration files, the subclass also needs a `type` and an entry in
    `AnyModelConfigurator`.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "build_train_module": "ModelLadder.run builds the program of a size from ModelLadder.run_config(size_spec); "
        "build_setup of lm_trainer.run.build.setup plans it without running it, and Trainer of "
        "lm_trainer.run.trainer is for a loop of your own",
    }

    type: str = "own"
    rank_microbatch_size: PositiveInt | None = None
    """Number of tokens per device and forward pass; by default the batch divided by `trainer.elastic_shards`. The batch
    is rounded to a multiple of this number."""

    def known_sizes(self) -> tuple[str, ...] | None:
        """Returns the names of all sizes; None if only `configure_model` knows them."""
        return None

    @abstractmethod
    def configure_model(
        self, *, size_spec: str, sequence_length: int, tokenizer: Any = None, device_type: str = "cpu"
    ) -> DecoderConfig:
        """Returns the model configuration of a size.

        Args:
            size_spec: the size.
            sequence_length: number of tokens per row.
            tokenizer: the tokenizer of the ladder. Models get their vocabulary size later, when they are built.
            device_type: the device type of the ladder.

        Raises:
            UserError: for an unknown size.
        """

    def configure_rank_microbatch_size(self, *, size_spec: str, sequence_length: int, device_type: str) -> int:
        """Returns the number of tokens per device and forward pass if it depends on the hardware, for `compat: olmo`.

        Raises:
            UserError: if there is no figure for the device.
        """
        return self.rank_microbatch_size or olmo_microbatch_size(size_spec, sequence_length, device_type)

    def configure_minimal_device_mesh_spec(
        self, *, size_spec: str, sequence_length: int = 8192, device_type: str = "cpu"
    ) -> DeviceMeshSpec:
        """Returns OLMo-core's minimum number of devices. This framework needs only enough memory."""
        del sequence_length, device_type
        return DeviceMeshSpec(olmo_minimal_devices(size_spec), None)

    def check(self, size_spec: str) -> None:
        """Raises `UserError` with a suggestion if the size is unknown."""
        sizes = self.known_sizes()
        if sizes is not None and size_spec not in sizes:
            near = difflib.get_close_matches(size_spec, sizes, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(sizes)}"
            raise UserError(f"there is no size {size_spec!r}; {hint}")


class TransformerModelConfigurator(ModelConfigurator):
    """User-defined sizes: each is any model of `lm_trainer.models`."""

    type: Literal["transformer"] = "transformer"
    models: dict[str, AnyModel] = {}
    """Model of each size by the name of the size. The ladder sets `seq_len`."""

    @model_validator(mode="after")
    def _check_length_is_set_once(self) -> TransformerModelConfigurator:
        for name, model in self.models.items():
            if "seq_len" in model.changed_fields:
                raise ValueError(f"models.{name}.seq_len: sequence_length of the ladder decides it; remove the key")
        return self

    def known_sizes(self) -> tuple[str, ...] | None:
        return tuple(self.models) or None

    def configure_model(
        self, *, size_spec: str, sequence_length: int, tokenizer: Any = None, device_type: str = "cpu"
    ) -> DecoderConfig:
        del tokenizer, device_type
        if not self.models:
            raise UserError(
                f"model_configurator.models is empty, so there is no size {size_spec!r}; write the model of each size "
                "there, or override configure_model"
            )
        self.check(size_spec)
        return self.models[size_spec].model_copy(update={"seq_len": sequence_length})


class Olmo3ModelConfigurator(ModelConfigurator):
    """The sizes of OLMo 3, from 60M to 13B parameters."""

    type: Literal["olmo3"] = "olmo3"
    model_construction_kwargs: dict[str, Any] = {}
    """Settings that override the settings of every size, such as `gradient_checkpointing: dots`."""

    @model_validator(mode="after")
    def _check_settings_exist(self) -> Olmo3ModelConfigurator:
        # Any size will do, because a wrong setting is wrong for all sizes.
        try:
            self.configure_model(size_spec=TransformerSize.size_60M, sequence_length=2048)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"model_construction_kwargs.{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
        return self

    def known_sizes(self) -> tuple[str, ...]:
        return tuple(TransformerSize)

    def configure_model(
        self, *, size_spec: str, sequence_length: int, tokenizer: Any = None, device_type: str = "cpu"
    ) -> Olmo3Config:
        del tokenizer, device_type
        self.check(size_spec)
        shape = TransformerSize(size_spec).shape
        # As in OLMo-core's `olmo3`: one key head per query head, and full attention in every fourth layer.
        settings = {
            **shape._asdict(),
            "num_kv_heads": shape.num_heads,
            "layer_norm_epsilon": 1e-6,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "seq_len": sequence_length,
            **self.model_construction_kwargs,
        }
        return Olmo3Config.model_validate(settings)


AnyModelConfigurator = Annotated[
    Olmo3ModelConfigurator | TransformerModelConfigurator,
    Field(discriminator="type"),
    # Objects made in Python need no type. Configuration files choose between the classes listed here.
    or_instance_of(ModelConfigurator),
]
