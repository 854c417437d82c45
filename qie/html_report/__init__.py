"""The page that qie-stats --html writes: the content of shards, in pictures and tables."""

from qie.html_report.gallery import LOOKED_AT, Look, look_at
from qie.html_report.page import check_place, render, write_page, write_report

__all__ = ["LOOKED_AT", "Look", "check_place", "look_at", "render", "write_page", "write_report"]
