"""The page that qie-stats --html writes: what shards hold, to be looked at."""

from qie.report.looking import LOOKED_AT, Look, look_at
from qie.report.page import check_place, render, write_page

__all__ = ["LOOKED_AT", "Look", "check_place", "look_at", "render", "write_page"]
