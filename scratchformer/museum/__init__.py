"""Gradients that were wrong in code that many use, re-enacted in a few lines of NumPy each.

A file is an exhibit: its text tells the story, and it has a `forward`, the `wrong` backward and the `right` one. Each
is written from the public report that `SOURCE` names; no code is copied. `exhibits` lists and checks them, `parts` has
what several of them need, and `command` is `scratchformer museum`.
"""
