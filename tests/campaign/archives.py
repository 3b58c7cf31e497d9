"""Data that is damaged, cut short, enormous, or not what its name says."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

from area import Area, Case

from scratchformer.data import load_enwik8


class Archives(Area):
    name = "archives"

    def prepare(self, folder: Path) -> None:
        self.text = gzip.compress(bytes(random.Random(0).choices(b"abcdefgh \n", k=50_000)))

    def case(self, draw: random.Random, folder: Path) -> Case:
        path = folder / "enwik8.gz"
        end = draw.randrange(1, len(self.text))
        path.write_bytes(self.text[:end])
        return Case(f"enwik8.gz cut at byte {end}", lambda: load_enwik8(path), names=(str(path),), size=end)
