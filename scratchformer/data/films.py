"""Groups of reviews of IMDb about the same film, recognised by the names in the reviews."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

NAME = re.compile("(?<=[a-z,] )[A-Z][a-z]+")  # a capitalised word inside a sentence
MIN_TEXTS, MAX_TEXTS = 2, 60  # texts that contain a name; a word that more contain says little about the film
NEAR = 30  # reviews of one film and class are neighbours in the archive, and there are at most 30
ALIKE_NEAR, ALIKE_FAR = 0.25, 0.3  # the least similarity of neighbours, and of groups of the two classes


def films_of(texts: Sequence[str], labels: np.ndarray) -> np.ndarray:
    """A number for the film of each review, (reviews,), as guessed from the names that reviews share.

    texts: in the order of the archive, all of class 0 first. labels: (reviews,), 0 or 1. Neighbours of one class with
    similar names are of one film. Such groups of the two classes are of one film if each is the other's most similar.
    Similarity is the cosine of the counts of names, weighted by tf-idf.
    """
    from scipy import sparse
    from scipy.sparse.csgraph import connected_components

    n = len(labels)
    if len(texts) != n or (np.diff(labels) < 0).any():
        raise ValueError(f"labels: expected one for each of {len(texts)} texts, in ascending order")
    if not n:
        return np.zeros(0, int)
    names = _name_vectors(texts)
    alike = sparse.triu(names @ names.T, 1).tocoo()
    near = (labels[alike.row] == labels[alike.col]) & (alike.col - alike.row <= NEAR) & (alike.data > ALIKE_NEAR)
    links = sparse.coo_matrix((alike.data[near], (alike.row[near], alike.col[near])), (n, n))
    count, group = connected_components(links, directed=False)
    centres = _normalised(sparse.csr_matrix((np.ones(n), (group, np.arange(n)))) @ names)
    film = np.arange(count)
    first = group[np.argmax(labels)]  # groups are numbered in the order of reviews: from here on, of class 1
    if 0 < first < count:
        alike = (centres[:first] @ centres[first:].T).tocsr()
        best, back = (np.asarray(alike.argmax(axis=axis)).ravel() for axis in (1, 0))
        similarity = alike.max(axis=1).toarray().ravel()
        mutual = np.flatnonzero((back[best] == np.arange(first)) & (similarity > ALIKE_FAR))
        film[first + best[mutual]] = mutual
    return film[group]


def _name_vectors(texts: Sequence[str]) -> Any:
    """The names in each text, a sparse matrix (texts, names) with rows of length 1: (1 + log count) · idf."""
    from scipy import sparse

    counts = [Counter(NAME.findall(text)) for text in texts]
    containing = Counter(name for names in counts for name in names)
    index = {name: i for i, name in enumerate(name for name, k in containing.items() if MIN_TEXTS <= k <= MAX_TEXTS)}
    rows, columns, values = [], [], []
    for i, names in enumerate(counts):
        for name, k in names.items():
            if name in index:
                rows.append(i)
                columns.append(index[name])
                values.append((1 + np.log(k)) * (1 + np.log((1 + len(texts)) / (1 + containing[name]))))
    return _normalised(sparse.csr_matrix((values, (rows, columns)), (len(texts), max(1, len(index)))))


def _normalised(x: Any) -> Any:
    """A sparse matrix with each row divided by its length, unless that is 0."""
    from scipy import sparse

    lengths = np.sqrt(np.asarray(x.multiply(x).sum(axis=1)).ravel())
    return sparse.diags(1 / np.where(lengths > 0, lengths, 1)) @ x
