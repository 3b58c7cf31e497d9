"""All areas of the campaign."""

from archives import Archives
from kills import Kills
from planted import Planted

AREAS = (Archives, Kills, Planted)
