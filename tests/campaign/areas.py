"""All areas of the campaign."""

from archives import Archives
from hours import Generations, Hours, HoursXL
from kills import Kills
from planted import Planted
from published import Published

AREAS = (Archives, Published, Kills, Hours, HoursXL, Generations, Planted)
