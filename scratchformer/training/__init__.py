"""Training: the loop, replicas, snapshots, metrics."""

from .estimate import Estimate, estimate
from .evaluate import evaluate_classifier, evaluate_language_model
from .loop import Diverged, train
from .metrics import Metrics, read_metrics
from .replicas import Replicas
from .snapshot import Snapshot, SnapshotError, best_snapshot, load_model, load_snapshot, save_snapshot

__all__ = [
    "Diverged",
    "Estimate",
    "Metrics",
    "Replicas",
    "Snapshot",
    "SnapshotError",
    "best_snapshot",
    "estimate",
    "evaluate_classifier",
    "evaluate_language_model",
    "load_model",
    "load_snapshot",
    "read_metrics",
    "save_snapshot",
    "train",
]
