"""The configuration: a YAML file as frozen values, in which every field is one behaviour."""

from qie.config.data import SourceConfig
from qie.config.file import load_config, required
from qie.config.sections import Config
from qie.config.training import (
    AdapterConfig,
    LoggingConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    Quantization,
    SampleConfig,
    SchedulerConfig,
    TrainConfig,
)

__all__ = [
    "AdapterConfig",
    "Config",
    "LoggingConfig",
    "LoraConfig",
    "LossConfig",
    "OptimizerConfig",
    "Quantization",
    "SampleConfig",
    "SchedulerConfig",
    "SourceConfig",
    "TrainConfig",
    "load_config",
    "required",
]
