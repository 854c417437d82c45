"""The sections of a configuration file, as frozen values. What is unknown, or out of range, is refused by name.

One field here is one behaviour somewhere: a field that nothing reads does not belong.
"""

from __future__ import annotations

from qie.config.data import CacheConfig, DataConfig
from qie.config.section import Section
from qie.config.training import (
    LoggingConfig,
    LossConfig,
    ModelConfig,
    OptimizerConfig,
    PredictConfig,
    SchedulerConfig,
    TrainConfig,
    ValidationConfig,
)


class Config(Section):
    """The whole file."""

    model: ModelConfig
    data: DataConfig = DataConfig()
    cache: CacheConfig = CacheConfig()
    train: TrainConfig = TrainConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lr_scheduler: SchedulerConfig = SchedulerConfig()
    loss: LossConfig = LossConfig()
    validation: ValidationConfig = ValidationConfig()
    predict: PredictConfig = PredictConfig()
    logging: LoggingConfig = LoggingConfig()
