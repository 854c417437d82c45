"""qie watch: a page that shows how a run or a precompute is getting on."""

from __future__ import annotations

import click

from qie.cli.common import Command, explained
from qie.cli.terminal import echo


@click.command(cls=Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("places", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", show_default=True, metavar="NAME", help="Address to serve the page on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), metavar="N", help="Port; 0: any free one. [default: from 8765 on]"
)
@click.option("--token", "with_token", is_flag=True, help="Put a secret into the address on this machine, too.")
@explained
def main(places: tuple[str, ...], host: str, port: int | None, with_token: bool) -> None:
    """Show PLACES, the folders of runs, on a page that changes as they do.

    Several runs lie over each other. The page reads only their files: it works while a run goes on, after its end,
    on a copy, and on a disk that another machine shares. Ctrl-C ends the page, never the run.

    The page is for this machine's browsers. With another --host it has a secret in its address; who knows the address
    may look, and pause or stop the run.
    """
    import secrets

    from qie.watch.places import open_pages
    from qie.watch.server import address_of, is_loopback, listening, make_app, require_server, serve

    require_server()
    pages = open_pages(places)
    token = secrets.token_urlsafe(18) if with_token or not is_loopback(host) else None
    with listening(host, port) as at:
        echo(f"watching {', '.join(places)} at {address_of(at, host, token)} (Ctrl-C ends the page, not the run)")
        try:
            serve(make_app(pages, token), at)
        except KeyboardInterrupt:
            echo("the page is closed", err=True)
