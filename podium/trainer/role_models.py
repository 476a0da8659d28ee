"""The models of a run's roles: loaded or given, with adapters where the settings ask for them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from podium.core.errors import ConfigError
from podium.core.settings import RecipeSettings
from podium.models.adapters import WithoutAdapter, adapter_layers, add_lora, is_silent, sharing_copy
from podium.models.heads import ActorModel, CriticModel, RewardModel, load_reward_model
from podium.models.lm_head import base_of
from podium.models.loading import load_causal_lm, load_config
from podium.models.own import BaseParallelModel, OwnActor
from podium.models.parts import base_in_parts, causal_lm_in_parts
from podium.models.wrapper import unwrapped


class RoleModels:
    """What each role computes with, made once and where it is asked for.

    With LoRA one base is in memory for all roles that start from the actor's: the reference is the actor with its adapter
    off; the critic has an adapter and a value head of its own over the same frozen weights.

    Args:
        settings: the run's settings.
        given: models that stages or the caller gave, by role; others are loaded from `settings.model`.
        device: torch device of this run.
        in_parts: roles that are cut over workers: of their models each worker reads its own part, where it can.
    """

    def __init__(
        self, settings: RecipeSettings, given: dict[str, Any], device: str, in_parts: Callable[[str], bool] = lambda _: False
    ) -> None:
        self.settings, self.given, self.device, self._in_parts = settings, given, device, in_parts
        self._actor: Any = None

    # ------------------------------------------------------------------ one role each

    def actor(self, *, trains: bool) -> Any:
        """The policy's own model: a `transformers` causal LM (with a new adapter, if asked for), or a user's class."""
        if self._actor is None:
            self._actor = self.causal_lm("actor", self.settings.model.path)
            if trains:
                self._adapt(self._actor)
        return self._actor

    def reference(self, *, temperature: float, actor_trains: bool) -> Any:
        """The policy's starting point as a role's model: the actor's base, or a copy of it, or another model."""
        path = self.settings.model.reference_path
        if path is None and self._one_base(actor_trains):
            return WithoutAdapter(ActorModel(self.actor(trains=actor_trains), temperature=temperature))
        if path is None and not self.actor_is_path():
            model = copy.deepcopy(unwrapped(self.given["actor"]))
        else:
            model = self.causal_lm("reference", path or self.actor_path())
        model.requires_grad_(False)
        return as_policy(model, temperature)

    def critic(self, role: str, *, trains: bool, actor_trains: bool) -> CriticModel:
        """A value model: given, saved, or a new head on the actor's base."""
        given, path = self.given.get(role), self.settings.model.critic_path
        if isinstance(given, CriticModel):
            model = given
        elif given is not None and not isinstance(given, str):
            model = CriticModel.from_causal_lm(unwrapped(given))
        elif saved := given or path:
            model = CriticModel.from_pretrained(saved, **self._loading())
        elif self._one_base(actor_trains):
            model = CriticModel.from_causal_lm(sharing_copy(self.actor(trains=actor_trains)))
        elif self.actor_is_path():
            model = self._new_critic(role)
        else:
            model = CriticModel.from_causal_lm(copy.deepcopy(self._transformers_actor(role)))
        if trains:
            self._adapt(model.base)
        return self._placed(model)

    def reward(self, role: str, *, trains: bool) -> RewardModel:
        """A reward (or cost) model; its own tokenizer is set where it was loaded to score."""
        given = self.given.get(role) or (self.settings.model.reward_path if role == "reward" else None)
        heads = getattr(self.settings, "heads", None) or None
        if isinstance(given, RewardModel):
            if trains and heads and list(heads) != given.head_names:
                raise ConfigError(
                    f"the model's heads are {given.head_names}, the settings name {heads}",
                    where="heads",
                    remedy="give the model these heads: RewardModel.from_causal_lm(model, heads=[...])",
                )
            model = given
        elif given is not None and not trains:
            model = load_reward_model(given, **self._plain_loading())
        elif given is not None:
            model = RewardModel.from_pretrained(given, heads=heads, **self._loading())
        elif not trains:
            setting = f"model.{role.split('_')[0]}_path"
            raise ConfigError(f"the role '{role}' has no model", where=setting, remedy=f"set {setting}")
        elif self.actor_is_path():
            model = RewardModel.from_pretrained(self.actor_path(), heads=heads or 1, **self._loading())
        else:
            model = RewardModel.from_causal_lm(self._transformers_actor(role), heads=heads or 1)
        if trains:
            self._adapt(base_of(model.model))
        return self._placed(model)

    def teacher(self, *, temperature: float) -> Any:
        """Another policy, as it is."""
        model = self.causal_lm("teacher", getattr(self.settings.model, "teacher_path", None))
        model.requires_grad_(False)
        return as_policy(model, temperature)

    def causal_lm(self, role: str, path: str | None) -> Any:
        """The model given for the role, else the one at `path`."""
        given = self.given.get(role)
        if given is not None and not isinstance(given, str):
            return self._placed(unwrapped(given))
        path = given or path
        if not path:
            raise ConfigError("'model.path' must be set", where=role, remedy="give a model folder, hub name or GGUF file")
        options = self._plain_loading() if role == "teacher" else self._loading()
        model = causal_lm_in_parts(path, **options) if self._in_parts(role) else None
        return load_causal_lm(path, **options) if model is None else model

    def _new_critic(self, role: str) -> CriticModel:
        """A new value head on the actor's starting weights."""
        model = causal_lm_in_parts(self.actor_path(), **self._loading()) if self._in_parts(role) else None
        if model is None:
            return CriticModel.from_pretrained(self.actor_path(), **self._loading())
        critic = CriticModel(base_in_parts(model))
        critic.head.to(self.device)
        return critic

    def config(self, role: str) -> Any:
        """The `transformers` config of a role's model, without its weights; None for a class of the user's own."""
        given, model = self.given.get(role), self.settings.model
        kind = role.split("_")[0] if role != "cost_critic" else "critic"
        if given is not None and not isinstance(given, str):
            return _config_of(given)
        path = given or (getattr(model, f"{kind}_path", None) if role != "actor" else None)
        if path or self.actor_is_path():
            return load_config(path or self.actor_path(), trust_remote_code=model.trust_remote_code)
        return _config_of(self.given["actor"])

    # ------------------------------------------------------------------ pieces

    def actor_is_path(self) -> bool:
        return isinstance(self.given.get("actor") or self.settings.model.path, str)

    def actor_path(self) -> str:
        """Raises ConfigError where nothing says where the actor is."""
        given = self.given.get("actor")
        path = given if isinstance(given, str) else self.settings.model.path
        if not path:
            raise ConfigError("'model.path' must be set", where="model.path", remedy="give a model folder or hub name")
        return path

    def _one_base(self, actor_trains: bool) -> bool:
        """Whether roles can use the actor's weights: they are frozen under an adapter that changes nothing yet."""
        if self._actor is None and self.settings.model.lora is None and self.actor_is_path():
            return False
        model = self.actor(trains=actor_trains)
        return bool(adapter_layers(model)) and is_silent(model)

    def _transformers_actor(self, role: str) -> Any:
        model = unwrapped(self.given["actor"])
        if isinstance(model, BaseParallelModel):
            raise ConfigError(
                f"a {role} cannot be made from {type(model).__name__}: a model class of one's own gives no hidden states",
                where=role,
                remedy=f"set model.{role.split('_')[0]}_path, give models={{'{role}': ...}}, or use an algorithm without it",
            )
        return model

    def _adapt(self, model: Any) -> None:
        """A new adapter, where the settings ask for one and the model came without."""
        if self.settings.model.lora is None:
            return
        if isinstance(model, BaseParallelModel):
            raise ConfigError(
                f"{type(model).__name__} is a model class of its own, and adapters go into transformers models",
                where="model.lora",
                remedy="leave model.lora out",
            )
        if not adapter_layers(model):
            add_lora(model, self.settings.model.lora)

    def _placed(self, model: Any) -> Any:
        """On this run's device. (A model that is there already may be one that refuses to be moved: a quantised one.)"""
        device = torch.device(self.device)
        here = all(
            p.is_meta or (p.device.type == device.type and device.index in (None, p.device.index)) for p in model.parameters()
        )
        return model if here else model.to(device)

    def _plain_loading(self) -> dict[str, Any]:
        model = self.settings.model
        return {"dtype": model.dtype, "device": self.device, "trust_remote_code": model.trust_remote_code}

    def _loading(self) -> dict[str, Any]:
        model = self.settings.model
        rope = model.rope_scaling.fields if model.rope_scaling is not None else None
        return {**self._plain_loading(), "quantization": model.quantization, "rope_scaling": rope}


def _config_of(model: Any) -> Any:
    parts = (model, getattr(model, "model", None), getattr(model, "base", None))
    return next((config for part in parts if (config := getattr(part, "config", None)) is not None), None)


def as_policy(model: Any, temperature: float) -> Any:
    """A role's model that gives log-probs: over a `transformers` model, or a class of the user's own."""
    if isinstance(model, BaseParallelModel):
        return OwnActor(model, temperature=temperature)
    return ActorModel(model, temperature=temperature)
