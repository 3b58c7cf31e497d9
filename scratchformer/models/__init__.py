"""The models, each readable in one sitting."""

from .body import Body
from .classifier import Classifier
from .language_model import LanguageModel

__all__ = ["Body", "Classifier", "LanguageModel"]
