"""Styles and scripts on the pages that need them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx


def load_files(app: Sphinx, mark: str, *files: str) -> None:
    """Load static files on the pages whose HTML contains the mark."""

    def add(app: Sphinx, page: str, template: str, context: dict[str, Any], doctree: nodes.document | None) -> None:
        for file in files if mark in context.get("body", "") else ():
            if file.endswith(".css"):
                app.add_css_file(file)
            else:
                app.add_js_file(file, loading_method="defer")

    app.connect("html-page-context", add)
