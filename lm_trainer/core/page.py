"""Pages of HTML from templates that are kept beside the code that fills them."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment


def write_page(package: str, template: str, **values: Any) -> str:
    """Fills a template of Jinja in, which escapes every value but what it marks as `safe`.

    Args:
        package: the package that the template is in.
        template: the name of its file.
        values: what it names. As `{{ value | tojson }}`, one is JSON that may be in an element `script`.
    """
    content = (resources.files(package) / template).read_text("utf-8")
    return _environment().from_string(content).render(values)


@functools.cache
def _environment() -> Environment:
    # Here, since few commands write a page.
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    environment.policies["json.dumps_function"] = json.dumps
    # Keys in their order; numbers that are no JSON are refused, since no browser would read the page.
    options = {"ensure_ascii": False, "separators": (",", ":"), "allow_nan": False}
    environment.policies["json.dumps_kwargs"] = options
    return environment
