"""Sub-word vocabularies: byte-pair encoding and WordPiece, with the library `tokenizers`.

A vocabulary of words never has every word, and texts split into characters are long. With sub-words, a frequent word is
one token, a rare one several pieces. Byte-pair encoding repeatedly joins the most frequent pair of neighbours
(Sennrich et al., "Neural machine translation of rare words with subword units", 2016). WordPiece splits a word greedily
from the left into the longest pieces in its vocabulary (Schuster, Nakajima, "Japanese and Korean voice search", 2012).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import expect_at_least, expect_instance, expect_texts
from ..shell.files import replacing, replacing_folder
from ..shell.progress import counted
from ..shell.reading import MAX_VOCABULARY, DataError, parsed, read_json, read_text
from ..shell.text import printable, shown
from .vocabulary import expect_sequence

PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<bos>", "<eos>"  # for translation
BERT_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
GPT2_END = "<|endoftext|>"
ROBERTA_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
# How BERT reads a text: a setting in a published folder, the library's name for it, and its default.
BERT_SETTINGS = {
    "do_lower_case": ("lowercase", True),
    "strip_accents": ("strip_accents", None),
    "tokenize_chinese_chars": ("handle_chinese_chars", True),
}
# The tokenizers of transformers that read vocab.txt, or vocab.json and merges.txt, in the way that is read here.
BERT_CLASSES = tuple(f"{kind}Tokenizer{fast}" for kind in ("Bert", "DistilBert", "Electra") for fast in ("", "Fast"))
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
ROBERTA_CLASSES = ("RobertaTokenizer", "RobertaTokenizerFast")

JSON, SETTINGS = "tokenizer.json", "tokenizer_config.json"
# The files of a published folder that say how a text becomes tokens, and how a model is used.
FILES = (
    JSON,
    SETTINGS,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
MAX_ID = 2**22  # above the ids of all published tokenizers; the library reserves memory for the largest id

_TEXTS = 1_000  # encoded at once
# Where no token of a byte-level encoding crosses, if its tokens are divided as in GPT-2, or as in Llama 3: there all
# line ends in a row may be one token. And a text by which the two are told apart.
_CUTS = (r"(?<=\S\n)(?=\S)|(?<=\s)(?=\n\S)", r"(?<=\n)(?=\S)")
_PROBE = "a\nb.\n\nc \n\n\n d1\r\n2\r\n\r\n)\n \n\te\n'\n\n\n\n\"f "
# Special tokens such as <pad>, since merges never join letters and punctuation; and RoBERTa's unused tokens.
_SPECIAL = re.compile(r"[<\[].*[A-Za-z].*[>\]]|madeupword\d{4}")
# The characters that GPT-2 uses for bytes: printable bytes are their own characters, the others start at 256.
_PRINTING = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
_OTHERS = sorted({*range(256)} - {*_PRINTING})
_BYTES = {chr(b): b for b in _PRINTING} | {chr(256 + i): b for i, b in enumerate(_OTHERS)}


def _library() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError(
            "sub-word vocabularies need the library tokenizers: pip install 'scratchformer[subwords]'"
        ) from error
    return tokenizers


class Subwords:
    """A sub-word vocabulary: texts to token ids and back.

    tokenizer: a `tokenizers.Tokenizer`. Truncation and padding, which it may have kept from training, are turned off.
    """

    def __init__(self, tokenizer: Any) -> None:
        expect_instance("tokenizer", tokenizer, _library().Tokenizer)
        self.tokenizer = tokenizer
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    @classmethod
    def bpe(cls, texts: Iterable[str], size: int) -> Subwords:
        """Byte-pair encoding learned from `texts`: at most `size` tokens, with PAD, UNKNOWN, BEGIN and END as 0 to 3.

        There are more if the texts have more letters. A space becomes part of the word after it, and punctuation marks
        are tokens of their own. So decoding restores the text, except for a space at its beginning, a "▁", letters that
        were not in `texts`, and characters that Unicode's form NFC replaces.
        """
        lib = _library()
        tokenizer = lib.Tokenizer(lib.models.BPE(unk_token=UNKNOWN))
        tokenizer.normalizer = lib.normalizers.NFC()
        tokenizer.pre_tokenizer = lib.pre_tokenizers.Sequence(
            [lib.pre_tokenizers.Metaspace(), lib.pre_tokenizers.Punctuation()]
        )
        tokenizer.decoder = lib.decoders.Metaspace()
        return cls._train(tokenizer, lib.trainers.BpeTrainer, texts, size, (PAD, UNKNOWN, BEGIN, END))

    @classmethod
    def byte_bpe(cls, texts: Iterable[str], size: int) -> Subwords:
        """GPT-2's byte-pair encoding learned from `texts`: its symbols are bytes, so it can encode any text.

        It has at most `size` tokens, but at least 257: all bytes, and GPT2_END as id 0. Source: Radford et al.,
        "Language models are unsupervised multitask learners", 2019, section 2.2.
        """
        lib = _library()
        tokenizer = _byte_level(lib, lib.models.BPE())
        alphabet = lib.pre_tokenizers.ByteLevel.alphabet()
        return cls._train(tokenizer, lib.trainers.BpeTrainer, texts, size, (GPT2_END,), initial_alphabet=alphabet)

    @classmethod
    def wordpiece(cls, texts: Iterable[str], size: int) -> Subwords:
        """BERT's WordPiece in lower case, learned from `texts`: at most `size` tokens, with BERT_SPECIALS as 0 to 4.

        There are more if the texts have more letters. The library numbers the letters inside words in a random order,
        and breaks ties by number. Here they get a fixed order, so the same texts give the same vocabulary.
        """
        expect_texts("texts", texts)
        lib, texts = _library(), list(texts)
        expect_texts("texts", texts, list)
        tokenizer = _wordpiece(lib, lowercase=True)
        normalized, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
        letters = sorted(set(normalized("".join(sorted(set().union(*texts))))))
        inside = [f"##{letter}" for letter in letters if len(split(normalized(f"a{letter}a"))) == 1]
        words = cls._train(tokenizer, lib.trainers.WordPieceTrainer, texts, size, BERT_SPECIALS, inside)
        return cls(_wordpiece(lib, words.tokenizer.get_vocab(), lowercase=True))

    @classmethod
    def _train(
        cls,
        tokenizer: Any,
        trainer: Any,
        texts: Iterable[str],
        size: int,
        specials: Sequence[str],
        first: Sequence[str] = (),
        **options: Any,
    ) -> Subwords:
        """first: tokens that follow the special ones."""
        expect_texts("texts", texts)
        expect_at_least(1, size=size)
        if size <= len(specials):
            raise ValueError(f"size: expected more than the {len(specials)} special tokens, got {size}")
        trainer = trainer(vocab_size=size, special_tokens=[*specials, *first], show_progress=False, **options)

        def each() -> Iterator[str]:
            for i, text in enumerate(counted(texts, "learning sub-words", "texts")):
                expect_instance(f"texts[{i}]", text, str)
                yield text

        tokenizer.train_from_iterator(each(), trainer)
        return cls(tokenizer)

    @classmethod
    def from_bert(cls, folder: str | os.PathLike[str]) -> Subwords:
        """The WordPiece vocabulary of a published BERT: vocab.txt in its folder, or else its tokenizer.json as it is.

        With vocab.txt, texts are lowercased and stripped of accents, and each Chinese character is a word, unless
        tokenizer_config.json says otherwise: do_lower_case, strip_accents (if null or absent, the same as
        do_lower_case), tokenize_chinese_chars. Raises DataError if a file is missing or damaged; if the folder names
        another tokenizer, such as a Japanese one; or if its config.json gives another number of tokens: only this shows
        that a vocab.txt was truncated at a line's end.
        """
        lib, path = _library(), Path(folder) / "vocab.txt"
        if alone := _from_json(path):
            return cls._published(alone, path.with_name(JSON), BERT_SPECIALS)
        settings = _expect_class(Path(folder), BERT_CLASSES)
        words = {token: number for number, token in enumerate(_lines(path))}
        size = _settings(Path(folder) / "config.json").get("vocab_size", len(words))
        if size != len(words):
            raise DataError(f"{path} has {len(words):,} tokens, but the model of config.json has {shown(size)}")
        options = {ours: settings.get(theirs, default) for theirs, (ours, default) in BERT_SETTINGS.items()}
        with _naming(f"{path} or {SETTINGS} is damaged"):
            tokenizer = _wordpiece(lib, words, **options)
        return cls._published(tokenizer, path, BERT_SPECIALS)

    @classmethod
    def from_gpt2(cls, folder: str | os.PathLike[str]) -> Subwords:
        """The byte-pair encoding of a published GPT-2: vocab.json and merges.txt in its folder, or else its
        tokenizer.json as it is.

        Raises DataError, naming the file, if one is missing or damaged, if the two do not match, or if the folder names
        another tokenizer. Every token but the bytes must be a special one, such as <pad>, or the result of a merge. So
        a truncated merges.txt is noticed.
        """
        return cls._from_merges(Path(folder), (GPT2_END,), GPT2_CLASSES)

    @classmethod
    def from_roberta(cls, folder: str | os.PathLike[str]) -> Subwords:
        """The byte-pair encoding of a published RoBERTa, from files like those of `from_gpt2`, with ROBERTA_SPECIALS in
        place of GPT2_END.
        """
        return cls._from_merges(Path(folder), ROBERTA_SPECIALS, ROBERTA_CLASSES)

    @classmethod
    def _from_merges(cls, folder: Path, specials: Sequence[str], classes: Sequence[str]) -> Subwords:
        """specials: tokens that the vocabulary must have. classes: see `_expect_class`."""
        lib, path = _library(), folder / "vocab.json"
        if alone := _from_json(path):
            return cls._published(alone, path.with_name(JSON), specials)
        settings = _expect_class(folder, classes)
        words, file = read_json(path, max_bytes=MAX_VOCABULARY), path.with_name("merges.txt")
        _check_ids(words, path)
        merges = [tuple(line.split(" ")) for line in _lines(file) if not line.startswith("#version")]
        with _naming(f"{file} is damaged, or belongs to another vocabulary"):
            tokenizer = _byte_level(lib, lib.models.BPE(words, merges), settings.get("add_prefix_space") is True)
        made = {"".join(pair) for pair in merges}
        others = [word for word in words if len(word) > 1 and word not in made]
        if unmade := [word for word in others if not _SPECIAL.fullmatch(word)]:
            raise DataError(
                f"{file} is truncated or belongs to another vocabulary: no merge makes {len(unmade):,} of the "
                f"tokens there, such as {shown(unmade[0])}"
            )
        vocabulary = cls._published(tokenizer, path, [*specials, *others])
        if settings.get("add_bos_token") is True:
            begin = {"single": f"{specials[0]} $A", "special_tokens": [(specials[0], words[specials[0]])]}
            tokenizer.post_processor = lib.processors.TemplateProcessing(**begin)
        return vocabulary

    @classmethod
    def _published(cls, tokenizer: Any, path: Path, specials: Sequence[str]) -> Subwords:
        """The vocabulary in the file at `path`, which must have the tokens `specials`."""
        if missing := [token for token in specials if tokenizer.token_to_id(token) is None]:
            raise DataError(f"{path}: {', '.join(missing)} missing")
        tokenizer.add_special_tokens([*specials])
        return cls(tokenizer)

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def __getitem__(self, token: str) -> int:
        """The id of a token; raises DataError if it is not in the vocabulary, which is then for something else."""
        number = self.tokenizer.token_to_id(token)
        if number is None:
            raise DataError(f"vocabulary: no token {shown(token)} in it")
        return number

    def encode(self, text: str) -> np.ndarray:
        """The token ids of `text`, int32 (T,), without special tokens. The name of one in the text, such as "[SEP]",
        "<eos>" or "<|endoftext|>", is read as plain text; `self["[SEP]"]` is its id. Raises TypeError unless it is a
        string, DataError if it cannot be written in UTF-8, as after reading with "surrogateescape".
        """
        expect_instance("text", text, str)
        return self._encode([text])[0]

    def encode_all(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` for many texts, on all cores."""
        expect_texts("texts", texts, Sequence)
        parts = [texts[start : start + _TEXTS] for start in range(0, len(texts), _TEXTS)]
        encoded: list[np.ndarray] = []
        for part in counted(parts, "encoding", "texts", len(texts), len):
            encoded += self._encode(part)
        return encoded

    def encode_long(self, text: str) -> np.ndarray:
        """`encode` for a whole corpus, on all cores and in little memory; for a byte-level encoding (`byte_bpe`).

        The text is cut where no token crosses, so the ids are the same: where lines begin, or before the newline that
        ends other white space. Where the encoding has another rule, the text is not cut.
        """
        rule = next((rule for rule in _CUTS if self._words(re.split(rule, _PROBE)) == self._words([_PROBE])), None)
        return np.concatenate(self.encode_all([text] if rule is None else re.split(rule, text)))

    def _words(self, texts: Sequence[str]) -> list[str]:
        """The parts of `texts` that no token crosses."""
        normalizer, divider = self.tokenizer.normalizer, self.tokenizer.pre_tokenizer
        if divider is None:
            return list(texts)
        normalized = [text if normalizer is None else normalizer.normalize_str(text) for text in texts]
        return [word for text in normalized for word, _ in divider.pre_tokenize_str(text)]

    def _encode(self, texts: Sequence[str], special: bool = False, around: bool = False) -> list[np.ndarray]:
        """special: whether the names of special tokens in a text are read as these. around: whether the tokens that
        the tokenizer puts around a text are added.
        """
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(f"vocabulary: cannot encode the text {shown(text)}: {error}") from error
        self.tokenizer.encode_special_tokens = not special  # despite its name: read their names as plain text
        with _naming("vocabulary: cannot encode the text"):
            encoded = self.tokenizer.encode_batch_fast(texts, add_special_tokens=around)
        return [np.array(e.ids, np.int32) for e in encoded]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` (T,), without special tokens. Raises IndexError if an id is out of range, TypeError or
        ValueError unless they are one row of integers.
        """
        ids = expect_sequence(ids, len(self)).tolist()
        with _naming("vocabulary: cannot decode the ids"):
            return self.tokenizer.decode(ids)

    @cached_property
    def pieces(self) -> list[bytes]:
        """The bytes of each token, none if the tokenizer lacks it: joined, the pieces of a text are its UTF-8.

        The tokens are those of a byte-level encoding, as in GPT-2, or pieces of words and single bytes, as in Llama 2.
        Raises ValueError for any other kind of vocabulary.
        """
        decoder = json.dumps(json.loads(self.tokenizer.to_str())["decoder"])
        kinds = {'"ByteLevel"': bytes_of_symbols, '"ByteFallback"': bytes_of_words}
        if not (readers := [read for kind, read in kinds.items() if kind in decoder]):
            raise ValueError(f"vocabulary: expected tokens made of bytes, like GPT-2's, got the decoder {decoder[:80]}")
        added = {token.content for token in self.tokenizer.get_added_tokens_decoder().values()}
        pieces = [b""] * len(self)
        for token, number in self.tokenizer.get_vocab().items():
            if number < len(pieces):
                pieces[number] = readers[0](token, token in added)
        return pieces

    @property
    def around(self) -> tuple[str, str]:
        """The special tokens before and after a text that an encoder reads: those of a RoBERTa, or else BERT's."""
        roberta = self.tokenizer.token_to_id("</s>") is not None
        return ("<s>", "</s>") if roberta else ("[CLS]", "[SEP]")

    @cached_property
    def ends(self) -> frozenset[int]:
        """The ids that end a text: that of GPT2_END, if the vocabulary has it."""
        return frozenset({number} if (number := self.tokenizer.token_to_id(GPT2_END)) is not None else ())

    @cached_property
    def sizes(self) -> np.ndarray:
        """The number of bytes of each of `pieces`, int64 (V,)."""
        return np.array([len(piece) for piece in self.pieces], np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the whole vocabulary, in hexadecimal: equal only for equal vocabularies."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the vocabulary to `path`, in the library's JSON format; a failure leaves no partial file."""
        with replacing(Path(path)) as unfinished:
            unfinished.write_text(self.tokenizer.to_str(), encoding="utf-8", newline="\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Subwords:
        """The vocabulary that `save` wrote to `path`; raises DataError if the file is missing or damaged."""
        return cls(_read(Path(path)))


class PublishedTokenizer(Subwords):
    """The vocabulary of a published decoder, as the files in its folder describe it.

    folder: where these files are. special: the ids of tokens that are no text. ends: the ids that end a text.
    """

    def __init__(self, folder: str | os.PathLike[str], vocab_size: int) -> None:
        """Read tokenizer.json in `folder`, or else the vocab.json and merges.txt of a GPT-2; and eos_token_id in
        generation_config.json, or else in config.json.

        vocab_size: V, the number of the model's tokens. The tokenizer may have more or fewer. Raises DataError if a
        file is missing, damaged or of another kind.
        """
        self.folder, self.size = Path(folder), vocab_size
        path, gpt2 = self.folder / JSON, _settings(self.folder / "config.json").get("model_type") == "gpt2"
        if os.path.lexists(path):
            tokenizer = _read(path)
        elif gpt2:
            tokenizer = Subwords.from_gpt2(folder).tokenizer
        else:
            raise DataError(
                f"{path}: no such file; to make it from the folder's other files, run in Python: "
                f"transformers.AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
            )
        names = _special_tokens(self.folder, tokenizer)
        tokenizer.add_special_tokens(names)  # again, so that no normalizer applies to them
        # Read again: before version 0.23.1, the library still finds them in a text as they were first added.
        super().__init__(_library().Tokenizer.from_str(tokenizer.to_str()))
        self.special = [self.tokenizer.token_to_id(name) for name in names]
        try:
            self.pieces  # noqa: B018 (made now, since the tokens may be of another kind)
        except ValueError as error:
            raise DataError(f"{path}: {error}") from error
        self.ends = end_ids(self.folder, vocab_size) or (self.ends if gpt2 else frozenset())

    def __len__(self) -> int:
        return self.size

    def encode(self, text: str, begin: bool = True) -> np.ndarray:
        """The token ids of `text`, int32 (T,), with the begin token if the tokenizer adds one and `begin` is true. The
        name of a special token in the text, such as "<|im_start|>", is read as that token: chat models are prompted
        with them. Raises DataError for a token that the model lacks.
        """
        expect_instance("text", text, str)
        return self._encode([text], special=True, around=begin)[0]

    def _encode(self, texts: Sequence[str], special: bool = False, around: bool = False) -> list[np.ndarray]:
        encoded = super()._encode(texts, special, around)
        for ids in encoded:
            if (largest := int(ids.max(initial=-1))) >= self.size:
                token = shown(self.tokenizer.id_to_token(largest))
                raise DataError(f"vocabulary: the text has {token}, token {largest:,}, but the model has {self.size:,}")
        return encoded

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids` (T,), without special tokens and those that the tokenizer lacks, as transformers gives it
        with skip_special_tokens=True. Raises IndexError if an id is out of range, TypeError or ValueError unless they
        are one row of integers.
        """
        ids = expect_sequence(ids, self.size)
        return super().decode(ids[~np.isin(ids, self.special)])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Copy the files to the folder `path`, with config.json; a failure leaves no partial folder."""
        with replacing_folder(Path(path)) as folder:
            copy_files(self.folder, folder, (*FILES, "config.json"))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> PublishedTokenizer:
        """The vocabulary that `save` wrote to `path`; raises DataError if a file is missing or damaged."""
        config = Path(path) / "config.json"
        if type(size := read_json(config).get("vocab_size")) is not int:
            raise DataError(f"{config}: vocab_size: expected a whole number, got {shown(size)}")
        return cls(path, size)


def copy_files(source: Path, folder: Path, names: Sequence[str] = FILES) -> None:
    """Copy those files from `source` to `folder` that are there."""
    for name in names:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _read(path: Path) -> Any:
    """The `tokenizers.Tokenizer` in a JSON file; raises DataError if the file is missing or damaged."""
    lib, text = _library(), read_text(path, max_bytes=MAX_VOCABULARY)
    whole = parsed(text, path)
    model, added = whole.get("model"), whole.get("added_tokens")
    words = model.get("vocab") if isinstance(model, dict) else None
    _check_ids(words if isinstance(words, dict) else {}, path)
    added = [token for token in added if isinstance(token, dict)] if isinstance(added, list) else []
    _check_ids({str(token.get("content")): token.get("id") for token in added}, path)
    with _naming(f"{path} is damaged"):
        tokenizer = lib.Tokenizer.from_str(text)
        tokenizer.no_truncation()  # some folders keep settings of training
        tokenizer.no_padding()
        tokenizer.encode("The film, again.")  # the library notices some mistakes in the file only here
    return tokenizer


@contextmanager
def _naming(what: str) -> Iterator[None]:
    """Raise the library's errors as DataError. They have no class of their own, and its panics are BaseExceptions."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f"{what}: {printable(' '.join(str(error).split()))}") from error


def _check_ids(words: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if an id is out of range."""
    for word, number in words.items():
        if type(number) is not int or not 0 <= number < MAX_ID:
            raise DataError(f"{path}: {shown(word)} has the id {shown(number)}; expected 0 to {MAX_ID - 1:,}")


def bytes_of_symbols(token: str, added: bool = False) -> bytes:
    """The bytes of a token of a byte-level encoding. added: whether it was added, and may have other characters."""
    if set(token) <= _BYTES.keys():
        return bytes(_BYTES[symbol] for symbol in token)
    if not added:
        raise ValueError(f"vocabulary: expected tokens made of bytes, like GPT-2's, got {shown(token)}")
    return token.encode()


def bytes_of_words(token: str, added: bool = False) -> bytes:
    """The bytes of a piece of words, where "▁" is a space, or of a single byte, such as "<0x0A>"."""
    byte = re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _special_tokens(folder: Path, tokenizer: Any) -> list[str]:
    """The special tokens: those that tokenizer.json calls special, the token for what is unknown, the tokens that are
    put around a text, and those that tokenizer_config.json or special_tokens_map.json names.
    """
    described = json.loads(tokenizer.to_str())
    added = tokenizer.get_added_tokens_decoder().values()
    special: list[Any] = [described["model"].get("unk_token"), *(token.content for token in added if token.special)]
    around = described["post_processor"] or {}
    for part in around, *around.get("processors", ()):
        special += [*part.get("special_tokens", ()), *(part[name][0] for name in ("sep", "cls") if name in part)]
    for name in SETTINGS, "special_tokens_map.json":
        settings = _settings(folder / name)
        special += [value for key, value in settings.items() if key.endswith("_token")]
        for more in settings.get("additional_special_tokens"), settings.get("extra_special_tokens"):
            special += more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        added = settings.get("added_tokens_decoder")
        special += (
            [t for t in added.values() if isinstance(t, dict) and t.get("special")] if isinstance(added, dict) else []
        )
    names = [token.get("content") if isinstance(token, dict) else token for token in special]
    return [name for name in names if isinstance(name, str) and name and tokenizer.token_to_id(name) is not None]


def end_ids(folder: Path, vocab_size: int) -> frozenset[int]:
    """The eos_token_id, a number or several, of generation_config.json; if it has none, of config.json."""
    for path in folder / "generation_config.json", folder / "config.json":
        if (given := _settings(path).get("eos_token_id")) is not None:
            ids = given if isinstance(given, list) else [given]
            if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
                raise DataError(f"{path}: eos_token_id: expected ids from 0 to {vocab_size - 1}, got {shown(given)}")
            return frozenset(ids)
    return frozenset()


def _lines(path: Path) -> list[str]:
    return read_text(path, max_bytes=MAX_VOCABULARY).replace("\r\n", "\n").removesuffix("\n").split("\n")


def _from_json(path: Path) -> Any:
    """The `tokenizers.Tokenizer` of the tokenizer.json beside `path`, if there is no file at `path`; or else None."""
    alone = not os.path.lexists(path) and os.path.lexists(path.with_name(JSON))
    return _read(path.with_name(JSON)) if alone else None


def _settings(path: Path) -> dict[str, Any]:
    """The contents of a JSON file, or nothing if there is none; raises DataError."""
    return read_json(path) if os.path.lexists(path) else {}


def _expect_class(folder: Path, classes: Sequence[str]) -> dict[str, Any]:
    """The contents of tokenizer_config.json, or nothing if there is none. Raises DataError if this file or config.json
    names a tokenizer of another class than `classes`.
    """
    settings = _settings(folder / SETTINGS)
    for path, present in (folder / SETTINGS, settings), (folder / "config.json", _settings(folder / "config.json")):
        kind = present.get("tokenizer_class")
        if kind is not None and kind not in classes:
            raise DataError(
                f"{path}: tokenizer_class: expected {' or '.join(classes)}, got {shown(kind)}, which may split texts "
                "in another way"
            )
    return settings


def _wordpiece(lib: Any, words: Mapping[str, int] | None = None, **options: bool | None) -> Any:
    """BERT's tokenizer with these words, or without any, so that it can learn them."""
    tokenizer = lib.Tokenizer(lib.models.WordPiece(dict(words or {}), unk_token="[UNK]"))
    tokenizer.normalizer = lib.normalizers.BertNormalizer(**options)
    tokenizer.pre_tokenizer = lib.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = lib.decoders.WordPiece()
    if words:
        tokenizer.add_special_tokens(list(BERT_SPECIALS))
    return tokenizer


def _byte_level(lib: Any, model: Any, prefix: bool = False) -> Any:
    """prefix: whether a space is put before a text that does not begin with one."""
    tokenizer = lib.Tokenizer(model)
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = lib.decoders.ByteLevel()
    return tokenizer


def byte_vocabulary() -> Any:
    """The `tokenizers.Tokenizer` of a model whose tokens are bytes: the id of a byte is its value."""
    lib = _library()
    symbols = {symbol: bytes_of_symbols(symbol)[0] for symbol in lib.pre_tokenizers.ByteLevel.alphabet()}
    tokenizer = _byte_level(lib, lib.models.BPE(symbols, []))
    tokenizer.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer
