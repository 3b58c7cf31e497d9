"""Ensembles: several models of one kind, trained one after another, whose predictions are combined.

They start from different weights and learn from different batches, so their mistakes are partly different. In the mean
of their predictions, these mistakes partly cancel. Each is a stage of one run, which has the setting `models`, their
number; with a single model, the run itself is the stage.

Source: Hansen, Salamon, "Neural network ensembles", 1990.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from ..data import Subwords
from ..models import EncoderDecoder
from ..shell.text import with_article
from ..training import Run, load_model
from ..training.readers import MEAN, load_vocabulary, mean_snapshot
from ..training.settings import read_settings

MEMBER = "model-"  # and its number: the folder of a model
MODELS_OPTION = {
    "models": dict(
        type=int,
        default=1,
        metavar="N",
        min=1,
        max=100,
        help="train N models, an ensemble (default: the preset's, or 1)",
    )
}


def member(run: Run, number: int) -> Run:
    """The stage that trains this model of an ensemble, from 1. run: of the ensemble, or one of its stages."""
    whole = run.parent or run
    if whole.models == 1:
        return whole
    return whole.stage(f"{MEMBER}{number}", *(("model", number) if number > 1 else ()))


def other_members(run: Run, make: Callable[[Run, Any], Any], data: Any) -> Iterator[Any]:
    """The models of an ensemble but the last, with the weights that are scored, on the run's device.

    make: called with the stage and the data, returns a new model, as the `model` of a program does. Raises ValueError
    for a model that is not trained to its end.
    """
    for number in range(1, run.models):
        stage = member(run, number)
        stage.ranks.from_first(partial(expect_finished, stage.out, run.models))
        yield load_finished(stage, make(stage, data))


def load_finished(run: Run, model: Any) -> Any:
    """The model of a stage on the run's device, with the weights that are scored; rank 0 reads them for all ranks."""
    run.end_limit()
    run.ranks.from_first(lambda: run.load_weights(model, mean_snapshot(run.out)))
    run.ranks.send_first(model.flat.data)
    return model.to(run.device)


def expect_finished(folder: Path, count: int) -> None:
    """Raise ValueError for a model of an ensemble of `count` that is not trained to its end."""
    if not (folder / MEAN).is_file():
        raise ValueError(f"{folder.name} of {count} is not trained to its end: continue with --resume {folder.parent}")


def load_translators(run: Path, program: ModuleType | None = None) -> tuple[list[EncoderDecoder], Subwords]:
    """The encoder-decoder of a run, or all those of an ensemble, and their vocabulary. program: see `load_model`.

    Raises ValueError for a model that cannot translate and for an ensemble that is not trained to its end, since the
    others alone are another ensemble; and the errors of loading.
    """
    models, folders = [], [run]
    if any(run.glob(f"{MEMBER}*")):
        count = read_settings(run, "models")["models"]
        folders = [run / f"{MEMBER}{number}" for number in range(1, count + 1)]
        for folder in folders:
            expect_finished(folder, count)
    for folder in folders:
        model, state = load_model(mean_snapshot(folder), program=program)
        if not isinstance(model, EncoderDecoder):
            raise ValueError(f"{run} holds {with_article(type(model))}, which cannot translate")
        models.append(model)
    return models, load_vocabulary(run, state)
