"""qie init: a first configuration for a model, rows and a GPU."""

from __future__ import annotations

import click

from qie.cli.common import FiniteRange, command
from qie.cli.terminal import echo, tell_next
from qie.quantities import human_count

OTHERWISE_GB = 24.0


@command
@click.option("--model", required=True, metavar="MODEL", help="A folder, or a name on the Hub.")
@click.option("--source", required=True, metavar="SOURCE", help="Rows: a folder, a table, a dataset, tars.")
@click.option(
    "--vram",
    type=FiniteRange(0, 10_000, min_open=True),
    metavar="GB",
    help="GPU memory; default: that of this GPU, or 24.",
)
@click.option("--output", default="config.yaml", show_default=True, metavar="FILE", help="The configuration to write.")
@click.option("--force", is_flag=True, help="Overwrite FILE.")
def main(model: str, source: str, vram: float | None, output: str, force: bool) -> None:
    """Look at some rows of SOURCE, and write a configuration that fits them, the model and the GPU's memory.

    Its comments say why. Memory is that of qie-train --dry-run. Released models are known without a network.
    """
    from qie.config import load_config
    from qie.errors import UsageError
    from qie.first_config import RELEASED, model_of, sample_rows, write_config
    from qie.paths import local_path, require_writable
    from qie.quiet_libraries import quiet_libraries

    file = local_path(output)
    if file.exists() and not force:
        raise UsageError("the file exists already", where=file, hint="name another with --output, or add --force")
    require_writable(file)
    quiet_libraries()
    here = _here()
    gb = vram or here or OTHERWISE_GB
    with model_of(model) as pretrained:
        rows = sample_rows(source, pretrained.family)
        text = "\n".join(write_config(model, pretrained, rows, gb, output)) + "\n"
    file.write_text(text, encoding="utf-8")
    load_config(file)
    if model in RELEASED:
        echo(f"{model}: a released model; its sizes are known, and nothing was downloaded")
    guessed = "" if vram or here else ", since there is none here; --vram names another"
    echo(f"{file}: {human_count(rows.place.rows, 'row')} ({rows.place.title}), for a GPU of {gb:g} GB{guessed}")
    tell_next("qie", "precompute", "--config", output, "--dry-run")


def _here() -> float | None:
    """Gigabytes of this machine's first GPU; None if it has none."""
    import torch

    return torch.cuda.mem_get_info()[1] / 1e9 if torch.cuda.is_available() else None
