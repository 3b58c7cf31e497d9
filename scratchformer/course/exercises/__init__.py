"""One file for each exercise; `scratchformer.course.exercise` describes its form."""
