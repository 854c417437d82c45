"""qie watch: a page that shows how a run is getting on, and requests to a run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import click

from qie.cli.common import command
from qie.cli.terminal import echo

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from qie.data.sources import Source
    from qie.watch.live_page import LivePage


@command
@click.argument("places", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to serve the page on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="Port; 0: any free one; default: from 8765 on."
)
@click.option("--token", "with_token", is_flag=True, help="Put a secret into the address on this machine, too.")
@click.option("--config", "config_path", metavar="FILE", help="Of a precompute: shows skipped rows of its data.source.")
@click.option("--webhook", metavar="URL", help="Post each new alert there, as JSON.")
@click.option("--pause", "request", flag_value="pause", help="No page: ask the run to hold after its step.")
@click.option("--resume", "request", flag_value="resume", help="No page: let a run that holds go on.")
@click.option("--checkpoint", "request", flag_value="checkpoint", help="No page: ask for a checkpoint after its step.")
@click.option("--stop", "request", flag_value="stop", help="No page: ask the run to stop after a checkpoint.")
def main(
    places: tuple[str, ...],
    host: str,
    port: int | None,
    with_token: bool,
    config_path: str | None,
    webhook: str | None,
    request: str | None,
) -> None:
    """Show PLACES, the folders of runs and of shards, on a page that changes as they do.

    Several runs lie over each other. The page reads only their files: it works while a run or a precompute goes on,
    after its end, on a copy, and on a disk that another machine shares. Ctrl-C ends the page, never the run.

    The page is for this machine's browsers. With another --host it has a secret in its address; who knows the address
    may look, pause or stop the run, and leave samples out.
    """
    if request is not None:
        _ask(places, request)
        return
    import secrets

    from qie.watch.places import open_pages
    from qie.watch.server import address_of, is_loopback, listening, make_app, require_server, serve

    require_server()
    pages = open_pages(places, _source(config_path))
    token = secrets.token_urlsafe(18) if with_token or not is_loopback(host) else None
    with listening(host, port) as at, _lookout(pages, webhook):
        echo(f"watching {', '.join(places)} at {address_of(at, host, token)} (Ctrl-C ends the page, not the run)")
        try:
            serve(make_app(pages, token), at)
        except KeyboardInterrupt:
            echo("the page is closed", err=True)


def _source(config_path: str | None) -> Source | None:
    """The rows of a configuration."""
    if config_path is None:
        return None
    from qie.config import load_config
    from qie.from_config import open_rows

    return open_rows(load_config(config_path))


def _ask(places: tuple[str, ...], request: str) -> None:
    """Leave a request to each run."""
    from qie.watch.places import run_folder
    from qie.watch.run_requests import obey

    for folder in [run_folder(place) for place in places]:
        echo(f"{folder}: {obey(folder, request, {})}")


def _lookout(pages: list[LivePage], webhook: str | None) -> AbstractContextManager[object]:
    """Alerts to the webhook as long as the page is served."""
    from qie.watch.webhook import Lookout, Webhook

    if webhook is None:
        return nullcontext()

    def say(line: str) -> None:
        echo(line, err=True)

    hook = Webhook(webhook, say)
    return Lookout(lambda: hook.look([alert for page in pages for alert in page.alerts(page.facts())]), say)
