"""The evidence of a linear model for every word of a text."""

import inspect
import itertools

import numpy as np
import pytest
from scipy import sparse

from scratchformer.data import DataError
from scratchformer.notation import DerivationError, check_equations
from scratchformer.records import find_evidence, fit_evidence
from scratchformer.records.evidence import FOLDS, Evidence, by_class, count, fit, keys_of, log_ratios, logistic

LARGEST = (1 << 20) - 2  # the largest id


def make_texts(number, seed=0, vocabulary=9):
    """Texts of 3 to 12 words. Texts of class 1 have more large ids."""
    draw = np.random.default_rng(seed)
    labels = np.arange(number) % 2
    p = np.stack([np.arange(vocabulary, 0, -1), np.arange(1, vocabulary + 1)]) / np.arange(vocabulary + 1).sum()
    texts = [draw.choice(vocabulary, draw.integers(3, 13), p=p[label]).astype(np.int32) for label in labels]
    return texts, labels


def ngrams(ids, order):
    """By definition: the n-gram that ends at each place, for each n, or None."""
    ids = ids.tolist()
    return [
        [tuple(ids[t + 1 - n : t + 1]) if t + 1 >= n else None for n in range(1, order + 1)] for t in range(len(ids))
    ]


# Keys


def test_every_ngram_has_a_key_of_its_own():
    """Also those of the smallest and the largest ids, and those of other lengths."""
    values = [0, 1, 2, LARGEST - 1, LARGEST]
    found = {}
    for text in itertools.product(values, repeat=3):
        ids = np.array(text, np.int32)
        for key, ngram in zip(keys_of(ids, 3).ravel().tolist(), itertools.chain(*ngrams(ids, 3)), strict=True):
            assert found.setdefault(key, ngram) == ngram
    assert found.pop(0) is None and min(found) > 0
    assert len(found) == len(set(found.values())) == 5 + 5**2 + 5**3


def test_a_text_shorter_than_the_longest_ngrams():
    keys = keys_of(np.array([3, 4]), 3)
    assert keys.shape == (2, 3) and keys[0, 0] and keys[1, 1]
    assert not keys[0, 1:].any() and not keys[1, 2]
    assert keys_of(np.array([], int), 3).shape == (0, 3)


# Counts and log-ratios


def test_counts_of_texts_that_contain_an_ngram():
    texts = [np.array(ids) for ids in ([5, 6, 5, 6], [6, 5, 6], [7, 5], [5])]
    counts = count(texts, order=2)
    keys = {name: int(keys_of(np.array(name), len(name))[-1, -1]) for name in ((5,), (6,), (5, 6), (6, 5))}
    assert sorted(keys.values()) == counts.keys.tolist()  # neither 7 nor (7, 5), which are in one text
    contains = dict(zip(counts.keys.tolist(), counts.x.toarray().T.tolist(), strict=True))
    assert contains[keys[5,]] == [1, 1, 1, 1]
    assert contains[keys[6,]] == contains[keys[5, 6]] == contains[keys[6, 5]] == [1, 1, 0, 0]
    assert len(count(texts, order=2, minimum=1).keys) == 6
    with pytest.raises(DataError, match="evidence: no n-gram of up to 2 words is in 5 of the 4 texts"):
        count(texts, order=2, minimum=5)


def test_log_ratios_by_hand():
    """In three texts of class 1 the n-grams are in 3, 1, 0; in two of class 0, in 0, 1, 2."""
    x = sparse.csr_matrix([[1, 1, 0], [1, 0, 0], [0, 1, 1], [1, 0, 0], [0, 0, 1]])
    found = log_ratios(x, np.array([1, 1, 0, 1, 0]))
    np.testing.assert_allclose(found, np.log([4 / 7, 2 / 7, 1 / 7]) - np.log([1 / 6, 2 / 6, 3 / 6]), rtol=1e-14)


# The linear model


def drawn(seed=0):
    """Arguments of `logistic`: parameters, x, its transpose, y, c."""
    draw = np.random.default_rng(seed)
    x = sparse.csr_matrix(draw.standard_normal((7, 5)) * draw.integers(0, 2, (7, 5)))
    return draw.standard_normal(6), x, x.T.tocsr(), draw.integers(0, 2, 7).astype(float), 0.3


def test_the_equations_of_the_linear_model():
    parameters, x, _, y, c = arguments = drawn()
    loss, gradient = logistic(*arguments)
    names = {"x": x.toarray(), "y": y, "c": c, "loss": loss}
    names |= {"u": parameters[:-1], "bias": parameters[-1], "slope": gradient[:-1], "slope0": gradient[-1]}
    docstring = inspect.getdoc(logistic)
    report = check_equations(docstring, names)
    assert report.worst < 1e-12
    assert [row.kind for row in report.rows].count("compared") == 3  # loss, slope, slope0
    for right, wrong in (("c (p_b − y_b)", "p_b − y_b"), ("x_bg + u_g", "x_bg"), ("1/2 Σ_g u_g²", "Σ_g u_g²")):
        assert right in docstring
        with pytest.raises(DerivationError, match="is not true"):
            check_equations(docstring.replace(right, wrong), names)


def test_the_gradient_of_the_linear_model():
    parameters, *rest = drawn(1)
    _, gradient = logistic(parameters, *rest)
    for i in range(len(parameters)):
        step = 1e-5 * np.eye(len(parameters))[i]
        numeric = (logistic(parameters + step, *rest)[0] - logistic(parameters - step, *rest)[0]) / 2e-5
        assert gradient[i] == pytest.approx(numeric, rel=1e-7, abs=1e-9)


def test_the_linear_model_is_that_of_scikit_learn():
    """Both stop when the gradient is small, so the weights differ by about 1e-3 of the largest."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    texts, labels = make_texts(60)
    counts, c = count(texts, 2), 0.1
    ours = fit(counts, labels, 2, c)
    ratios = log_ratios(counts.x, labels)
    theirs = linear_model.LogisticRegression(C=c, tol=1e-8, max_iter=10_000)
    theirs.fit(counts.x.multiply(ratios).toarray(), labels)
    weights = theirs.coef_[0] * ratios
    np.testing.assert_allclose(ours.weights, weights, atol=2e-3 * np.abs(weights).max())
    assert ours.bias == pytest.approx(theirs.intercept_[0], abs=2e-3)


def test_only_the_given_rows_are_fitted():
    texts, labels = make_texts(40)
    rows, counts = np.arange(5, 33), count(texts, 2)
    part = fit(counts, labels, 2, rows=rows)
    alone = fit(counts._replace(x=counts.x[rows]), labels[rows], 2)
    np.testing.assert_array_equal(part.weights, alone.weights)
    assert part.bias == alone.bias


# Evidence


def test_the_evidence_of_a_text_adds_up_to_its_logit():
    """With other texts than those of the model: what they contain for the first time has no weight."""
    texts, labels = make_texts(50)
    model = fit(count(texts, 3), labels, 3)
    weight = dict(zip(model.keys.tolist(), model.weights.tolist(), strict=True))
    for ids in make_texts(20, seed=1, vocabulary=12)[0]:
        contained = {key for key in keys_of(ids, 3).ravel().tolist() if key}
        logit = sum(weight.get(key, 0.0) for key in contained)
        evidence = model.of(ids)
        assert evidence.dtype == np.float32 and evidence.shape == (len(ids), 3)
        assert evidence.sum(dtype=np.float64) == pytest.approx(logit, abs=1e-6)


def test_an_ngram_counts_where_it_ends_first():
    key = {ids: int(keys_of(np.array(ids), 2)[-1, len(ids) - 1]) for ids in ((4,), (4, 5))}
    keys, weights = zip(*sorted({key[4,]: 2.0, key[4, 5]: -3.0}.items()), strict=True)
    model = Evidence(np.array(keys), np.array(weights), bias=0.5, order=2)
    found = model.of(np.array([9, 4, 5, 4, 5, 4])).tolist()
    assert found == [[0, 0], [2, 0], [0, -3], [0, 0], [0, 0], [0, 0]]
    assert model.of(np.array([], int)).shape == (0, 2)


def evidence_of_training_texts(texts, labels, folds):
    found = find_evidence(texts, labels, order=2, folds=folds)[0]
    biases = found.logits - [own.sum(dtype=np.float64) for own in found.evidence]
    each = [np.unique(np.round(biases[folds == fold], 9)) for fold in np.unique(folds)]
    assert all(len(own) == 1 for own in each) and len(np.unique(each)) == len(each)  # one for the model of each fold
    return found.evidence


def same(first, second):
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def test_evidence_does_not_know_the_labels_of_its_fold():
    """With all labels of a fold changed, the evidence in it stays the same, bit for bit; that in others changes."""
    texts, labels = make_texts(40)
    folds = np.arange(40) // 2 % 4
    before = evidence_of_training_texts(texts, labels, folds)
    for fold in range(4):
        own = folds == fold
        after = evidence_of_training_texts(texts, np.where(own, 1 - labels, labels), folds)
        for other in range(4):
            members = np.flatnonzero(folds == other).tolist()
            assert same([before[i] for i in members], [after[i] for i in members]) == (other == fold)


def test_evidence_in_others_is_of_a_model_of_all_training_texts():
    texts, labels = make_texts(40)
    first, second = make_texts(5, seed=1)[0], make_texts(3, seed=2)[0]
    train, *others = find_evidence(texts, labels, [first, second], order=3, c=0.2)
    whole = fit(count(texts, 3), labels, 3, 0.2)
    for found, asked in zip(others, (first, second), strict=True):
        assert same(found.evidence, [whole.of(ids) for ids in asked])
        sums = [whole.of(ids).sum(dtype=np.float64) for ids in asked]
        np.testing.assert_allclose(found.logits, np.array(sums) + whole.bias, rtol=1e-12)
    assert abs(whole.bias) > 1e-3
    one_more = fit_evidence(texts, labels, order=3, c=0.2).read(second)
    assert same(others[1].evidence, one_more.evidence) and same(others[1].logits, one_more.logits)
    assert [x.shape for x in train.evidence] == [(len(ids), 3) for ids in texts]
    assert not same(train.evidence, [whole.of(ids) for ids in texts])


def test_folds_are_neighbours_and_have_their_share_of_each_class():
    labels = np.repeat([0, 1], [50, 101])
    folds = by_class(labels)
    assert set(folds) == set(range(FOLDS))
    for label, sizes in (0, {5}), (1, {10, 11}):
        own = folds[labels == label]
        assert (np.diff(own) >= 0).all() and set(np.bincount(own)) == sizes
    texts, labels = make_texts(40)
    default, given = find_evidence(texts, labels)[0], find_evidence(texts, labels, folds=by_class(labels))[0]
    assert same(default.evidence, given.evidence) and same(default.logits, given.logits)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"order": 0}, ValueError, "order: expected a number >= 1"),
        ({"order": 4}, ValueError, "order: expected at most 3, got 4"),
        ({"c": 0}, ValueError, "c: expected a finite number > 0, got 0"),
        ({"labels": np.zeros(20, int)}, ValueError, r"labels: expected 0 and 1, got \[0\]"),
        ({"labels": np.arange(20) % 3}, ValueError, r"labels: expected 0 and 1, got \[0, 1, 2\]"),
        ({"labels": np.arange(19) % 2}, ValueError, r"labels: expected \(20\), got \(19,\)"),
        ({"folds": np.arange(19)}, ValueError, r"folds: expected \(20\), got \(19,\)"),
        ({"folds": np.full(20, 3)}, ValueError, "folds: expected at least two, got one"),
        ({"folds": np.arange(20) % 2, "labels": np.arange(20) % 2}, ValueError, "folds: .* both labels .* fold 0"),
        ({"others": [[np.array([1.5])]]}, TypeError, "texts: expected integers"),
        ({"others": [[np.array([1, -1])]]}, ValueError, "ids: expected .* 0, got -1"),
        ({"others": [[np.array([LARGEST + 1])]]}, ValueError, "ids: expected at most 1,048,574, got 1048575"),
        (
            {"train": [np.array([i]) for i in range(20)]},
            DataError,
            "no n-gram of up to 3 words is in 2 of the 20",
        ),
    ],
)
def test_what_does_not_fit(changed, error, message):
    texts, labels = make_texts(20)
    with pytest.raises(error, match=message):
        find_evidence(**{"train": texts, "labels": labels} | changed)
    if changed.keys() <= {"train", "labels", "order", "c"}:
        with pytest.raises(error, match=message):
            fit_evidence(**{"train": texts, "labels": labels} | changed)


def test_texts_that_the_linear_model_cannot_read():
    """An id beyond 20 bits would count as another n-gram."""
    model = fit_evidence(*make_texts(20))
    for wrong, error in (([2, 3], TypeError), (np.array([1.5]), TypeError), (np.array([3 + (1 << 20)]), ValueError)):
        for read in model.of, lambda ids: model.read([ids]), lambda ids: model.logits([ids]):
            with pytest.raises(error, match=r"^(texts|ids): expected"):
                read(wrong)
