"""Write docs/commands.md from the commands and the tools themselves: python tools/command_docs.py

Text above the marker in that page is kept.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from qie.cli import one_command

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "commands.md"
MARKER = "<!-- From here on tools/command_docs.py writes. -->\n"
ALONE = ("precompute", "stats", "train", "predict")
"""These are also commands of their own: qie-NAME."""
WIDTH = 119


def page(text: str) -> str:
    """The page `text` with the commands of today."""
    above, marker, _ = text.partition(MARKER)
    parts = [every_command(), *map(command, one_command.SUBCOMMANDS), "## Tools\n", TOOLS, *map(tool, tools())]
    return above + marker + "\n" + "\n".join(parts)


TOOLS = "Scripts of the repository, in its folder `tools/`. They are not part of the installed package.\n"


def tools() -> list[Path]:
    return sorted((ROOT / "tools").glob("[a-z]*.py"))


def every_command() -> str:
    """What `qie --help` says."""
    lines = [f"| [`qie {name}`](#qie-{name}) | {line} |" for name, (_, line) in one_command.SUBCOMMANDS.items()]
    return _section("qie", one_command.main) + "\n" + "\n".join(["| command | |", "|---|---|", *lines]) + "\n"


def command(name: str) -> str:
    """What `qie-NAME --help` says, or `qie NAME --help`."""
    module, _ = one_command.SUBCOMMANDS[name]
    return _section(f"qie-{name}" if name in ALONE else f"qie {name}", importlib.import_module(module).main)


def _section(name: str, main: click.Command) -> str:
    words = f"{name} " + " ".join(main.collect_usage_pieces(click.Context(main)))
    told = [_wrapped(paragraph) for paragraph in re.split(r"\n\n+", main.help or "")]
    options = [param for param in main.params if isinstance(param, click.Option)]
    return "\n\n".join([f"## {name}", f"    {words}", *told, _table(map(_of_click, options))]) + "\n"


def _of_click(option: click.Option) -> tuple[str, str]:
    record = option.get_help_record(click.Context(click.Command("any")))
    assert record is not None
    names, meaning = record
    found = re.fullmatch(r"(.*?)\s*\[([^\[]*)\]", meaning)
    text, extra = (found[1], found[2]) if found else (meaning, "")
    notes = ", ".join(_note(note) for note in extra.split("; ") if note)
    return re.sub(r"(INTEGER|FLOAT)( RANGE)?", "N", names), f"{text} ({notes})" if notes else text


def _note(text: str) -> str:
    """'default: 64' or 'x>=1', as the page says it."""
    text = re.sub(r"^default: (\S+)$", r"default `\1`", text)
    text = re.sub(r"^(-?\d+)<=x<=(\d+)$", r"\1 to \2", text)
    return re.sub(r"^x>=(\d+)$", r"at least \1", text)


def tool(path: Path) -> str:
    """A script's docstring, and its options."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    told = re.split(r"\n\n+", ast.get_docstring(tree) or "")
    parts = [f"### {path.name}", *(text if text.startswith("    ") else _wrapped(text) for text in told)]
    if options := list(tool_options(tree)):
        parts.append(_table(options))
    return "\n\n".join(parts) + "\n"


def tool_options(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(names and value, meaning) of each option that a script gives to argparse. The script is read, not run."""
    known = _constants(tree)
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        names = [_literal(word, known) for word in node.args]
        if node.func.attr != "add_argument" or not str(names[0]).startswith("--"):
            continue
        given = {str(word.arg): _literal(word.value, known) for word in node.keywords}
        value = given.get("metavar") or str(names[0]).lstrip("-").replace("-", "_").upper()
        if isinstance(choices := given.get("choices"), tuple | list):
            value = f"[{'|'.join(choices)}]"
        text = str(given.get("help", "")) % {"default": given.get("default")}
        text += " (required)" if given.get("required") else ""
        flags = ", ".join(map(str, names))
        yield flags if given.get("action") == "store_true" else f"{flags} {value}", text.strip()


def _constants(tree: ast.Module) -> dict[str, object]:
    found: dict[str, object] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = _literal(node.value, {})
    return found


def _literal(node: ast.expr, known: dict[str, object]) -> object:
    """The value of a constant, or of a name of one; None for all else."""
    if isinstance(node, ast.Name):
        return known.get(node.id)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _table(rows: Iterable[tuple[str, str]]) -> str:
    cells = [f"| `{_cell(names)}` | {_cell(meaning)} |" for names, meaning in rows]
    return "\n".join(["| option | meaning |", "|---|---|", *cells])


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _wrapped(text: str) -> str:
    """A paragraph; `<name>` would be taken for HTML."""
    text = re.sub(r"(?<!`)<(?=\w)", r"\\<", " ".join(text.split()))
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
