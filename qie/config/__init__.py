"""The configuration: a YAML file as frozen values, in which every field is one behaviour."""

from qie.config.loading import load_config, required
from qie.config.schema import (
    AdapterConfig,
    Config,
    LoggingConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    Quantization,
    SampleConfig,
    SchedulerConfig,
    SourceConfig,
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
