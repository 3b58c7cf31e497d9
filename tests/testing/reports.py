"""What the tests of this folder read of a check."""

import pytest

from scratchformer.testing import GradientError


def complaint(check, *args, **options):
    """The message of a check that fails."""
    with pytest.raises(GradientError) as caught:
        check(*args, **options)
    return str(caught.value)


def names(report):
    return [row.tensor for row in report]
