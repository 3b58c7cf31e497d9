"""All areas of the campaign, in the order in which they take turns."""

from archives import Archives
from published import Published

AREAS = (Archives, Published)
