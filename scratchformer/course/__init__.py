"""Exercises in hand-written gradients: derivations and code with blanks, and the command `scratchformer learn`.

`course` lists the exercises in order. `exercises/` has a file for each, which `exercise` reads. `grading` checks a
student's answer, and `child` does so in a separate process. `record` remembers what was done; `command` is the command.
"""
