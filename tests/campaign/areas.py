"""All areas of the campaign, in the order in which they take turns."""

from archives import Archives
from library import Library

AREAS = (Archives, Library)
