"""The table of Levanter's keys, and the treatment of each in lm_trainer."""

import json
from pathlib import Path
from typing import Any


def levanter_keys() -> str:
    """A table for each section of Levanter's reference: key, Levanter's default, and the treatment in lm_trainer."""
    import yaml

    sections = yaml.safe_load((Path(__file__).with_name("levanter_keys.yaml")).read_text(encoding="utf-8"))
    return "\n".join(_levanter_section(**section) for section in sections)


def _levanter_section(section: str, keys: dict[str, Any], type: str | None = None) -> str:
    title = f"`{section}`" + (f", `type: {type}`" if type else "")
    rows = (
        f"| `{key}` | `{json.dumps(there)}` | {levanter_key(section, type, key, there)} |"
        for key, there in keys.items()
    )
    return "\n".join([f"## {title}\n", "| key | default in Levanter | in lm_trainer |", "|---|---|---|", *rows, ""])


def levanter_key(section: str, kind: str | None, key: str, there: Any) -> str:
    """Returns the treatment of one Levanter key: same, another default, read with a note, or refused.

    Args:
        section: the dotted key of the block.
        kind: the block's `type`, if it has one.
        key: the key in the block.
        there: Levanter's default.

    Raises:
        LookupError: if the section cannot hold a block.
    """
    model = _block(section, kind)
    if key in model.model_fields:
        return _compared_default(model, key, there)
    if key in model.renamed_keys:
        return f"read with a note, as `{model.renamed_keys[key]}`"
    if key in model.respelt_keys:
        return "read in another spelling"
    if key in model.ignored_keys:
        return f"read with a note: {model.ignored_keys[key].reason}"
    return f"refused: {model.refused_keys.get(key, 'there is no such key')}"


def _block(section: str, kind: str | None) -> Any:
    from lm_trainer.config.config_node import ConfigNode
    from lm_trainer.run.config.run_config import RunConfig

    place = ConfigNode.root(RunConfig)
    for name in section.split("."):
        place = place.child(None, name)
    model = place.model_for({"type": kind} if kind else None)
    if model is None:
        raise LookupError(f"{section}: no block of type {kind}")
    return model


def _compared_default(model: Any, key: str, there: Any) -> str:
    from pydantic import ValidationError

    default = model.model_fields[key].get_default(call_default_factory=True)
    try:
        same = getattr(model.model_validate({key: there}), key) == default
    except ValidationError:
        same = False
    shown = json.dumps(model.model_construct(**{key: default}).model_dump(mode="json", include={key})[key])
    return "same" if same else f"default differs (here: `{shown}`)"
