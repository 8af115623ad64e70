"""Models with code of the user: a family with some parts replaced, or a configuration class in a file of the user."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, JsonValue, ValidationError, model_validator

from lm_trainer.config.document import did_you_mean
from lm_trainer.core.errors import UserError
from lm_trainer.core.result_keys import affects_results_through
from lm_trainer.core.user_code import check_file_reference, code_file, digest_of_files, import_object
from lm_trainer.models.base import DecoderConfig
from lm_trainer.models.hf_table import NoHfFormat
from lm_trainer.nn.spec import AttentionSpec, BlockSpec, DecoderSpec, MlpSpec, MoeSpec, PartFactory

if TYPE_CHECKING:
    from lm_trainer.nn.decoder import Decoder


def _name_in_file(reference: str | None) -> str | None:
    return reference and reference.rpartition(":")[2]


CodeReference = Annotated[str, AfterValidator(check_file_reference)]
"""A name in a Python file, `path/to/file.py:name`. The path is relative to the working directory."""
OptionalCode = Annotated[CodeReference | None, affects_results_through(_name_in_file)]
"""Code that may be absent. The path of its file does not affect results, because `sha256` identifies its content."""

_PARTS = ("attention", "mlp")
_OWN_KEYS = frozenset({"type", "family", "factory", *_PARTS, "sha256", "reference_checkpoint"})
"""Keys of `CustomConfig` that the family or the factory does not receive."""


class CustomConfig(DecoderConfig):
    """A model with code of your own. All further keys belong to the family, or to the factory.

    Reading this section reads the named files, to compute their digest, but does not run them: `spec` and `build` do.
    """

    # Only the factory knows its keys, and it runs when the model is built. Without a type, which decides between the
    # classes, a schema would accept any key of any model.
    model_config = ConfigDict(extra="allow", json_schema_extra={"required": ["type"]})
    __pydantic_extra__: dict[str, JsonValue]
    hf: ClassVar[NoHfFormat] = NoHfFormat("custom", "its code is your own, and is not part of transformers")
    own_code: ClassVar[bool] = True

    type: Literal["custom"] = "custom"
    """Marks a model with code of your own."""
    family: str | None = None
    """Family that the model is based on, such as `llama`. Its keys follow beside this one."""
    factory: OptionalCode = None
    """Class or function that returns the configuration of the model, as `path/to/file.py:name`: a subclass of a family
    or of `DecoderConfig`, or a function that returns an instance. It is called with the further keys of this section
    and with those that all families share. Set `family` or `factory`."""
    attention: OptionalCode = None
    """Class that replaces `lm_trainer.nn.attention.Attention` in every layer, as `path/to/file.py:Class`."""
    mlp: OptionalCode = None
    """Class that replaces `lm_trainer.nn.mlp.Mlp` in every layer, as `path/to/file.py:Class`."""
    sha256: str | None = None
    """SHA-256 of the file; of several files, of their digests in the order `factory`, `attention`, `mlp`. Unset:
    computed when the configuration is read. The record of a run contains it, and other code is refused."""

    @model_validator(mode="after")
    def _check_source(self) -> CustomConfig:
        if (self.family is None) == (self.factory is None):
            raise ValueError(
                "write family: llama (or another family) with its keys and the parts to replace, or factory: "
                "my_model.py:MyConfig"
            )
        if self.family is not None and not any(self._references):
            raise ValueError(
                f"nothing is replaced; write attention: or mlp: my_model.py:MyClass, or type: {self.family} alone"
            )
        return self

    @model_validator(mode="after")
    def _read_digest(self) -> CustomConfig:
        if self.sha256 is None:
            for key, reference in self._references.items():
                if not code_file(reference).is_file():
                    raise ValueError(f"{key}: there is no file {code_file(reference)}")
            # The section is frozen, and a plain assignment would count as setting the key.
            object.__setattr__(self, "sha256", digest_of_files(self.code_files))
        return self

    @model_validator(mode="after")
    def _check_family_keys(self) -> CustomConfig:
        # A factory has no say before the model is built, because reading a configuration must not run it.
        if self.family is not None:
            try:
                _ = self.inner
            except UserError as error:
                raise ValueError(str(error).replace("model.", "")) from None
        return self

    @property
    def _references(self) -> dict[str, str]:
        values = {"factory": self.factory, "attention": self.attention, "mlp": self.mlp}
        return {key: value for key, value in values.items() if value is not None}

    @property
    def code_files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(code_file(reference) for reference in self._references.values()))

    @cached_property
    def inner(self) -> DecoderConfig:
        """The configuration of the family, or the one that the factory makes. A factory is run for this.

        Raises:
            UserError: if there is no such code or family, its file has changed, or it refuses a key.
        """
        make = _family_class(self.family) if self.family is not None else self._import("factory", self.factory or "")
        name = self.family or self.factory
        if not callable(make):
            raise UserError(f"model.factory: {name} is not a class or a function")
        shared = {key: getattr(self, key) for key in DecoderConfig.model_fields.keys() - _OWN_KEYS}
        try:
            config = make(**shared, **self.__pydantic_extra__)
        except ValidationError as error:
            raise UserError("; ".join(_describe_problems(error, make))) from None
        except Exception as error:  # user code may raise anything
            raise UserError(f"model.factory: {name} failed: {type(error).__name__}: {error}") from error
        if not isinstance(config, DecoderConfig) or isinstance(config, CustomConfig):
            raise UserError(
                f"model.factory: {name} returned {type(config).__name__}; expected an instance of a family's "
                f"configuration or of lm_trainer.models.DecoderConfig"
            )
        if config.features_shape is not None or config.frozen_params:
            raise UserError(f"model: {name} is not a model of text alone, which is all that type: custom supports")
        return config

    @cached_property
    def _parts(self) -> Mapping[str, PartFactory]:
        parts = {}
        for key in _PARTS:
            if (reference := self._references.get(key)) is not None:
                from flax import nnx

                part = self._import(key, reference)
                if not (isinstance(part, type) and issubclass(part, nnx.Module)):
                    raise UserError(f"model.{key}: {reference} is not a class derived from flax.nnx.Module")
                parts[key] = part
        return parts

    def _import(self, key: str, reference: str) -> Any:
        """Runs a named file, if it is the one that the configuration was read with, and returns the named object."""
        missing = [str(file) for file in self.code_files if not file.is_file()]
        if missing:
            raise UserError(
                f"model.{key}: there is no file {', '.join(missing)}; start the command where it is, or restore it: "
                f"run directories have a copy in artifacts/"
            )
        if (digest := digest_of_files(self.code_files)) != self.sha256:
            raise UserError(
                f"model.{key}: {', '.join(map(str, self.code_files))} is not the code that this model was made with: "
                f"model.sha256 is {self.sha256}, and that of the code is {digest}. Restore the file (run directories "
                f"have a copy in artifacts/), or start a new run"
            )
        return import_object(f"model.{key}", reference)

    def spec(self, vocab_size: int) -> DecoderSpec:
        spec = self.inner.spec(vocab_size)
        if self.attention is not None and not any(isinstance(block.mixer, AttentionSpec) for block in spec.blocks):
            raise UserError(f"model.attention: no layer of {self.family or self.factory} has attention; remove the key")
        return replace(spec, blocks=tuple(_with_parts(block, self._parts) for block in spec.blocks))

    def module_class(self) -> type[Decoder]:
        return self.inner.module()


def _family_class(name: str) -> Callable[..., DecoderConfig]:
    from lm_trainer.models import MODEL_CONFIGS

    families = {config.model_fields["type"].default: config for config in MODEL_CONFIGS}
    if name not in families:
        raise UserError(f"model.family: there is no family {name!r}{did_you_mean(name, families)}")
    return families[name]


def _describe_problems(error: ValidationError, make: Any) -> list[str]:
    """Returns a line for each key of the section that the class `make` refuses."""
    fields = list(getattr(make, "model_fields", {}))
    lines = []
    for problem in error.errors():
        key = ".".join(map(str, problem["loc"]))
        reason = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            reason = f"unknown key{did_you_mean(key, fields)}"
        lines.append(f"model.{key}: {reason}" if key else f"model: {reason}")
    return lines


def _with_parts(block: BlockSpec, parts: Mapping[str, PartFactory]) -> BlockSpec:
    """Returns a layer whose sublayers are computed by the given classes."""
    if "mlp" in parts and isinstance(block.mlp, MoeSpec):
        raise UserError("model.mlp: a layer with experts has no MLP to replace; remove it, or choose a family without")
    mixer, mlp = block.mixer, block.mlp
    # Layers with another mixer keep it.
    if isinstance(mixer, AttentionSpec):
        mixer = replace(mixer, module=parts.get("attention", mixer.module))
    if isinstance(mlp, MlpSpec):
        mlp = replace(mlp, module=parts.get("mlp", mlp.module))
    return replace(block, mixer=mixer, mlp=mlp)
