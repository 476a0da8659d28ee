"""Models in memory as roles take them: with a peft configuration, or wrapped in one of Podium's or peft's classes."""

from __future__ import annotations

from typing import Any

from podium.core.settings import LoraSettings
from podium.models.adapters import add_lora, add_peft, check_adapters, plain_of
from podium.models.heads import ActorModel


class ModelWrapper:
    """A `transformers` model in memory, with an adapter put into it: to be given as the actor or the critic.

        Trainer(models={"actor": ModelWrapper(model, peft_config=LoraConfig(r=16, lora_alpha=32))}, tokenizer=tokenizer)

    The model is changed in place: its weights are frozen, the adapter's train. `.model` is that model.

    Args:
        model: a causal LM (or a `PeftModel` around one).
        peft_config: a `peft.LoraConfig` or `LoraSettings`; None: no new adapter.

    Raises ModelError for configurations that Podium does not train (see `add_peft`), ConfigError without peft.
    """

    def __init__(self, model: Any, peft_config: Any = None) -> None:
        self.model = plain_of(model)
        if peft_config is not None:
            (add_lora if isinstance(peft_config, LoraSettings) else add_peft)(self.model, peft_config)
        check_adapters(self.model)


def unwrapped(model: Any) -> Any:
    """The model itself: inside an `ActorModel`, a `ModelWrapper` or a `PeftModel`; any other as it is."""
    if isinstance(model, ActorModel | ModelWrapper):
        return unwrapped(model.model)
    return plain_of(model)
