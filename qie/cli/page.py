"""What qie-stats does for --html, beside the summary."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qie.cli.common import Progress, quiet_libraries

if TYPE_CHECKING:
    from collections.abc import Sequence

    from qie.stats import Summary
    from qie.stores import File


class Page:
    """The page of --html. That it can be written, and pictures be decoded for it, is checked before any work."""

    def __init__(self, shards: Sequence[str], options: dict[str, Any], quiet: bool) -> None:
        from qie.report import check_place

        self.path, self._decoder = check_place(options["html"]), None
        self._shards, self._options, self._quiet = shards, options, quiet
        if options["vae"] is not None:
            from qie.report.decoding import VaeDecoder

            quiet_libraries()
            self._decoder = VaeDecoder(options["vae"])

    def write(self, indexes: Sequence[File], summary: Summary) -> Summary:
        """Look into records and write the page. Returns the summary with the faults that were found on the way."""
        from dataclasses import replace

        from qie.report import LOOKED_AT, look_at, render, write_page

        gallery, decoder = self._options["gallery"], self._decoder
        most = max(gallery, LOOKED_AT) + gallery
        with Progress("looking", most, "samples", quiet=self._quiet) as progress:
            look = look_at(indexes, summary, gallery=gallery, decode=decoder, progress=progress.at)
        summary = replace(summary, faults=summary.faults + look.faults)
        other = decoder is not None and decoder.content not in {one["vae"] for one in summary.recipe_fields.values()}
        verified = self._options["verify"]
        write_page(self.path, render(summary, look, self._shards, verified=verified, other_vae=other))
        return summary
