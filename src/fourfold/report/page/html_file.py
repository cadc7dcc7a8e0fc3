"""A page as one HTML file: a template with its style, its scripts and its data inside, so that it needs no network.

Every page has a template and a script of its name; the style `page.css` and the script `drawing.js` serve all pages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.resources import files
from typing import Any


def html_file(page: str, data: Mapping[str, Any]) -> str:
    """The text of `page` ("page" or "reproduction") with these data."""
    folder = files("fourfold.report.page")
    html, css, shared, own = (
        folder.joinpath(name).read_text("utf-8") for name in (f"{page}.html", "page.css", "drawing.js", f"{page}.js")
    )
    text = json.dumps(data, allow_nan=False).replace("<", "\\u003c")  # no tag or comment can begin in a text
    for name, part in (("css", css), ("js", f"{shared}\n{own}"), ("data", text)):
        html = html.replace(f"/*{name}*/", part, 1)
    return html
