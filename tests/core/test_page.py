"""Pages of HTML escape what comes from outside."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jinja2
import pytest

from lm_trainer.core.html_page import render_page

HOSTILE = "</script><script>alert(1)</script><!-- & \"'"


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Fills a template in."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "templates", raising=False)

    def fill(template: str, **values: Any) -> str:
        (tmp_path / "templates" / "page.html").write_text(template)
        return render_page("templates", "page.html", **values)

    return fill


def test_text_is_escaped_unless_the_template_calls_it_safe(page: Any) -> None:
    written = page("{{ text }}{{ svg | safe }}\n", text=HOSTILE, svg="<svg></svg>")
    assert "<script" not in written
    assert written.startswith("&lt;/script&gt;")
    assert written.endswith("<svg></svg>\n")


def test_json_in_a_script_cannot_end_it_and_keeps_order_and_letters(page: Any) -> None:
    value = {"z": [1, 2.5, None], "a": HOSTILE, "é": "ü"}
    written = page("<script>{{ value | tojson }}</script>", value=value)
    content = written.removeprefix("<script>").removesuffix("</script>")
    assert "<" not in content
    assert "é" in content
    assert list(json.loads(content).items()) == list(value.items())


def test_what_is_missing_or_no_json_is_an_error(page: Any) -> None:
    with pytest.raises(jinja2.UndefinedError):
        page("{{ text }}")
    with pytest.raises(ValueError, match="not JSON compliant"):
        page("{{ value | tojson }}", value=float("nan"))
