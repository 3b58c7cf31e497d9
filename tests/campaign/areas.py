"""All areas of the campaign."""

from archives import Archives
from planted import Planted

AREAS = (Archives, Planted)
