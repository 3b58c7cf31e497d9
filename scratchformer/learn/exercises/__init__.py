"""One file for each exercise; `scratchformer.learn.exercise` describes its form."""
