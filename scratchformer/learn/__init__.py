"""Exercises in hand-written gradients: derivations and code with blanks, and the command `scratchformer learn`.

`course` lists the exercises in order. `exercises/` has a file for each, which `exercise` reads. `grading` checks a
student's answer, which `child` runs in another process and `shortcuts` watches, `progress` remembers what was done, and `command` is the command.
"""
