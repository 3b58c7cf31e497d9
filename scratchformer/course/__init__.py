"""Exercises in hand-written gradients: derivations and code with blanks, and the command `scratchformer learn`.

`course` lists the exercises in order. `exercises/` has a file for each, which `exercise` reads. `grading` checks a
student's answer, `shortcuts` refuses one that avoids the derivation, and `child` runs all this in a separate process.
`progress` remembers what was done, and `command` is the command.
"""
