"""The page that qie-stats --html writes: the content of shards, in pictures and tables."""

from qie.html_report.gallery import LOOKED_AT
from qie.html_report.page import check_place, write_report

__all__ = ["LOOKED_AT", "check_place", "write_report"]
