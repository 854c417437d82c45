"""qie doctor: whether everything that a run needs is here."""

from __future__ import annotations

import json
import sys

import click

from qie.cli.common import command, set_option
from qie.cli.terminal import echo, tell_next


@command
@click.option("--config", "config_path", metavar="FILE", help="YAML configuration, whose model and places are checked.")
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON.")
@set_option
def main(config_path: str | None, as_json: bool, overrides: tuple[str, ...]) -> None:
    """Check this machine and, with --config, the model, the rows and the folders or stores of a run.

    A line for each check says ok or what to mend. A store is tried with a small file, which is deleted again; nothing
    is downloaded but the model's list of components.

    The exit code is 1 if anything has to be mended.
    """
    from qie.config import Config, load_config
    from qie.doctor import Finding, examine
    from qie.errors import QieError, UsageError, one_line
    from qie.quiet_libraries import quiet_libraries

    if overrides and config_path is None:
        raise UsageError("--set needs --config")
    quiet_libraries()
    findings: list[Finding] = []

    def tell(finding: Finding) -> None:
        findings.append(finding)
        if not as_json:
            echo(finding)

    config: Config | None = None
    try:
        config = load_config(config_path, overrides) if config_path is not None else None
    except QieError as error:
        tell(Finding("configuration", one_line(error), "correct it: its places were not checked"))
    for finding in examine(config):
        tell(finding)
    if as_json:
        echo(*json.dumps([finding.to_dict() for finding in findings], indent=2).split("\n"), whole=True)
    wrong = sum(finding.mend is not None for finding in findings)
    if not as_json:
        echo(f"{wrong} of {len(findings)} to mend" if wrong else "nothing to mend")
        if config_path is not None and not wrong:
            sets = [word for text in overrides for word in ("--set", text)]
            tell_next("qie", "precompute", "--config", config_path, *sets, "--dry-run")
    sys.exit(1 if wrong else 0)
