/* What every page needs for the keyboard and for screen readers. */
"use strict";

(function () {
  const SCROLLS = "pre, .math, .table-wrapper, .live-equation, .live-panels, .living-equations, .given, .preview";

  /** What can be scrolled sideways is reached by the Tab key, unless there is a number or a link to reach in it. */
  function reach() {
    for (const element of document.querySelectorAll(SCROLLS)) {
      if (element.scrollWidth > element.clientWidth && !element.querySelector("a, button, input, [tabindex]")) element.tabIndex = 0;
      else element.removeAttribute("tabindex");
    }
  }

  function name(selector, text) {
    const element = document.querySelector(selector);
    if (element) element.setAttribute("aria-label", text);
  }

  name(".sidebar-drawer", "All pages");
  name(".toc-drawer", "On this page");
  new ResizeObserver(reach).observe(document.body); // also when a part is opened or made
})();
