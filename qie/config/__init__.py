"""The configuration: a YAML file as frozen values, in which every field is one behaviour."""

from qie.config.file import load_config, required
from qie.config.sections import Config, LoraConfig, LossConfig, OptimizerConfig, SourceConfig

__all__ = ["Config", "LoraConfig", "LossConfig", "OptimizerConfig", "SourceConfig", "load_config", "required"]
