"""All areas of the campaign."""

from archives import Archives
from folders import Folders
from planted import Planted

AREAS = (Archives, Folders, Planted)
