"""The pictures of the site, as SVG text, and the directives that put them on a page.

.. shapes:: attention            the shapes of an operation
.. steps:: attention             the error of a numerical gradient over the step, and what it shows
.. trace:: SelfAttention         forward and backward of a layer or model
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from changes import model_changes
from layer_pictures import layer_picture
from one_step import one_step_page
from operation_pictures import operation_picture
from step_curves import step_curve

__all__ = ["layer_picture", "model_changes", "one_step_page", "operation_picture", "step_curve"]


def setup(app: Any) -> dict[str, bool]:
    """The extension of Sphinx."""
    from docutils import nodes
    from docutils.parsers.rst import Directive

    def directive(draw: Callable[[str], tuple[str, str]]) -> type[Directive]:
        class Picture(Directive):
            required_arguments = 1

            def run(self) -> list[nodes.Node]:
                svg, words = draw(self.arguments[0])
                figure = nodes.raw("", f'<div class="picture">{svg}</div>', format="html")
                return [figure, nodes.paragraph(words, words)] if words else [figure]

        return Picture

    app.add_directive("shapes", directive(lambda name: (operation_picture(name), "")))
    app.add_directive("trace", directive(lambda name: (layer_picture(name), "")))
    app.add_directive("steps", directive(step_curve))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
