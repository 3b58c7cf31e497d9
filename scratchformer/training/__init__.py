"""Training runs: settings, snapshots, metrics, evaluation, and the start of programs."""

from ..parallel.diagnose import Diverged
from ..parallel.precision import LossScale
from ..parallel.replicas import Replicas
from .estimate import Estimate, estimate
from .evaluate import (
    evaluate_classifier,
    evaluate_language_model,
    evaluate_pretraining,
    evaluate_transformer_xl,
    evaluate_translation,
    mean_loss,
)
from .language import load_corpus, write_sample
from .metrics import Metrics, read_metrics
from .run import Run, as_text
from .settings import MUON_OPTIONS, VALIDATION_OPTION
from .snapshot import (
    Snapshot,
    SnapshotError,
    average_snapshots,
    best_snapshot,
    kept_snapshots,
    load_model,
    load_snapshot,
    restore,
    save_snapshot,
)
from .start import start

__all__ = [
    "MUON_OPTIONS",
    "VALIDATION_OPTION",
    "Diverged",
    "Estimate",
    "LossScale",
    "Metrics",
    "Replicas",
    "Run",
    "Snapshot",
    "SnapshotError",
    "as_text",
    "average_snapshots",
    "best_snapshot",
    "estimate",
    "evaluate_classifier",
    "evaluate_language_model",
    "evaluate_pretraining",
    "evaluate_transformer_xl",
    "evaluate_translation",
    "kept_snapshots",
    "load_corpus",
    "load_model",
    "load_snapshot",
    "mean_loss",
    "read_metrics",
    "restore",
    "save_snapshot",
    "start",
    "write_sample",
]
