"""Sources: anything that yields rows. Opening one is cheap; the bytes of a row are read on request."""

from qie.data.sources.concepts import with_concepts
from qie.data.sources.guess import Guess, guess
from qie.data.sources.kinds import open_laid_out, open_source
from qie.data.sources.layouts import PRESETS, Layout, Names, Preset
from qie.data.sources.mixture import SourceSpec
from qie.data.sources.source import Source, source_name, source_notes

__all__ = [
    "PRESETS",
    "Guess",
    "Layout",
    "Names",
    "Preset",
    "Source",
    "SourceSpec",
    "guess",
    "open_laid_out",
    "open_source",
    "source_name",
    "source_notes",
    "with_concepts",
]
