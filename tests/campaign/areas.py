"""All areas of the campaign."""

from archives import Archives
from folders import Folders
from hours import Generations, Hours, HoursXL
from kills import Kills
from library import Library
from options import Options
from planted import Planted
from power import Power
from published import Published
from ranks import LostRanks
from surroundings import Surroundings

AREAS = (
    *(Archives, Published, Folders, Power, Options, Surroundings, Library, Kills),
    *(Hours, HoursXL, Generations, Planted, LostRanks),
)
