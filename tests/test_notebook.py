"""docs/notebook.ipynb runs from its first cell to its last, and all that it shows can be shown."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import ROOT

CELLS = json.loads((ROOT / "docs" / "notebook.ipynb").read_text(encoding="utf-8"))["cells"]
CODE = ["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"]


def run_cell(code: str, names: dict[str, object]) -> object:
    """Run a cell, and give the value of its last line, as a notebook shows it."""
    *body, last = ast.parse(code).body
    exec(compile(ast.Module(body, []), code, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), code, "eval"), names)
    exec(compile(ast.Module([last], []), code, "exec"), names)
    return None


def shown(value: object) -> str:
    return value._repr_html_() if hasattr(value, "_repr_html_") else repr(value)


def test_the_notebook_goes_from_a_picture_to_a_trained_adapter(
    tiny_edit: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"make_tiny_model.py": tiny_edit, "make_photo_edits.py": photos}

    def run(command: list[str | Path], *, check: bool) -> None:
        """Give what the tools make, which they have made for other tests."""
        _, tool, folder, *rest = command
        assert Path(tool).parent == ROOT / "tools" and check and rest in ([], ["--rows", "12"])
        shutil.copytree(made.pop(Path(tool).name), folder)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(ROOT / "docs")
    names: dict[str, object] = {}
    values = [run_cell(code, names) for code in CODE]
    assert not made, "both tools were called"
    pages = [shown(value) for value in values]
    assert [page.count("<img") for page in pages if page.startswith("<div>")] == [2, 2, 2, 0, 2]
    assert any("12 rows" in page or ">12<" in page for page in pages)
    assert any(page.startswith("<Batch of 2: ") for page in pages)
    assert len(names["losses"]) == 12 and "step 12: validation loss" in capsys.readouterr().out  # type: ignore[arg-type]
    assert isinstance(values[-1], Image.Image)


def test_it_is_kept_without_output_and_each_cell_has_its_own_id() -> None:
    assert [cell for cell in CELLS if cell.get("outputs") or cell.get("execution_count")] == []
    assert len({cell["id"] for cell in CELLS}) == len(CELLS)
