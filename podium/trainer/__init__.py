"""The trainer, and the names that programs for this class of system use for it."""

from podium.trainer.trainer import Trainer, TrainResult

LLMTrainer = Trainer

__all__ = ["LLMTrainer", "TrainResult", "Trainer"]
