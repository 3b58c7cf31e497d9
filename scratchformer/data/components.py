"""Limits for the parts of a tokenizer file: a few kilobytes of them can make an endless text or an endless search.

A tokenizer of the library `tokenizers` is a chain of parts. Its normalizers and its pre-tokenizers rewrite a text one
after the other, and the parts of its decoder rewrite what it decodes. 22 parts that each double the letter "a" make
four million letters of one. So the file is refused unless the product of what each part can make of one character is
at most MAX_GROWTH, the texts and patterns in it are short, and each pattern is `linear`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..shell.reading import DataError
from ..shell.text import shown

MAX_PARTS = 64  # parts of one kind; DeepSeek's tokenizers have 8
MAX_TEXT = 64  # characters that a part inserts
MAX_GROWTH = 1000  # characters that a chain of parts can make of one
MAX_TOKEN = 10_000  # characters of a token; published ones have up to 512
MAX_ADDED = 300_000  # characters of all added tokens
MAX_NORMALIZED = 3_000_000  # and of what the normalizer makes of them, each of which takes 100 bytes of memory
MAX_WORD = 200  # characters of a word that WordPiece splits, which takes their square; BERT has 100
MAX_UNIGRAM_TOKEN, MAX_UNIGRAM = 64, 1_000_000  # characters of a token of a Unigram model, and of all
MAX_PIECES = 16  # tokens of a template, and of each entry in it
MAX_PATTERN = 500  # characters of a pattern, with a class in brackets counted as one
MAX_PATTERN_AND_CLASSES = 10_000  # all characters of a pattern

# The most characters that each part makes of one: Unicode's forms as in its stability policy, a byte of UTF-8 as one
# character, a space before and after a Chinese character. The names are the library's. A list within is a chain.
CHAINS: Mapping[str, tuple[str, Mapping[str, int]]] = {
    "normalizer": (
        "normalizers",
        {"NFC": 3, "NFD": 4, "NFKC": 18, "NFKD": 18, "Lowercase": 3, "BertNormalizer": 3 * 4 * 3, "ByteLevel": 4}
        | dict.fromkeys(("Nmt", "Prepend", "Replace", "Strip", "StripAccents"), 1),
    ),
    "pre_tokenizer": (
        "pretokenizers",
        {"ByteLevel": 4 + 1, "Metaspace": 2}
        | dict.fromkeys(("BertPreTokenizer", "CharDelimiterSplit", "Digits", "Punctuation", "Split"), 1)
        | dict.fromkeys(("UnicodeScripts", "Whitespace", "WhitespaceSplit"), 1),
    ),
    "post_processor": (
        "processors",
        dict.fromkeys(("BertProcessing", "ByteLevel", "RobertaProcessing", "TemplateProcessing"), 1),
    ),
    "decoder": (
        "decoders",
        {"BPEDecoder": 2, "WordPiece": 2}
        | dict.fromkeys(("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"), 1),
    ),
}
MODELS = ("BPE", "Unigram", "WordLevel", "WordPiece")

# Regular expressions, as Oniguruma reads them. An atom is one character; in a group there are only atoms.
_ESCAPE = r"\\(?:[pP]\{\^?\w+\}|u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]{1,6}\}|[sSdDwWrntfv]|[^\w\s])"
_LISTED = rf"{_ESCAPE}|[^\[\]\\]"
_CLASS = rf"\[\^?+(?:{_LISTED}|\[\^?+(?:{_LISTED})++\])++\]"
_ATOM = rf"(?:{_ESCAPE}|{_CLASS}|\.|[^\\\[\](){{}}|?*+.^$])"
_GROUP = rf"\((?:\?i?:)?{_ATOM}*(?:\|{_ATOM}*)*\)"
_SURE = rf"(?:{_ATOM}(?:\{{\d\}})?|{_GROUP})"
_MAYBE = rf"(?:{_ATOM}(?:\?\+?|\{{\d?,\d\}})|{_GROUP}\?)"
_RUN = rf"{_ATOM}(?:[*+]\+?|\{{\d,\}}|\{{\d,\d\}}\+)"  # "{1,3}+" repeats what "{1,3}" reads
# Those of published patterns that may give back a part of a run: white space, or capital letters before small ones.
_GIVES_BACK = (
    r"\\s[*+](?:\[\\r\\n\]\+?|\(\?!\\S\)|\+?\$)"
    r"|\[\\p\{Lu\}\\p\{Lt\}\\p\{Lm\}\\p\{Lo\}\\p\{M\}\]\*\[\\p\{Ll\}\\p\{Lm\}\\p\{Lo\}\\p\{M\}\]\+"
)
_ALTERNATIVE = rf"{_SURE}*(?:{_MAYBE}{_SURE}*)?(?:{_GIVES_BACK}|{_RUN})?(?:{_ATOM}\*\+?|{_MAYBE})*"
_WHOLE = rf"(?>{_ALTERNATIVE}(?=\||\Z))"  # in one of the ways, since trying them all for each would take 2ⁿ steps
_LINEAR = rf"{_WHOLE}(?:\|{_WHOLE})*+"  # compiled when it is needed, which takes ten milliseconds


def expect_bounded(settings: Mapping[str, Any], path: Path) -> None:
    """Raise DataError unless a tokenizer with these settings, of a JSON file, takes a bounded time for a text."""
    try:
        for kind in CHAINS:
            growth = 1
            for number, part in enumerate(_parts(settings.get(kind), kind)):
                if number >= MAX_PARTS:
                    raise ValueError(f"{kind}: expected at most {MAX_PARTS} parts")
                growth *= _growth(part, kind)
            if kind == "normalizer":
                normalized = growth
            growth *= normalized if kind == "pre_tokenizer" else 1
            if growth > MAX_GROWTH:
                raise ValueError(f"{kind}: it could make a text more than {MAX_GROWTH:,} times as long")
        _check_model(settings.get("model"))
        _check_added(settings.get("added_tokens"), normalized)
    except RecursionError as error:
        raise DataError(f"{path} is damaged: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{path}: {error}") from error


def expect_short(tokens: Collection[Any], path: Path) -> None:
    """Raise DataError if a token is longer than any that is learned from text."""
    longest = max((len(token) for token in tokens if isinstance(token, str)), default=0)
    if longest > MAX_TOKEN:
        raise DataError(f"{path}: expected tokens of at most {MAX_TOKEN:,} characters, got one of {longest:,}")


def linear(pattern: str) -> bool:
    """Whether a search for the regular expression takes steps in proportion to the text, for any text.

    In each alternative, at most one atom before a run of atoms (`x*`, `x+`) has a choice, and whatever follows the run
    may be empty. So a run that was read is part of the match and never read again. A pattern with a repeated group, a
    reference or a run before something that may fail is refused, except for those of _GIVES_BACK.
    """
    if len(pattern) > MAX_PATTERN_AND_CLASSES or len(re.sub(_CLASS, ".", pattern)) > MAX_PATTERN:
        return False
    return re.fullmatch(_LINEAR, pattern) is not None


def _parts(part: Any, kind: str) -> Iterator[Mapping[str, Any]]:
    """The parts of a chain in order."""
    if part is None:
        return
    inside, known = CHAINS[kind]
    name = part.get("type") if isinstance(part, dict) else part
    if name == "Sequence" and isinstance(part.get(inside), list):
        for each in part[inside]:
            yield from _parts(each, kind)
    elif isinstance(name, str) and isinstance(part, dict) and name in known:
        yield part
    else:
        raise ValueError(f"{kind}: expected one of {', '.join(known)}, got {shown(name)}")


def _growth(part: Mapping[str, Any], kind: str) -> int:
    """The most characters that a part makes of one."""
    name, growth = part["type"], CHAINS[kind][1][part["type"]]
    if "pattern" in part:
        wanted = part["pattern"]
        text = next(iter(wanted.values())) if isinstance(wanted, dict) and len(wanted) == 1 else None
        if not isinstance(text, str) or not wanted.keys() <= {"String", "Regex"}:
            raise ValueError(f"{kind}: pattern: expected one String or Regex, got {shown(wanted)}")
        if "Regex" in wanted and not linear(text):
            raise ValueError(
                f"{kind}: pattern: expected a regular expression as in a published tokenizer, without repeated groups "
                f"and with nothing that could fail after a run, got {shown(text)}"
            )
        size = len(text) if "String" in wanted else 0
        inserted = len(_short(part, "content", kind)) if name == "Replace" else 0
        return growth * (max(1, -(-inserted // size)) if size else 1 + inserted)
    if name == "Prepend":
        return growth * (1 + len(_short(part, "prepend", kind)))
    for setting in ("prefix", "suffix") if kind == "decoder" else ():
        _short(part, setting, kind)
    if name == "TemplateProcessing":
        _check_template(part)
    return growth


def _short(part: Mapping[str, Any], setting: str, kind: str) -> str:
    """A text that a part inserts; "" if it has none."""
    text = part.get(setting)
    if not (text is None or (isinstance(text, str) and len(text) <= MAX_TEXT)):
        raise ValueError(f"{kind}: {setting}: expected a text of at most {MAX_TEXT} characters, got {shown(text)}")
    return text or ""


def _check_template(part: Mapping[str, Any]) -> None:
    """Raise ValueError if the text occurs in a template more than once, or if there is much besides."""
    single: Any = part.get("single")
    specials = part.get("special_tokens")
    texts = [piece for piece in single if isinstance(piece, dict) and "Sequence" in piece] if _few(single) else []
    if len(texts) > 1 or not _few(single) or not _few(part.get("pair")):
        raise ValueError(f"post_processor: expected a template with one text and at most {MAX_PIECES} pieces")
    for token in specials.values() if isinstance(specials, dict) else ():
        if isinstance(token, dict) and not _few(token.get("ids")):
            raise ValueError(f"post_processor: expected at most {MAX_PIECES} ids for a special token")


def _few(pieces: Any) -> bool:
    return isinstance(pieces, list) and len(pieces) <= MAX_PIECES


def _check_model(model: Any) -> None:
    if not isinstance(model, dict):
        raise ValueError(f"model: expected an object {{...}}, got {shown(model)}")
    if (kind := model.get("type", MODELS[0])) not in MODELS:
        raise ValueError(f"model: expected one of {', '.join(MODELS)}, got {shown(kind)}")
    for setting in "continuing_subword_prefix", "end_of_word_suffix":
        _short(model, setting, "model")
    longest = model.get("max_input_chars_per_word")
    if not (longest is None or (type(longest) is int and longest <= MAX_WORD)):
        raise ValueError(f"model: max_input_chars_per_word: expected at most {MAX_WORD}, got {shown(longest)}")
    if isinstance(words := model.get("vocab"), list):
        sizes = [len(word[0]) for word in words if isinstance(word, list) and word and isinstance(word[0], str)]
        if max(sizes, default=0) > MAX_UNIGRAM_TOKEN or sum(sizes) > MAX_UNIGRAM:
            limits = f"{MAX_UNIGRAM_TOKEN} characters each and {MAX_UNIGRAM:,} together"
            raise ValueError(f"model: vocab: expected tokens of at most {limits}")


def _check_added(added: Any, growth: int) -> None:
    """growth: the most characters that the normalizer makes of one, as it does of the names of some added tokens."""
    tokens = [token for token in (added if isinstance(added, list) else ()) if isinstance(token, dict)]
    named = [token for token in tokens if isinstance(token.get("content"), str)]
    if sum(len(token["content"]) for token in named) > MAX_ADDED:
        raise ValueError(f"added_tokens: expected at most {MAX_ADDED:,} characters in all")
    if growth * sum(len(token["content"]) for token in named if token.get("normalized")) > MAX_NORMALIZED:
        raise ValueError(f"added_tokens: normalized, they could have more than {MAX_NORMALIZED:,} characters in all")
