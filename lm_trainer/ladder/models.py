"""Models of the sizes of a ladder, and the microbatch that a device computes of each."""

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
    """The fewest devices that a size needs."""

    world_size: int
    """Devices."""
    dp_world_size: int | None
    """Devices that share the batch; None: all."""


class ModelConfigurator(Config):
    """From the name of a size to its model.

    For use from Python a subclass is enough. For configuration files it needs a `type` of its own and its place in
    `AnyModelConfigurator`.
    """

    absent: ClassVar[Mapping[str, str]] = {
        "build_train_module": "ModelLadder.run builds the program of a size from ModelLadder.run_config(size_spec); "
        "build_setup of lm_trainer.run.build.setup plans it without running it, and Trainer of "
        "lm_trainer.run.trainer is for a loop of your own",
    }

    type: str = "own"
    rank_microbatch_size: PositiveInt | None = None
    """Tokens that a device computes at once; by default the batch / trainer.elastic_shards. The batch is made a
    multiple of it."""

    def known_sizes(self) -> tuple[str, ...] | None:
        """Returns the names of all sizes; None: `configure_model` alone knows them."""
        return None

    @abstractmethod
    def configure_model(
        self, *, size_spec: str, sequence_length: int, tokenizer: Any = None, device_type: str = "cpu"
    ) -> DecoderConfig:
        """Returns the model of a size.

        Args:
            size_spec: the size.
            sequence_length: tokens in a row.
            tokenizer: that of the ladder. The vocabulary is no setting of a model here: it is given when one is built.
            device_type: that of the ladder.

        Raises:
            UserError: for a size that does not exist.
        """

    def configure_rank_microbatch_size(self, *, size_spec: str, sequence_length: int, device_type: str) -> int:
        """Tokens that a device computes at once where the hardware decides, as `compat: olmo` has it.

        Raises:
            UserError: where nothing is known about the device.
        """
        return self.rank_microbatch_size or olmo_microbatch_size(size_spec, sequence_length, device_type)

    def configure_minimal_device_mesh_spec(
        self, *, size_spec: str, sequence_length: int = 8192, device_type: str = "cpu"
    ) -> DeviceMeshSpec:
        """The devices that OLMo-core needs at least, whatever they are; here one is enough where its memory is."""
        del sequence_length, device_type
        return DeviceMeshSpec(olmo_minimal_devices(size_spec), None)

    def check(self, size_spec: str) -> None:
        """Raises `UserError` for a size that does not exist, with a suggestion."""
        known = self.known_sizes()
        if known is not None and size_spec not in known:
            near = difflib.get_close_matches(size_spec, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
            raise UserError(f"there is no size {size_spec!r}; {hint}")


class TransformerModelConfigurator(ModelConfigurator):
    """Sizes of one's own: any model of the zoo, by name."""

    type: Literal["transformer"] = "transformer"
    models: dict[str, AnyModel] = {}
    """Name of a size -> its model; `seq_len` is that of the ladder."""

    @model_validator(mode="after")
    def _length_is_set_once(self) -> TransformerModelConfigurator:
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
    """Settings of the `olmo3` model over those of a size, such as `gradient_checkpointing: dots`."""

    @model_validator(mode="after")
    def _settings_exist(self) -> Olmo3ModelConfigurator:
        # Any size will do: a wrong setting is wrong for all of them.
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
        # As `olmo3` of OLMo-core has them: all heads have keys of their own, and every fourth layer sees everything.
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
    # Objects made in Python are complete; what a file says is one of the classes that are listed here.
    or_instance_of(ModelConfigurator),
]
