"""The base of all models, which stores their arguments and rejects unknown ones by name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from inspect import Parameter, signature
from typing import Any, ClassVar, Self

from ..nn import Layer, Param
from ..nn.layer import named_parts, plain
from ..shell.text import with_article

NAMED = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


class Model(Layer):
    """A layer that records its arguments, so that it can be created again: `type(model)(**model.config)`.

    config: the arguments by name, including defaults, without the key. `nn.add_lora` adds its own as "lora", which is
    no argument: `training.load_model` creates such a model again.

    A model passes its `**options` on to its `body_class`. A keyword that neither of them takes raises TypeError, which
    lists the valid ones. `fixed`: options that the model sets itself, each with its reason, for the message; passing
    one raises ValueError.
    """

    body_class: ClassVar[Callable | None] = None
    fixed: ClassVar[Mapping[str, str]] = {}
    config: dict[str, Any]

    def __new__(cls, *sizes: Any, **options: Any) -> Self:
        known, anything = cls.options(options)
        for name in options if not anything else ():
            if name not in known and name in cls.fixed:
                raise ValueError(f"{name}: {with_article(cls)} {cls.fixed[name]}, and takes no such option")
            if name not in known:
                raise TypeError(f"{cls.__name__}: no option {name!r}; expected one of {', '.join(known)}")
        places = [name for name, p in known.items() if p.kind is Parameter.POSITIONAL_OR_KEYWORD]
        any_number = any(p.kind is Parameter.VAR_POSITIONAL for p in signature(cls.__init__).parameters.values())
        if len(sizes) > len(places) and any_number:
            raise TypeError(f"{cls.__name__}: argument {len(places) + 1} has no name, by which `config` could keep it")
        model = super().__new__(cls)
        defaults = {name: p.default for name, p in named(cls.__init__).items() if p.default is not Parameter.empty}
        model.config = defaults | dict(zip(places, sizes, strict=False)) | options  # __init__ reports errors
        model.config.pop("key", None)
        model.config = {
            n: plain(copy.deepcopy(v) if isinstance(v, dict | list) else v) for n, v in model.config.items()
        }
        return model

    def named_children(self) -> Iterator[tuple[str, Layer | Param]]:
        """As for every layer, but without the layers that are arguments in `config`."""
        return named_parts("", {name: value for name, value in self.named_attributes().items() if name != "config"})

    @classmethod
    def passes_to(cls, options: Mapping[str, Any]) -> Callable | None:
        """The class or function that gets the options that the model does not take itself."""
        return cls.body_class

    @classmethod
    def options(cls, given: Mapping[str, Any] = {}) -> tuple[dict[str, Parameter], bool]:
        """The arguments that can be passed by name, in order, and whether any other keyword is accepted too.

        given: the options passed, on which the answer may depend.
        """
        options: dict[str, Parameter] = {}
        fixed: Collection[str] = ()  # the class's own arguments are not
        for part in cls.__mro__[: cls.__mro__.index(Model)]:
            if init := vars(part).get("__init__"):
                options |= {name: p for name, p in named(init).items() if name not in options and name not in fixed}
                fixed = cls.fixed
                if not passes_on(init):
                    return options, False
        taker = cls.passes_to(given)
        if taker is None:
            return options, True
        if is_model := isinstance(taker, type) and issubclass(taker, Model):
            more, anything = taker.options(given)
        else:
            more, anything = named(taker), passes_on(taker)
        for name, p in more.items():
            a_size = is_model and p.default is Parameter.empty and p.kind is not Parameter.KEYWORD_ONLY
            if not (a_size or name in options or name in cls.fixed):
                options[name] = p.replace(kind=Parameter.KEYWORD_ONLY)
        return options, anything


def named(function: Callable) -> dict[str, Parameter]:
    """The parameters of a function or class that can be passed by name, without `self`."""
    return {name: p for name, p in signature(function).parameters.items() if p.kind in NAMED and name != "self"}


def passes_on(function: Callable) -> bool:
    """Whether a function accepts arbitrary keywords."""
    return any(p.kind is Parameter.VAR_KEYWORD for p in signature(function).parameters.values())
