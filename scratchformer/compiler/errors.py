"""The error of a derivation that has no loops."""


class CompileError(ValueError):
    """A derivation that cannot be made into loops."""
