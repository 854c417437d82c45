"""What tests of qie-predict share: a configuration, and the command run in this process."""

from __future__ import annotations

from pathlib import Path

import yaml
from click.testing import CliRunner, Result

from qie.cli import predict
from tests.conftest import AREA_PX


def write_config(path: Path, pretrained: Path, **sections: dict) -> None:
    content = {
        "model": {"pretrained_model_name_or_path": str(pretrained)},
        "data": {"area_px": AREA_PX, "allow_tiny": True},
        "train": {"mixed_precision": "no"},
        "predict": {"devices": {"vae": "cpu", "text_encoder": "cpu", "transformer": "cpu"}},
    }
    path.write_text(yaml.safe_dump(content | sections))


def run_predict(*words: object, code: int = 0) -> Result:
    """See that the command ends with `code`, and not by an exception."""
    result = CliRunner().invoke(predict.main, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result
