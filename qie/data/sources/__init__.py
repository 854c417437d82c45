"""Sources: anything that yields rows. Opened cheaply; a row's bytes are read when it is asked for."""

from qie.data.sources.kinds import open_source
from qie.data.sources.mixture import SourceSpec
from qie.data.sources.source import Source, source_name

__all__ = ["Source", "SourceSpec", "open_source", "source_name"]
