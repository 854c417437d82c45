"""`python -m qie` is `qie`."""

from qie.cli.one_command import run_command

if __name__ == "__main__":
    run_command()
