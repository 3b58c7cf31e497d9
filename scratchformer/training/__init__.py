"""Training: the loop, replicas, snapshots, metrics, and programs made of them."""

from ..parallel.precision import LossScale
from ..parallel.replicas import Replicas
from .dynamic import evaluate_dynamic, observe_gradients
from .ensemble import MODELS_OPTION, Ensemble
from .estimate import Estimate, estimate
from .evaluate import (
    evaluate_classifier,
    evaluate_language_model,
    evaluate_pretraining,
    evaluate_transformer_xl,
    evaluate_translation,
    mean_loss,
    predict_classes,
    scores_of_classes,
)
from .language import LanguageProgram
from .loop import train
from .metrics import Metrics, read_metrics
from .program import Program
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
from .stacking import stack_weights, stacked
from .stage import MUON_OPTIONS, VALIDATION_OPTION
from .state import Diverged

__all__ = [
    "MODELS_OPTION",
    "MUON_OPTIONS",
    "VALIDATION_OPTION",
    "Diverged",
    "Ensemble",
    "Estimate",
    "LanguageProgram",
    "LossScale",
    "Metrics",
    "Program",
    "Replicas",
    "Snapshot",
    "SnapshotError",
    "average_snapshots",
    "best_snapshot",
    "estimate",
    "evaluate_classifier",
    "evaluate_dynamic",
    "evaluate_language_model",
    "evaluate_pretraining",
    "evaluate_transformer_xl",
    "evaluate_translation",
    "kept_snapshots",
    "load_model",
    "load_snapshot",
    "mean_loss",
    "observe_gradients",
    "predict_classes",
    "read_metrics",
    "restore",
    "save_snapshot",
    "scores_of_classes",
    "stack_weights",
    "stacked",
    "train",
]
