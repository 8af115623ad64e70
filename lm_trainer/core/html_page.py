"""Renders HTML pages from templates, which are stored next to the code that uses them."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def render_page(package: str, template: str, **values: Any) -> str:
    """Renders a Jinja template. Values are escaped unless the template marks them as `safe`.

    Args:
        package: the package that contains the template.
        template: the file name of the template.
        values: variables of the template. `{{ value | tojson }}` writes a value as JSON, safe inside a `script`
            element.
    """
    content = (resources.files(package) / template).read_text("utf-8")
    return _jinja_environment().from_string(content).render(values)


@functools.cache
def _jinja_environment() -> Environment:
    # Imported here, because only a few commands write a page.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_function"] = json.dumps
    # Keys keep their order. NaN and infinities are refused, because browsers cannot parse them.
    options = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    environment.policies["json.dumps_kwargs"] = options
    return environment
