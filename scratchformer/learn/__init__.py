"""Exercises in hand-written gradients: derivations and code with blanks, and the command `scratchformer learn`.

`course` lists the exercises in order. `exercises/` has a file for each, which `exercise` reads. `grading` checks a
student's answer, `shortcuts` sees to it that it is derived, and `child` runs all this in another process. `progress`
remembers what was done, and `command` is the command.
"""
