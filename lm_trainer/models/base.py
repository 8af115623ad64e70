"""Settings that all decoder families share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lm_trainer.core.config import Config, LocalPathOrHubName
from lm_trainer.core.errors import UserError
from lm_trainer.models.hf_table import HfFamily, NoHfFormat
from lm_trainer.nn.spec import Activation, Backend, BlockInternal, DecoderSpec, OffloadPolicy, Remat, ScoreSpec
from lm_trainer.profile.flops import flops_per_token, parameter_count

if TYPE_CHECKING:
    import jax
    from flax import nnx

    from lm_trainer.nn.decoder import Decoder

SCAN_ABOVE = 12
"""By default, models with more layers than this run them as a loop, because the compile time of unrolled layers grows
with the square of their number."""


_ACTIVATION_ALIASES = {"swish": "silu", "gelu_fast": "gelu_new"}
_BACKEND_ALIASES = {"vanilla": "xla", "jax_flash": "xla", "nvte": "cudnn", "default": "auto"}


def _alias_validator(names: Mapping[str, str]) -> BeforeValidator:
    """Replaces alternative names of a choice with the name used here."""
    return BeforeValidator(lambda value: names.get(value, value) if isinstance(value, str) else value)


ActivationName = Annotated[Activation, _alias_validator(_ACTIVATION_ALIASES)]
"""An activation. `swish` is read as `silu`, and `gelu_fast` as `gelu_new`."""
BackendName = Annotated[Backend, _alias_validator(_BACKEND_ALIASES)]
"""An attention backend, by its name here or by Levanter's."""


class CheckpointPolicy(Config):
    """Values in a block to save for the backward pass, on the device or the host. All others are recomputed."""

    refused_keys: ClassVar[Mapping[str, str]] = {
        "save_inputs": "the parameters of a block are always there, and what enters it is `save_carries`; remove it",
        "prevent_cse": "it follows from `scan_layers`; remove it",
        "simple": "a block of its own is what `gradient_checkpointing: true` recomputes; remove it",
    }

    disable: bool = False
    """Saves everything, as `gradient_checkpointing: false` does."""
    save_block_internals: bool | tuple[BlockInternal, ...] = False
    """`true`: save all values; `false`: save none; or a list of the values to save: `attention` (output of attention)
    and `mlp` (output of the MLP)."""
    save_carries: Literal[True, "offload"] = True
    """Memory that holds the input of each block. `true`: device memory; `offload`: host memory, which takes the time of
    two copies."""
    offload_block_internals: tuple[BlockInternal, ...] = ()
    """Further values to save, in host memory. Names are as in `save_block_internals`; `true`: all of them."""
    nested: bool | Annotated[int, Field(gt=1)] = False
    """Groups the layers and saves only the input of each group. The inputs of the layers in a group are recomputed,
    which takes one more forward pass, and memory for about 2 sqrt(layers) block inputs. A number sets the number of
    groups; `true` means about sqrt(layers). The layers must run as a loop (`scan_layers`)."""

    @field_validator("offload_block_internals", mode="before")
    @classmethod
    def _expand_bool_offload(cls, value: object) -> object:
        return (get_args(BlockInternal) if value else ()) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_each_value_kept_once(self) -> CheckpointPolicy:
        saves_all = self.disable or self.save_block_internals is True
        saved = () if isinstance(self.save_block_internals, bool) else self.save_block_internals
        if saves_all and (self.offload_block_internals or self.nested or self.save_carries == "offload"):
            raise ValueError(
                "with disable: true or save_block_internals: true everything is kept on the device; remove "
                "save_carries, offload_block_internals and nested, or that"
            )
        if duplicates := sorted({*saved} & {*self.offload_block_internals}):
            raise ValueError(
                f"{', '.join(duplicates)} cannot be kept both on the device (save_block_internals) and on its host "
                f"(offload_block_internals); name it once"
            )
        return self

    @property
    def remat(self) -> Remat:
        """The rematerialisation policy for `DecoderSpec`."""
        if self.disable or self.save_block_internals is True:
            return "none"
        if self.save_carries == "offload":
            return OffloadPolicy(("input", *self.offload_block_internals), self.save_block_internals or ())
        if self.offload_block_internals:
            return OffloadPolicy(self.offload_block_internals, self.save_block_internals or ())
        return self.save_block_internals or "full"


_AXES = {
    "Pos": "seq_len",
    "KeyPos": "seq_len",
    "Embed": "hidden_dim",
    "Heads": "num_heads",
    "Layers": "num_layers",
    "Mlp": "spec(vocab_size).blocks[0].mlp.hidden_dim",
    "HeadSize": "spec(vocab_size).blocks[0].attention.head_dim",
}
"""Maps Levanter's axis properties to the setting or expression that gives the size here."""

_NAMED = {"offload": CheckpointPolicy(save_carries="offload"), "nested": CheckpointPolicy(nested=True)}


class DecoderConfig(Config):
    """Settings of a decoder-only model that do not change its parameters."""

    hf: ClassVar[HfFamily | NoHfFormat]
    """The family's Hugging Face format."""
    frozen_params: ClassVar[frozenset[str]] = frozenset()
    """Dotted names of parameters that are never trained."""
    newer_fields: ClassVar[frozenset[str]] = frozenset({"attn_max_documents"})
    """Settings that the family got after its first release. At their defaults they are left out of the hash of a
    configuration, which stays the same."""
    implied_settings: ClassVar[Mapping[str, Any]] = {}
    """Values of newer settings with which runs were computed before there was a choice, where they differ from the
    defaults."""
    own_code: ClassVar[bool] = False
    """True if the configuration names code of the user, which building the model runs."""

    absent: ClassVar[Mapping[str, str]] = {
        **{name: f"axes have no objects; use {use}" for name, use in _AXES.items()},
        "model_type": "use the class attribute `module`",
        "to_hf_config": "use config_to_hf(config, vocab_size=..., eos_id=..., bos_id=...) of lm_trainer.models.hf",
        "from_hf_config": "use config_from_hf(config_json) of lm_trainer.models.hf",
        "hf_checkpoint_converter": "use `lmt export-hf` and `lmt import-hf`",
        "attention_config": "use spec(vocab_size).blocks[0].attention",
        "mk_LayerNorm": "use spec(vocab_size).final_norm",
        "norm_config": "use spec(vocab_size).final_norm",
        "actual_head_size": "use spec(vocab_size).blocks[0].attention.head_dim",
    }

    type: str
    """Name of the model family."""
    seq_len: int = Field(default=1024, gt=0)
    """Maximum sequence length in tokens."""
    num_layers: int = Field(default=12, gt=0)
    """Number of blocks."""
    reference_checkpoint: LocalPathOrHubName | None = None
    """Source of the weights for `initialize_from_hf: true`: a directory, or the name of a model on the hub. Unset: the
    family's best-known checkpoint, if there is one."""
    gradient_checkpointing: (
        bool | Literal["full", "recompute", "save_all", "dots", "dots_no_batch", "offload", "nested"] | CheckpointPolicy
    ) = True
    """Values that are recomputed in the backward pass instead of being saved: `true`, `full` or `recompute`: everything
    inside a block (least memory, about a third more computation); `dots`: everything except the results of matrix
    products; `dots_no_batch`: everything except the results of matrix products with weights, so attention scores are
    not saved; `false` or `save_all`: none, or with `gather: layer` elementwise values; `offload`: everything, with the
    inputs of blocks saved in host memory; `nested`: everything, and most of the inputs of blocks as well; or a mapping
    of the values to save."""
    scan_layers: bool | None = None
    """Runs the layers as one compiled loop, which compiles fast and runs a few percent slower; false: unrolled. Unset:
    as a loop if the model has more than 12 layers, or if `gradient_checkpointing` groups them. Both have the same
    parameters, and their results are equal up to rounding."""
    cross_entropy_block_size: int | None = Field(default=None, gt=0)
    """Number of tokens per block of the output layer. Unset: all tokens in one block, so that all batch x sequence x
    vocabulary logits are in memory at once. Blocks of 512 or more tokens are as fast, and need less memory."""
    attn_backend: BackendName | None = None
    """Implementation of attention: `xla`; `cudnn` (NVIDIA GPUs under bfloat16 or float16); `splash` (TPUs, sequences of
    a multiple of 128); `ring` (devices that share a row by `trainer.context_axis_size` pass blocks of keys around; the
    other backends gather all keys). A backend is refused if it cannot run the model. `auto`: the platform's own backend
    if it can run the model, otherwise xla; ring if gathered keys would take more than 8 GiB on a device. The log shows
    the chosen backend and the reason. If a backend cannot decode with a cache, generation uses xla. Unset: auto."""
    flash_attention_block_size: int | None = Field(default=None, gt=0)
    """Number of queries that attention processes together. Their scores are recomputed in the backward pass, so no
    sequence x sequence scores are saved. Unset: all queries together, with saved scores. The results are the same.
    splash never saves scores; there this is the block size, a multiple of 128 that divides the sequence (unset: the
    largest such number up to 512, or up to 1024 or 2048 in long rows). The same applies to ring, where the block size
    divides half of a device's positions."""
    attn_max_documents: int | None = Field(default=None, gt=0)
    """Maximum number of documents in a row, which tells cuDNN's kernels the mask by the lengths of documents instead of
    an array of sequence x sequence values; other backends do not need it. 1: rows of one document, which may end in
    padding. Blackwell GPUs need it to repeat their bits. A row with more documents, or with the parts of a document
    apart, makes the loss NaN. Unset: any number."""
    upcast_attn: bool = False
    """Computes attention scores in float32 under mixed precision; the softmax is always float32."""

    @abstractmethod
    def spec(self, vocab_size: int) -> DecoderSpec:
        """Returns the description of the model as data."""

    @classmethod
    def module(cls) -> type[Decoder]:
        """Returns the class that is built from the spec. A family with a different architecture returns a subclass."""
        from lm_trainer.nn.decoder import Decoder

        return Decoder

    def module_class(self) -> type[Decoder]:
        """Returns the class that `build` makes an instance of."""
        return self.module()

    @property
    def code_files(self) -> tuple[Path, ...]:
        """Files with code of the user that building the model runs."""
        return ()

    def build(self, vocab_size: int, *, rngs: nnx.Rngs | None = None, key: jax.Array | None = None) -> Decoder:
        """Builds the model with newly initialised parameters. Call this method under `jax.jit` or `nnx.eval_shape`.

        Args:
            vocab_size: number of rows of the token embedding.
            rngs: random streams for the initial weights.
            key: shorthand for `rngs=nnx.Rngs(key)`.

        Raises:
            ValueError: unless exactly one of `rngs` and `key` is given.
        """
        from flax import nnx

        if (rngs is None) == (key is None):
            raise ValueError("give either rngs or key")
        return self.module_class()(self.spec(vocab_size), rngs=rngs or nnx.Rngs(key))

    def flops_per_token(self, vocab_size: int, context_length: int | None = None) -> int:
        """Computes the forward-pass FLOPs per token in sequences of `context_length` tokens (default: `seq_len`)."""
        return flops_per_token(self.spec(vocab_size), context_length or self.seq_len).forward

    def total_trainable_params(self, vocab_size: int) -> int:
        """Counts the parameters. A head that is tied to the token embedding counts once."""
        return parameter_count(self.spec(vocab_size))

    def preprocessor_to_hf(self) -> dict[str, Any] | None:
        """Returns the content of preprocessor_config.json, which describes feature extraction; None for text models."""
        return None

    @property
    def features_shape(self) -> tuple[int, int] | None:
        """Number of frames per row and of features per frame; None for text-only models."""
        return None

    def with_generation(self, raw: Mapping[str, Any]) -> Self:
        """Returns these settings, updated with those in a generation_config.json. Most families ignore that file."""
        del raw
        return self

    def generation_to_hf(self, plain: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the content of generation_config.json, given the content for a text model."""
        return plain

    def describe_difference_from_hf(self) -> str | None:
        """Describes the sequences for which transformers computes a different result; None if there are none."""
        return None

    @classmethod
    def hf_family(cls) -> HfFamily:
        """Returns `hf` if the family has a format.

        Raises:
            UserError: if the family has no format, with the reason.
        """
        if isinstance(cls.hf, NoHfFormat):
            name = cls.model_fields["type"].default
            raise UserError(f"a {name} model has no Hugging Face format: {cls.hf.reason}")
        return cls.hf

    def file_table(self) -> HfFamily:
        """Returns the table with which files of this model are read and written.

        Raises:
            UserError: as for `hf_family`.
        """
        return self.hf_family()

    def fit_to_files(self, names: Collection[str]) -> Self:
        """Returns these settings, read from config.json, without parts whose tensors files with these names lack."""
        del names
        return self

    @model_validator(mode="after")
    def _check_groups_need_loop(self) -> Self:
        if self._policy is not None and self._policy.nested and not self.scan:
            raise ValueError("gradient_checkpointing: nested layers must run as a loop; write scan_layers: true")
        return self

    @property
    def _policy(self) -> CheckpointPolicy | None:
        value = self.gradient_checkpointing
        return _NAMED.get(value) if isinstance(value, str) else None if isinstance(value, bool) else value

    @property
    def remat(self) -> Remat:
        """`gradient_checkpointing` as a rematerialisation policy for `DecoderSpec`."""
        if self._policy is not None:
            return self._policy.remat
        value = self.gradient_checkpointing
        # `dots` and `dots_no_batch` have the same names in the spec.
        names: dict[bool | str, Remat] = {True: "full", "recompute": "full", False: "none", "save_all": "none"}
        return names.get(value) or value  # pyright: ignore[reportArgumentType, reportCallIssue, reportReturnType]

    @property
    def remat_groups(self) -> int:
        """Number of layer groups for `DecoderSpec`; 0: no groups."""
        nested = False if self._policy is None else self._policy.nested
        # With sqrt(layers) groups, the fewest arrays are saved: the input of each group, and of each layer of one group
        # (Chen et al. 2016, arXiv 1604.06174).
        return round(math.sqrt(self.num_layers)) if nested is True else int(nested)

    @property
    def scan(self) -> bool:
        """Value of `scan_layers`, or its default if it is unset."""
        if self.scan_layers is not None:
            return self.scan_layers
        return self.num_layers > SCAN_ABOVE or (self._policy is not None and bool(self._policy.nested))

    def score_spec(self, scale: float | None = None, *, dropout: float = 0.0) -> ScoreSpec:
        """Returns the `ScoreSpec` of these settings, with the given `scale` and `dropout`."""
        return ScoreSpec(
            scale=scale,
            dropout=dropout,
            upcast=self.upcast_attn,
            max_documents=self.attn_max_documents,
            backend=self.attn_backend or "auto",
            block_size=self.flash_attention_block_size,
        )
