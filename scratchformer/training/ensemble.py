"""An ensemble: several models of one kind, trained one after another, whose predictions are combined.

They start from different weights and learn from different batches, so their mistakes are partly different. In the mean
of their predictions, these mistakes partly cancel.

Source: Hansen, Salamon, "Neural network ensembles", 1990.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

from .program import Program
from .readers import MEAN, MEMBER, finished_members
from .settings import Run
from .snapshot import save_snapshot
from .stage import Stage


class Ensemble(Program):
    """A program that trains `models` models, and scores all of them together when the last one has been trained.

    Each model is a stage. With more than one, each has a subfolder in the run's folder. A subclass puts MODELS_OPTION
    among its `options`. Its `load` sets `data`, and `vocabulary` if there is one; all models share these two, and
    nothing else. To combine predictions, it uses `each`. number: which of the models this is, from 1.
    """

    data: Any = None

    def __init__(self, run: Run, number: int = 1) -> None:
        super().__init__(run)
        if not hasattr(run, "models"):
            raise TypeError(f"{type(self).__name__}: an ensemble must have MODELS_OPTION among its options")
        self.number = number
        if run.models > 1:
            self.folder = f"{MEMBER}{number}"
        if number > 1:
            self.key = self.key.fold("model", number)

    @property
    def is_last(self) -> bool:
        return self.number == self.run.models

    @property
    def heading(self) -> str:
        return f"{self.run.models} models: " if self.folder else ""

    @property
    def which(self) -> str:
        """The start of a line about this model only."""
        return f"model {self.number} of {self.run.models}: " if self.folder else ""

    def member(self, number: int) -> Self:
        """The program that trains this model of the ensemble."""
        if number == self.number:
            return self
        other = type(self)(self.run, number)
        other.data, other.vocabulary = self.data, self.vocabulary
        return other

    def stages(self) -> list[Stage]:
        return [self.member(number) for number in range(1, self.run.models + 1)]

    def scored_stages(self) -> list[Stage]:
        finished_members(self.run.out)  # raises an error for one that is not
        return [self.member(self.run.models)]

    def each(self) -> Iterator[Self]:
        """Every model up to this one, in order, with the weights that are scored."""
        for number in range(1, self.number):
            other = self.member(number)
            other.load_finished()
            yield other
        yield self

    def save(self) -> None:
        """Also remove the means of later models: they are not those of this run until they have been trained again."""
        super().save()
        for number in range(self.number + 1, self.run.models + 1):
            (self.run.out / f"{MEMBER}{number}" / MEAN).unlink(missing_ok=True)

    def choose(self) -> None:
        super().choose()
        if self.folder and not (self.out / MEAN).is_file():  # which says that the model has been trained to its end
            save_snapshot(self.out / MEAN, self.model, **self.identity())


MODELS_OPTION = {
    "models": dict(
        type=int,
        default=1,
        metavar="N",
        least=1,
        most=100,
        help="train N models, an ensemble (default: the preset's, or 1)",
    )
}
