"""All areas of the campaign."""

from archives import Archives
from folders import Folders
from hours import Generations, Hours, HoursXL
from kills import Kills
from planted import Planted
from power import Power
from published import Published

AREAS = (Archives, Published, Folders, Power, Kills, Hours, HoursXL, Generations, Planted)
