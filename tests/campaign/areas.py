"""All areas of the campaign."""

from archives import Archives
from options import Options
from planted import Planted
from surroundings import Surroundings

AREAS = (Archives, Options, Planted, Surroundings)
