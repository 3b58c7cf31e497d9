"""Pages in HTML, for the site and for `scratchformer page`: equations with their errors, live numbers, curves."""
