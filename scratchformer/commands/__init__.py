"""The command `scratchformer` and its parts."""
