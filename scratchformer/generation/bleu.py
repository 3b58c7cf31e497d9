"""BLEU, the usual score of translations."""

from __future__ import annotations

from ..checks import expect_instance, expect_texts


def bleu(translations: list[str], references: list[str], moses: str | None = None) -> tuple[float, str]:
    """BLEU, from 0 to 100, of whole translations with one reference each, and sacreBLEU's signature of its settings.

    moses: None for sacreBLEU's default: its own tokenizer, case-sensitive. Such scores can be compared between
    publications. A language, such as "de", for lower-case, tokenised BLEU, which many papers on Multi30k report: the
    rules of Moses for this language normalise the punctuation of translations and references and split them into
    tokens. For a language that it does not know, Moses uses general rules and the English abbreviations. This score is
    usually higher, and cannot be compared with the default. Its signature begins with "moses:" and the language.

    Raises ValueError unless there are as many references as translations, and at least one, and ImportError without
    sacreBLEU or, for moses, sacremoses. Source: Post, "A call for clarity in reporting BLEU scores", 2018.
    """
    for name, texts in ("translations", translations), ("references", references):
        expect_texts(name, texts, list | tuple)
    expect_instance("moses", moses, str, none=True)
    if not 0 < len(translations) == len(references):
        got = f"{len(translations)} and {len(references)}"
        raise ValueError(f"translations, references: expected the same number >= 1 of both, got {got}")
    try:
        from sacrebleu.metrics import BLEU
    except ImportError as error:
        raise ImportError("BLEU needs sacreBLEU: pip install 'scratchformer[translate]'") from error
    if moses is None:
        metric = BLEU()
        return metric.corpus_score(translations, [references]).score, str(metric.get_signature())
    metric = BLEU(tokenize="none", lowercase=True, force=True)  # force: no warning that it is tokenised
    score = metric.corpus_score(moses_words(translations, moses), [moses_words(references, moses)]).score
    return score, f"moses:{moses}|{metric.get_signature()}"


def moses_words(texts: list[str], language: str) -> list[str]:
    """Each text after Moses has normalised its punctuation and split it into tokens, with spaces between them."""
    try:
        from sacremoses import MosesPunctNormalizer, MosesTokenizer
    except ImportError as error:
        raise ImportError(
            "BLEU with Moses's tokens needs sacremoses: pip install 'scratchformer[translate]'"
        ) from error
    plain, split = MosesPunctNormalizer(language), MosesTokenizer(language)
    return [split.tokenize(plain.normalize(text), escape=False, return_str=True) for text in texts]
