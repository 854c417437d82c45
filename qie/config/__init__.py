"""The configuration: a YAML file as frozen values. Every field controls one behaviour."""

from pathlib import Path

from qie.config.loading import load_config, required
from qie.config.schema import (
    AdapterConfig,
    Config,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    Quantization,
    SampleConfig,
    SchedulerConfig,
)

SCHEMA_FILE = Path(__file__).with_name("schema.json")
"""The JSON schema of the configuration, for editors; `tools/config_docs.py` writes it."""

__all__ = [
    "SCHEMA_FILE",
    "AdapterConfig",
    "Config",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "Quantization",
    "SampleConfig",
    "SchedulerConfig",
    "load_config",
    "required",
]
