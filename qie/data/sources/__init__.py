"""Sources: anything that yields rows. Opening one is cheap; the bytes of a row are read on request."""

from qie.data.sources.kinds import open_source
from qie.data.sources.mixture import SourceSpec
from qie.data.sources.source import Source, source_name

__all__ = ["Source", "SourceSpec", "open_source", "source_name"]
