"""The configuration: a YAML file as frozen values. Every field controls one behaviour."""

from qie.config.loading import load_config, required
from qie.config.schema import (
    AdapterConfig,
    Config,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    Quantization,
    SchedulerConfig,
)

__all__ = [
    "AdapterConfig",
    "Config",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "Quantization",
    "SchedulerConfig",
    "load_config",
    "required",
]
