"""The JSON schema of a configuration, for editors that check and complete YAML."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import PydanticUndefined

from lm_trainer.core.config import Config


def json_schema(root: type[Config]) -> JsonSchemaValue:
    """Builds a draft 2020-12 schema that accepts blocks without `type`, as the loader does.

    The schema does not describe `!include`. Configure the tag in the editor (`yaml.customTags: ["!include mapping"]`).
    """
    schema = root.model_json_schema()
    defaults = {model.__name__: model for model in _collect_models(root, set())}
    _write_defaults(schema, root)
    _write_foreign_keys(schema, root)
    for name, definition in schema.get("$defs", {}).items():
        if name in defaults:
            _write_defaults(definition, defaults[name])
            _write_foreign_keys(definition, defaults[name])
    _relax_rules(schema)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _write_defaults(schema: JsonSchemaValue, model: type[BaseModel]) -> None:
    """Replaces pydantic's defaults by their YAML form, which may differ if there is a serializer."""
    for name, info in model.model_fields.items():
        default = info.get_default(call_default_factory=False)
        shown = schema.get("properties", {}).get(name)
        if shown is None or default is PydanticUndefined or "default" not in shown:
            continue
        written: Any = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        shown["default"] = TypeAdapter(written).dump_python(default, mode="json")


def _write_foreign_keys(schema: JsonSchemaValue, model: type[BaseModel]) -> None:
    """Adds the foreign keys that the loader accepts, marked as deprecated."""
    if not issubclass(model, Config):
        return
    keys = schema.setdefault("properties", {})
    for key, target in model.renamed_keys.items():
        keys[key] = {"deprecated": True, "description": f"The same as {target}."}
    for key, ignored in model.ignored_keys.items():
        values = {} if ignored.values is None else {"enum": [*ignored.values, None]}
        keys[key] = {"deprecated": True, "description": f"No effect: {ignored.reason}.", **values}


def _collect_models(annotation: object, visited: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """Returns all configuration classes that are reachable from an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel) and annotation not in visited:
        visited.add(annotation)
        for info in annotation.model_fields.values():
            _collect_models(info.annotation, visited)
    for argument in get_args(annotation):
        _collect_models(argument, visited)
    return visited


def _relax_rules(node: object) -> None:
    """Relaxes, in place, rules that are too strict for hand-written files."""
    if isinstance(node, list):
        for item in node:
            _relax_rules(item)
    if not isinstance(node, dict):
        return
    if "discriminator" in node and "oneOf" in node:
        # A block without `type` matches several members, which `oneOf` forbids.
        node["anyOf"] = node.pop("oneOf")
        del node["discriminator"]
    for item in list(node.values()):
        _relax_rules(item)
