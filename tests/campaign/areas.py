"""All areas of the campaign."""

from archives import Archives
from kills import Kills
from library import Library
from planted import Planted

AREAS = (Archives, Kills, Library, Planted)
