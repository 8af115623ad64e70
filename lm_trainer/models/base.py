"""What every decoder family's configuration shares."""

from abc import abstractmethod
from typing import ClassVar, Literal

from flax import nnx
from pydantic import Field

from lm_trainer.core.config import Config
from lm_trainer.core.errors import UserError
from lm_trainer.models.hf_table import HfFamily, NoHfFormat
from lm_trainer.nn.decoder import Decoder
from lm_trainer.nn.spec import Backend, DecoderSpec, Internal, Remat, ScoreSpec

SCAN_ABOVE = 12
"""Unless told otherwise, more layers than this run as a loop: unrolled, compile time grows with their square."""


class CheckpointPolicy(Config):
    """What the backward pass keeps of each block instead of computing it again; what enters a block is always kept."""

    disable: bool = False
    """Keeps everything, as `gradient_checkpointing: false` does."""
    save_block_internals: bool | tuple[Internal, ...] = False
    """`true`: everything; `false`: nothing; or a list of what is kept: `attention` (what attention returns) and `mlp`
    (what the MLP returns)."""

    @property
    def remat(self) -> Remat:
        """As a policy of the trunk."""
        if self.disable or self.save_block_internals is True:
            return "none"
        return self.save_block_internals or "full"


class DecoderConfig(Config):
    """Settings of a decoder-only model that do not change its parameters."""

    hf: ClassVar[HfFamily | NoHfFormat]
    """How the family is written in Hugging Face's format."""

    type: str
    """The family."""
    seq_len: int = Field(default=1024, gt=0)
    """The longest sequence, in tokens."""
    num_layers: int = Field(default=12, gt=0)
    """How many blocks the model has."""
    reference_checkpoint: str | None = None
    """What `initialize_from_hf: true` starts from: a directory, or a name on the hub. Unset: the family's best known
    checkpoint, if it has one."""
    gradient_checkpointing: (
        bool | Literal["full", "recompute", "save_all", "dots", "dots_no_batch"] | CheckpointPolicy
    ) = True
    """What the backward pass computes again instead of keeping it: `true`, `full` or `recompute`: everything inside a
    block (least memory, about a third more computation); `dots`: all but the results of matrix products;
    `dots_no_batch`: all but the results of matrix products with weights, so attention scores are not kept; `false` or
    `save_all`: nothing; or a block that says what is kept."""
    scan_layers: bool | None = None
    """Whether the layers run as one compiled loop (compiles fast, runs a few percent slower) or unrolled. Unset: as
    a loop when there are more than 12. Both have the same parameters, and numbers equal up to rounding."""
    cross_entropy_block_size: int | None = Field(default=None, gt=0)
    """How many tokens are processed together in the output layer. Unset: all, so that batch x sequence x vocabulary
    logits are held at once. At 512 and above blocks are as fast and need less memory."""
    attn_backend: Backend | None = None
    """What computes attention: `xla`; `cudnn` (NVIDIA GPUs under bfloat16 or float16; refused where it cannot do what
    the model asks for); `auto`: cudnn where it can, else xla, and the log says which and why. Unset: xla."""
    flash_attention_block_size: int | None = Field(default=None, gt=0)
    """How many queries attention processes together; their scores are computed again in the backward pass, so that
    no sequence x sequence scores are kept. Unset: all, kept. The numbers are the same."""
    upcast_attn: bool = False
    """Computes attention scores in float32 under mixed precision; the softmax always is float32."""

    @abstractmethod
    def spec(self, vocab_size: int) -> DecoderSpec:
        """The model as data."""

    def build(self, vocab_size: int, *, rngs: nnx.Rngs) -> Decoder:
        """The model with fresh parameters; call it under `jax.jit` or `nnx.eval_shape`."""
        return Decoder(self.spec(vocab_size), rngs=rngs)

    @classmethod
    def hf_family(cls) -> HfFamily:
        """`hf` of a family that has a format.

        Raises:
            UserError: for one that has none, with the reason.
        """
        if isinstance(cls.hf, NoHfFormat):
            name = cls.model_fields["type"].default
            raise UserError(f"a {name} model has no Hugging Face format: {cls.hf.reason}")
        return cls.hf

    @property
    def remat(self) -> Remat:
        """`gradient_checkpointing` as a policy of the trunk."""
        value = self.gradient_checkpointing
        if isinstance(value, CheckpointPolicy):
            return value.remat
        names: dict[bool | str, Remat] = {True: "full", "recompute": "full", False: "none", "save_all": "none"}
        return names.get(value) or value  # pyright: ignore[reportReturnType]

    @property
    def scan(self) -> bool:
        """`scan_layers` with its default resolved."""
        return self.num_layers > SCAN_ABOVE if self.scan_layers is None else self.scan_layers

    def scores(self, scale: float | None = None, *, dropout: float = 0.0) -> ScoreSpec:
        """What these settings say about the scores of attention; the arguments as in `ScoreSpec`."""
        return ScoreSpec(
            scale=scale,
            dropout=dropout,
            upcast=self.upcast_attn,
            backend=self.attn_backend or "xla",
            block_size=self.flash_attention_block_size,
        )
