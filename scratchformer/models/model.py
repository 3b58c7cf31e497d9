"""What all models have in common: they are made from sizes and options, and refuse others by name."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

from ..nn import Layer


class Model(Layer):
    """A layer that is made from sizes and options. If it takes `**body`, they include those of its `body_class`.

    A keyword that it does not take raises TypeError, which lists those that it takes. `fixed`: options of the body that
    the model sets itself, each with words for the message; giving one raises ValueError.
    """

    body_class: ClassVar[type[Layer] | None] = None
    fixed: ClassVar[Mapping[str, str]] = {}

    def __new__(cls, *_sizes: Any, **options: Any) -> Self:
        known = cls.option_names()
        for name in options if known else ():
            if name not in known and name in cls.fixed:
                raise ValueError(f"{name}: a {cls.__name__} {cls.fixed[name]}, and takes no such option")
            if name not in known:
                raise TypeError(f"{cls.__name__}: no option {name!r}; expected one of {', '.join(known)}")
        return super().__new__(cls)

    @classmethod
    def option_names(cls) -> list[str]:
        """The arguments that may be given by name, sizes included; none if they cannot be known."""
        names: list[str] = []
        for part in cls.__mro__[: cls.__mro__.index(Model)]:
            if "__init__" in vars(part):
                own = list(signature(part.__init__).parameters.values())[1:]  # without self
                names += [p.name for p in own if p.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)]
                if all(p.kind is not Parameter.VAR_KEYWORD for p in own):
                    break  # what it does not take, nothing does
        else:
            if cls.body_class is None:
                return []
            body = signature(cls.body_class.__init__).parameters.values()
            names += [p.name for p in body if p.default is not Parameter.empty and p.name not in cls.fixed]
        return list(dict.fromkeys(names))
