"""All areas of the campaign."""

from archives import Archives
from hours import Generations, Hours, HoursXL
from kills import Kills
from planted import Planted

AREAS = (Archives, Kills, Hours, HoursXL, Generations, Planted)
