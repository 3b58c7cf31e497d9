import numpy as np
import pytest

from scratchformer.data.films import films_of


def test_reviews_of_one_film_are_found_by_its_names():
    """Two films with reviews of both classes, and one review without names."""
    marple, holmes = "we met Marple in Cornwall", "we met Holmes on Dartmoor"
    texts, labels = [marple, marple, holmes, "dull", holmes, marple], np.array([0, 0, 0, 0, 1, 1])
    a, b, c, d, e, f = films_of(texts, labels)
    assert a == b == f
    assert c == e
    assert len({a, c, d}) == 3


def test_reviews_far_apart_are_not_of_one_film():
    """One class of a film is in one place of the archive."""
    texts = ["we met Marple again", *["dull"] * 40, "we met Marple again"]
    films = films_of(texts, np.zeros(42, int))
    assert films[0] != films[-1]


def test_names_that_many_reviews_share_tell_nothing():
    films = films_of(["we met Tom again"] * 61, np.zeros(61, int))
    assert len(set(films)) == 61
    assert len(set(films_of(["we met Tom again"] * 20, np.zeros(20, int)))) == 1


def test_no_reviews_and_one_class():
    assert len(films_of([], np.zeros(0, int))) == 0
    assert len(set(films_of(["we met Marple", "we met Marple"], np.ones(2, int)))) == 1


@pytest.mark.parametrize("labels", [[0, 1, 0], [0, 1]])
def test_labels_that_do_not_fit(labels):
    with pytest.raises(ValueError, match="labels: expected one for each of 3 texts, in ascending order"):
        films_of(["a", "b", "c"], np.array(labels))
