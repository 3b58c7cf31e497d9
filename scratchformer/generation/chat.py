"""Conversations with a published instruct model, in the format of its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import expect_at_least, expect_instance
from ..data.subwords import SETTINGS, PublishedTokenizer
from ..models import LanguageModel
from ..shell.apart import ProcessEnded, Send, run_apart
from ..shell.reading import MAX_JSON, DataError, read_json, read_text
from ..shell.text import printable, shown
from .cache import KeyValueCache
from .generate import Writing, generate

TEMPLATE = "chat_template.jinja"
NAMES = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
SECONDS, MEMORY = 10.0, 1 << 29  # that a template may take; those of published models take some milliseconds
ROOM = 4  # the oldest messages are forgotten when less than 1/ROOM of the context is left for an answer


class ChatTemplate:
    """The chat template of a published model: it writes messages as the text that the model was trained to continue.

    A template is a program in the language Jinja. It comes with the model, so it is not trusted: it runs in Jinja's
    sandbox, where it can read the messages and the names of special tokens, and change nothing, and in a process of its
    own, whose time and memory are limited. Only the text that it writes is used.
    """

    def __init__(self, folder: Path | str) -> None:
        """Read chat_template.jinja in `folder`, or else "chat_template" in tokenizer_config.json, and there the names
        of the special tokens. Raises DataError if there is no template, or it is not valid Jinja; ImportError if
        jinja2 is missing or too old.
        """
        text: Any
        folder = Path(folder)
        settings = read_json(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
        if (folder / TEMPLATE).is_file():
            self.path, text = folder / TEMPLATE, read_text(folder / TEMPLATE, max_bytes=MAX_JSON)
        else:
            self.path, text = folder / SETTINGS, settings.get("chat_template")
            if isinstance(text, list):  # several, each with its name
                named = {each.get("name"): each.get("template") for each in text if isinstance(each, dict)}
                text = named.get("default")
            if not isinstance(text, str):
                raise DataError(
                    f"{folder}: no chat template in {TEMPLATE} or {SETTINGS}, so this is no model to chat with; "
                    "scratchformer generate continues a text"
                )
        tokens = {name: settings.get(name) for name in NAMES}
        contents = {name: t.get("content") if isinstance(t, Mapping) else t for name, t in tokens.items()}
        self.tokens = {name: content for name, content in contents.items() if isinstance(content, str)}
        _sandbox()
        self.text = text
        self._run(None)

    def apply(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of the messages, each {"role": ..., "content": ...}, up to where the next answer begins.

        It equals that of `apply_chat_template(messages, add_generation_prompt=True, tokenize=False)` of transformers.
        Raises DataError if the template refuses the messages, fails, or takes or writes too much.
        """
        given = {"messages": [dict(m) for m in messages], "tools": None, "documents": None}
        return self._run(given | {"add_generation_prompt": True} | self.tokens)

    def _run(self, given: Mapping[str, Any] | None) -> str:
        """What the template writes of what is `given`; if this is None, the template is only compiled."""
        try:
            problem, written = next(run_apart(_write, self.text, given, seconds=SECONDS, memory=MEMORY))
        except (TimeoutError, ProcessEnded) as error:
            problem = str(error)
        if problem:
            raise DataError(f"{self.path}: the chat template: {problem}")
        return written


def _write(send: Send, text: str, given: Mapping[str, Any] | None) -> None:
    """Send what is wrong with a template, and what it writes. Runs in a process of its own."""
    problem = written = ""
    try:
        template = _sandbox().from_string(text)
        written = "" if given is None else template.render(given)
    except MemoryError:
        problem = f"takes more than {MEMORY:,} bytes of memory"
    except Exception as error:
        problem = printable(str(error) or type(error).__name__)
    send([problem, written])


def _sandbox() -> Any:
    """What templates run in: the settings and the names that transformers gives them."""
    from importlib.metadata import version  # here, since it takes long to import

    try:
        from jinja2 import TemplateError, nodes
        from jinja2.exceptions import SecurityError
        from jinja2.ext import Extension, LoopControlExtension
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from jinja2.utils import Namespace
    except ImportError as error:
        raise ImportError("chat templates need jinja2: pip install 'scratchformer[chat]'") from error
    if tuple(map(int, re.findall(r"\d+", version("jinja2"))[:3])) < (3, 1, 6):
        raise ImportError(
            "chat templates need jinja2 3.1.6 or newer, since templates could leave the sandbox of older ones: "
            "pip install 'scratchformer[chat]'"
        )

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %} marks answers, for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012 (Jinja declares it for an instance)

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    class Names(Namespace):
        """`namespace` of Jinja, without names that Python itself would look up."""

        def __init__(*args: Any, **names: Any) -> None:
            Namespace.__init__(args[0])
            for name, value in dict(*args[1:], **names).items():
                args[0][name] = value

        def __setitem__(self, name: str, value: Any) -> None:
            if name.startswith("_"):
                raise SecurityError(f"expected a name without an underscore at its beginning, got {name}")
            super().__setitem__(name, value)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(x: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, LoopControlExtension]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": lambda *pairs, **names: dict(*pairs, **names),
        "namespace": Names,
    }
    return sandbox


class Chat:
    """A conversation: its messages, and the cache of what the model has read of them.

    An answer continues the whole conversation, as the template writes it. Only what is new in that text is read: its
    beginning is in the cache. When the context is nearly full, the oldest messages are forgotten (except the system
    message), and the rest is read again.
    """

    def __init__(
        self, model: LanguageModel, vocabulary: PublishedTokenizer, template: ChatTemplate, system: str | None = None
    ) -> None:
        """system: the message that tells the model who it is, or None for the template's own, if it has one."""
        expect_instance("vocabulary", vocabulary, PublishedTokenizer)
        expect_instance("system", system, str, none=True)
        self.model, self.vocabulary, self.template = model, vocabulary, template
        self.messages = [] if system is None else [{"role": "system", "content": system}]
        self.cache = KeyValueCache(model, 1)
        self.special = frozenset(vocabulary.special)
        end = vocabulary.tokenizer.token_to_id(template.tokens.get("eos_token", ""))
        self.ends = vocabulary.ends | ({end} if end is not None else set())

    def answer(self, text: str, tokens: int, **options: Any) -> Generator[str]:
        """Say `text`, and yield the answer as it is written, without special tokens: up to `tokens` tokens, an end
        token, or the end of the context. If the iterator is closed earlier, the answer ends there. options: those of
        `generate`. Raises ValueError if `text` alone fills the context, and what `ChatTemplate.apply` raises; the
        conversation then stays as it was.
        """
        expect_instance("text", text, str)
        expect_at_least(1, tokens=tokens)
        messages, ids = self._fitting([*self.messages, {"role": "user", "content": text}], tokens)
        seen = np.empty(0, np.int64) if self.cache.ids is None else self.cache.ids[0]
        n = min(len(seen), len(ids) - 1)
        n = int(np.argmin(np.append(seen[:n] == ids[:n], False)))  # how many tokens both begin with
        self.cache.forget_after(n)
        written: list[int] = []
        writing = Writing(())
        try:
            count = min(tokens, self.model.context - len(ids))
            for (i,) in generate(self.model, ids[None, n:], count, open_cache=lambda *_: self.cache, **options):
                if i in self.ends:
                    break
                written.append(int(i))
                if i not in self.special and (new := writing.add(self.vocabulary.pieces[i])):
                    yield new
            if rest := writing.add(b"", final=True):
                yield rest
        finally:
            self.messages = [*messages, {"role": "assistant", "content": self.vocabulary.decode(written)}]

    def _fitting(self, messages: list[dict], tokens: int) -> tuple[list[dict], np.ndarray]:
        """The messages without the oldest that leave too little of the context for the answer, and their ids."""
        context, first = self.model.context, int(messages[0]["role"] == "system")
        while True:
            ids = self.vocabulary.encode(self.template.apply(messages), begin=False)
            if not len(ids):
                raise DataError(f"{self.template.path}: the chat template writes nothing for {shown(messages[-1])}")
            if len(ids) + min(tokens, context // ROOM) <= context:
                return messages, ids
            if len(messages) <= first + 1:
                raise ValueError(f"text: expected less than the context of {context:,} tokens, got {len(ids):,}")
            messages = messages[:first] + messages[first + 2 :]
