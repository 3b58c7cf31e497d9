"""The scores of simple methods on the programs' splits: linear models on IMDb, compressors on text and photographs.

    pip install -e '.[baselines]'
    python benchmarks/baselines.py imdb [--data PATH] [--seed N] [--folds K]
    python benchmarks/baselines.py enwik8 [--data PATH] [--bytes N]
    python benchmarks/baselines.py photos
    python benchmarks/baselines.py units

Each method's setting is chosen on the validation part, and with it the test part is scored once. The column after it is
the test part again, once the validation part was trained on too. Seconds are of the processor, on one core,
for the score in the column "test": counting, training and scoring, or compressing.

imdb: linear models on the words and n-grams that a review contains, however often; words as in `data.tokenize`. The
validation reviews are those that `imdb.py --seed N` draws. With naive Bayes weights an n-gram counts as much as its
log-ratio of the classes (`log_ratios`). The setting is C of scikit-learn. `--folds K` measures instead how far the
accuracy on a validation part is from that on the test part, with two of the models: for validation parts of blocks of
neighbours, of films, and of single reviews (`print_judges`).

enwik8, photos: bits per byte of a part is what it adds to the compressed size of the bytes before it. Of enwik8 the
first 4,000,000 bytes are used, as in `enwik8.py`, unless --bytes says otherwise. PNG and WebP compress the photographs
as images, without loss; with WebP that takes more than a minute in all.

units: the accuracy on the images of logistic regression and of a support vector machine on the pixels, and on the graph
that of the harmonic function, by which each member without a label is the mean of its friends.

Sources: Wang and Manning, "Baselines and bigrams", ACL 2012; Mesnil et al., "Ensemble of generative and discriminative
techniques for sentiment analysis of movie reviews", 2014 (logistic regression in place of their SVM, trigrams); Cleary
and Witten, "Data compression using adaptive coding and partial string matching", 1984 (PPM; PPMd is Shkarin's, 2002).
"""

from __future__ import annotations

import argparse
import bz2
import io
import lzma
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy import sparse
from threadpoolctl import threadpool_limits

from scratchformer.data import Corpus, DataError, load_digits, load_enwik8, load_photos, tokenize
from scratchformer.data.download import fetch
from scratchformer.data.films import films_of
from scratchformer.data.imdb import CHECKSUM, FILENAME, URL, hold_out, read_splits
from scratchformer.data.photos import COLORS, WIDTH

try:
    import pyppmd
    from PIL import Image
    from sklearn.feature_extraction.text import CountVectorizer, TfidfTransformer
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold
    from sklearn.svm import SVC, LinearSVC
except ImportError as error:
    raise SystemExit(f"{error}: pip install 'scratchformer[baselines]'") from error

INVERSE_DECAY = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)  # C of scikit-learn
OF_IMAGES = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0)  # the same, for images
ORDERS = (2, 3, 4, 6, 8, 12, 16, 24)  # of PPMd: its longest context, in bytes
MEMORY = 1 << 30  # bytes for PPMd's contexts, more than it needs here
VALIDATION = 2_500  # reviews, as in `load_imdb`
JUDGES, DRAWS = (2_500, 5_000), 1_000  # sizes of validation parts, and how many of each size are drawn
BLOCK = 250  # neighbouring reviews: far more than one film has
MAX_FOLDS = 50  # half as many as there are blocks
BYTES = 4_000_000  # of enwik8, as in the presets of `enwik8.py`
PROBES = ("logistic regression, words", "naive Bayes weights, bigrams")


class LabelledTexts(NamedTuple):
    texts: list[str]
    labels: np.ndarray


def log_ratios(x: sparse.csr_matrix, labels: np.ndarray) -> np.ndarray:
    """r_g = log((1 + p_g)/Σ_h (1 + p_h)) − log((1 + q_g)/Σ_h (1 + q_h)), (G,), for x (texts, G) and labels 0 and 1.

    p_g and q_g are the numbers of texts of class 1 and of class 0 that contain n-gram g.
    """
    p, q = (1 + np.asarray(x[labels == label].sum(axis=0), np.float64).ravel() for label in (1, 0))
    return np.log(p / p.sum()) - np.log(q / q.sum())


def naive_bayes(x: sparse.csr_matrix, labels: np.ndarray) -> Callable:
    ratios = log_ratios(x, labels).astype(np.float32)
    return lambda counts: counts.multiply(ratios).tocsr()


def tf_idf(x: sparse.csr_matrix, labels: np.ndarray) -> Callable:
    return TfidfTransformer().fit(x).transform


def unweighted(x: sparse.csr_matrix, labels: np.ndarray) -> Callable:
    return lambda counts: counts


logistic = partial(LogisticRegression, solver="liblinear", dual=True, max_iter=1000)


class LinearModel(NamedTuple):
    """A linear model: the longest n-gram, what weights the counts, and a classifier that takes C."""

    order: int
    weights: Callable
    classifier: Callable

    def count(self, train: list[str], test: list[str]) -> tuple[sparse.csr_matrix, sparse.csr_matrix]:
        """Which n-grams of `train` the texts contain: two matrices (texts, n-grams) of 0 and 1."""
        vectorizer = CountVectorizer(
            tokenizer=tokenize, token_pattern=None, lowercase=False, ngram_range=(1, self.order), binary=True,
            dtype=np.float32,
        )  # fmt: skip
        return vectorizer.fit_transform(train), vectorizer.transform(test)

    def fit(self, c: float, x: sparse.csr_matrix, labels: np.ndarray) -> Callable:
        """Train on counts; returns the function from other counts to their labels."""
        weigh = self.weights(x, labels)
        model = self.classifier(C=c).fit(weigh(x), labels)
        return lambda counts: model.predict(weigh(counts))


LINEAR = {
    "logistic regression, words": LinearModel(1, unweighted, logistic),
    "naive Bayes weights, bigrams": LinearModel(2, naive_bayes, logistic),
    "naive Bayes weights, trigrams": LinearModel(3, naive_bayes, logistic),
    "linear SVM, tf-idf, bigrams": LinearModel(2, tf_idf, LinearSVC),
}


class Scores(NamedTuple):
    """A line of the table: the setting that was chosen on the validation part, and the scores with it."""

    setting: Any
    validation: float
    test: float
    after_both: float  # the test part, once the validation part was trained on too
    seconds: float


def print_rows(title: str, rows: Iterable[tuple[str, Scores]], form: str) -> dict[str, Scores]:
    print(f"{title:<36}{'setting':>8}{'validation':>12}{'test':>10}{'after both':>12}{'seconds':>9}")
    rows_by_name = {}
    for name, row in rows:
        print(
            f"{name:<36}{row.setting:>8}{row.validation:>12{form}}{row.test:>10{form}}{row.after_both:>12{form}}"
            f"{row.seconds:>9.1f}",
            flush=True,
        )
        rows_by_name[name] = row
    return rows_by_name


def score_linear(method: LinearModel, train: LabelledTexts, validation: LabelledTexts, test: LabelledTexts) -> Scores:
    start = time.process_time()
    both, x_test = method.count(train.texts + validation.texts, test.texts)
    seconds = time.process_time() - start
    known = both[: len(train.texts)].getnnz(axis=0) > 0  # n-grams that the training part contains
    x, x_validation, x_known = both[: len(train.texts), known], both[len(train.texts) :, known], x_test[:, known]
    accuracies = {c: np.mean(method.fit(c, x, train.labels)(x_validation) == validation.labels) for c in INVERSE_DECAY}
    best = max(accuracies, key=accuracies.__getitem__)
    start = time.process_time()
    on_test = np.mean(method.fit(best, x, train.labels)(x_known) == test.labels)
    seconds += time.process_time() - start
    after_both = np.mean(
        method.fit(best, both, np.concatenate([train.labels, validation.labels]))(x_test) == test.labels
    )
    return Scores(best, accuracies[best], on_test, after_both, seconds)


def blocks_of(part: LabelledTexts) -> np.ndarray:
    """The block of each review, (reviews,): neighbours of one class; sorted labels."""
    return np.concatenate(
        [label * len(part.labels) + np.arange(np.sum(part.labels == label)) // BLOCK for label in (0, 1)]
    )


def folds_of(groups: np.ndarray, count: int) -> np.ndarray:
    """The fold of each review, (reviews,); a group is in one fold."""
    folds = np.empty(len(groups), int)
    for fold, (_, out) in enumerate(GroupKFold(count, shuffle=True, random_state=0).split(groups, groups=groups)):
        folds[out] = fold
    return folds


def right_out_of_fold(method: LinearModel, c: float, x: Any, labels: np.ndarray, folds: np.ndarray) -> np.ndarray:
    """1 for each review that a model trained on the other folds classifies rightly, else 0; (reviews,)."""
    right = np.empty(len(labels))
    for fold in np.unique(folds):
        out = folds == fold
        right[out] = method.fit(c, x[~out], labels[~out])(x[out]) == labels[out]
    return right


def drawn(groups: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Indices of at least `count` reviews: whole groups, in an order drawn from `seed`."""
    numbers, sizes = np.unique(groups, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(numbers))
    last = np.searchsorted(np.cumsum(sizes[order]), count)
    return np.flatnonzero(np.isin(groups, numbers[order[: last + 1]]))


def print_judges(part: LabelledTexts, count: int, rows: dict[str, Scores]) -> None:
    """How far validation is from the test part, in points, for two linear models and for the second less the first.

    `part` are all training reviews. Each is classified by a model that was trained on the folds without its group, so
    validation parts of any size can be drawn and scored without training again.
    """
    counts = {name: LINEAR[name].count(part.texts, part.texts[:1])[0] for name in PROBES}
    sizes = "".join(f"{f'sd of {size:,}':>13}" for size in JUDGES)
    print(f"\n{f'points, from {count} folds':<44}{'mean less test':>16}{'sd of folds':>13}{sizes}")
    for kind, groups in (
        ("blocks", blocks_of(part)),
        ("films", films_of(part.texts, part.labels)),
        ("singly", np.arange(len(part.labels))),
    ):
        folds = folds_of(groups, count)
        parts = {size: [drawn(groups, size, seed) for seed in range(DRAWS)] for size in JUDGES}
        right = [
            right_out_of_fold(LINEAR[name], rows[name].setting, counts[name], part.labels, folds) for name in PROBES
        ]
        test = [rows[name].test for name in PROBES]
        for name, correct, on_test in zip(
            (*PROBES, "second less first"), (*right, right[1] - right[0]), (*test, test[1] - test[0]), strict=True
        ):
            of_folds = np.std([correct[folds == fold].mean() for fold in range(count)], ddof=1)
            of_parts = [np.std([correct[chosen].mean() for chosen in parts[size]]) for size in JUDGES]
            cells = "".join(f"{100 * x:>13.2f}" for x in (of_folds, *of_parts))
            print(f"{kind + ': ' + name:<44}{100 * (correct.mean() - on_test):>+16.2f}{cells}", flush=True)


def imdb(path: str | None, seed: int, folds: int | None) -> None:
    path = fetch(URL, CHECKSUM, FILENAME) if path is None else path
    parts = {split: LabelledTexts(*part) for split, part in read_splits(path, ("train", "test")).items()}
    train, validation = (LabelledTexts(*part) for part in hold_out(*parts["train"], VALIDATION, seed, path))
    names = PROBES if folds else tuple(LINEAR)
    scored = ((name, score_linear(LINEAR[name], train, validation, parts["test"])) for name in names)
    rows = print_rows("accuracy", scored, ".2%")
    if folds:
        print_judges(parts["train"], folds, rows)


def ppmd(order: int) -> Callable[[bytes], bytes]:
    return partial(pyppmd.compress, max_order=order, mem_size=MEMORY)


def saved_image(data: bytes, form: str, **options: Any) -> bytes:
    """The file that holds the lines of `load_photos` as an image."""
    lines = np.frombuffer(data, np.uint8).reshape(-1, COLORS, WIDTH)
    Image.fromarray(np.ascontiguousarray(lines.transpose(0, 2, 1))).save(file := io.BytesIO(), form, **options)
    return file.getvalue()


Compressors = dict[str, dict[Any, Callable[[bytes], bytes]]]
COMPRESSORS: Compressors = {
    "gzip": {9: partial(zlib.compress, level=9)},
    "bzip2": {9: bz2.compress},
    "xz, extreme": {9: partial(lzma.compress, preset=9 | lzma.PRESET_EXTREME)},
    "PPMd (variant I), by order": {order: ppmd(order) for order in ORDERS},
}

IMAGES: Compressors = {
    "PNG": {9: partial(saved_image, form="PNG", compress_level=9)},
    "WebP, lossless": {100: partial(saved_image, form="WEBP", lossless=True, quality=100, method=6)},
}


def bits_per_byte(compress: Callable[[bytes], bytes], before: bytes, part: bytes) -> float:
    """How many bits a byte of `part` adds to the compressed size of `before`."""
    return 8 * (len(compress(before + part)) - len(compress(before))) / len(part)


def score_compressor(settings: dict[Any, Callable[[bytes], bytes]], corpus: Corpus) -> Scores:
    train, validation, test = (x.tobytes() for x in (corpus.train, corpus.validation, corpus.test))
    scores = {setting: bits_per_byte(compress, train, validation) for setting, compress in settings.items()}
    best = min(scores, key=scores.__getitem__)
    start = time.process_time()
    on_test = bits_per_byte(settings[best], train, test)
    seconds = time.process_time() - start
    return Scores(best, scores[best], on_test, bits_per_byte(settings[best], train + validation, test), seconds)


def compressors_on(corpus: Corpus, compressors: Compressors) -> None:
    scored = ((name, score_compressor(settings, corpus)) for name, settings in compressors.items())
    print_rows(corpus.name, scored, ".3f")


def on_images() -> dict[str, float]:
    """The test accuracy of two methods on flattened images, with C chosen on the validation images."""
    train, validation, test = ((part.pixels.reshape(len(part.labels), -1) / 16, part.labels) for part in load_digits())
    scores = {}
    for name, kind in (("logistic regression", partial(LogisticRegression, max_iter=1000)), ("SVM", SVC)):
        fitted = [kind(C=c).fit(*train) for c in OF_IMAGES]
        scores[name] = max(fitted, key=lambda method: method.score(*validation)).score(*test)
    return scores


def harmonic_clubs(graph: Any, known: np.ndarray, clubs: np.ndarray) -> float:
    """The accuracy of the harmonic function on the members (n,) of a graph of networkx that are not in `known`."""
    import networkx

    graph = networkx.Graph(graph.edges)  # without weights
    graph.add_nodes_from(range(len(clubs)))
    networkx.set_node_attributes(graph, dict(zip(known.tolist(), clubs[known].tolist(), strict=True)), "label")
    predicted = networkx.algorithms.node_classification.harmonic_function(graph)
    right = {member: club == clubs[member] for member, club in zip(graph, predicted, strict=True)}
    return float(np.mean([right[member] for member in range(len(clubs)) if member not in known]))


def units() -> None:
    import networkx

    for name, accuracy in on_images().items():
        print(f"images: {name} {accuracy:.2%}")
    graph = networkx.karate_club_graph()
    clubs = np.array([int(graph.nodes[member]["club"] == "Officer") for member in graph])
    print(f"graph: harmonic function {harmonic_clubs(graph, np.array([0, len(clubs) - 1]), clubs):.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("imdb", "enwik8", "photos", "units"))
    parser.add_argument("--data", metavar="PATH", help="as for the program (default: downloaded)")
    parser.add_argument("--seed", metavar="N", type=int, help="imdb: draws the validation reviews (default: 0)")
    parser.add_argument("--folds", metavar="K", type=int, help="imdb: how noisy validation parts are, from K folds")
    parser.add_argument("--bytes", metavar="N", type=int, help="enwik8: the first N bytes; 0: all (default: 4,000,000)")
    args = parser.parse_args()
    for name, tasks in (
        ("data", ("imdb", "enwik8")),
        ("seed", ("imdb",)),
        ("folds", ("imdb",)),
        ("bytes", ("enwik8",)),
    ):
        if getattr(args, name) is not None and args.task not in tasks:
            parser.error(f"--{name}: only for {' and '.join(tasks)}")
    if args.folds is not None and not 2 <= args.folds <= MAX_FOLDS:
        parser.error(f"--folds: expected 2 to {MAX_FOLDS}")
    if min(args.seed or 0, args.bytes or 0) < 0:
        parser.error("--seed, --bytes: expected at least 0")
    with threadpool_limits(1):
        try:
            if args.task == "imdb":
                imdb(args.data, args.seed or 0, args.folds)
            elif args.task == "enwik8":
                limit = BYTES if args.bytes is None else args.bytes or None
                compressors_on(load_enwik8(args.data, limit), COMPRESSORS)
            elif args.task == "photos":
                compressors_on(load_photos(), COMPRESSORS | IMAGES)
            else:
                units()
        except DataError as error:
            raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()
