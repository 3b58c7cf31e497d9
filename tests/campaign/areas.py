"""All areas of the campaign."""

from archives import Archives
from folders import Folders
from planted import Planted
from power import Power

AREAS = (Archives, Folders, Planted, Power)
