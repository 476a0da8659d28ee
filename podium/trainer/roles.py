"""Building the roles that a graph calls: models, engines, workers, each behind its handle."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from podium.algorithms.base import Loss
from podium.controller.resource_pool import ResourcePool
from podium.controller.worker_group import Executor, RoleHandle
from podium.core.errors import ConfigError
from podium.core.imports import load_module
from podium.core.ranks import Ranks, WorkerContext
from podium.core.seeding import derive_seed
from podium.core.settings import OptimizerSettings, RecipeSettings, RolloutSettings
from podium.engines.base import SamplingParams
from podium.engines.rollout import create_rollout_engine
from podium.engines.rollout.divided import DividedModel, can_be_laid_out
from podium.engines.train import TRAIN_ENGINES, ShardedEngine, create_train_engine
from podium.engines.train.tensor_parallel import check_divides
from podium.models.loading import load_tokenizer, quiet
from podium.models.own import BaseParallelModel
from podium.models.small import has_no_numbers
from podium.stages.graph import StageGraph
from podium.stages.update import UpdateStage
from podium.trainer.role_models import RoleModels, as_policy


def check_rollout_engine(name: str, tensor: int) -> None:
    """Raises ConfigError where the rollout engine cannot run a model that several ranks have between them."""
    if tensor > 1 and name != "native":
        raise ConfigError(
            f"the rollout engine '{name}' runs whole models, and resource_pool.rollout.parallel.tensor is {tensor}",
            where="rollout.engine",
            remedy="use native, or leave resource_pool.rollout out",
        )


def sampling_of(rollout: RolloutSettings) -> SamplingParams:
    """The rollout section as sampling parameters."""
    return SamplingParams(
        max_new_tokens=rollout.max_new_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
    )


@dataclass(frozen=True)
class RoleNeeds:
    """Which roles to build, in order; what those that train minimise, and in how many updates."""

    roles: list[str]
    losses: dict[str, Loss]
    updates: dict[str, int]
    samples: bool
    """Training is on samples of the actor, so its log-probs are at the sampling temperature."""

    @classmethod
    def of(cls, training: StageGraph, evaluation: StageGraph | None, steps: int, updates_per_step: int) -> RoleNeeds:
        """What training and evaluation need together."""
        roles = [*training.roles, *(evaluation.roles if evaluation else ())]
        stages = [stage for stage in training.stages if isinstance(stage, UpdateStage)]
        return cls(
            list(dict.fromkeys(roles)),
            {stage.roles[0]: stage.make_loss() for stage in stages},
            {stage.roles[0]: max(1, steps - stage.skip_steps) * updates_per_step for stage in stages},
            any("rollout_log_probs" in stage.writes for stage in training.stages),
        )


@dataclass(frozen=True)
class RoleMaker:
    """Builds one role's worker, in the worker's own process. Roles that go there together share what `roles` has loaded."""

    roles: Roles
    role: str

    def __call__(self, context: WorkerContext) -> Any:
        return self.roles.worker(self.role, context)

    def check(self, ranks: Ranks) -> None:
        """Whether the role's model can be divided among its workers, from its config alone. Raises ConfigError."""
        self.roles.check(self.role, ranks)


class Roles:
    """Builds the workers of a graph's roles. It travels to their processes before any model is loaded.

    Args:
        settings: the run's settings.
        given: models that stages were given, by role; others are loaded from `settings.model`.
        tokenizer: the actor's, where a stage was given one.
        backends: the train engine of each role, where it is not the default.
        pool: how the rollout divides its work.
    """

    def __init__(
        self,
        settings: RecipeSettings,
        given: dict[str, Any],
        tokenizer: Any,
        backends: Mapping[str, str] | None = None,
        pool: ResourcePool | None = None,
    ) -> None:
        self.settings, self.given, self.backends = settings, given, dict(backends or {})
        self.pool = pool or ResourcePool()
        self.tokenizer = tokenizer if tokenizer is not None else self._load_tokenizer()

    def __getstate__(self) -> dict[str, Any]:
        # Rewards are the controller's: they may hold what cannot travel (a lock, a connection), and no worker calls them.
        sources: dict[str, list[Any]] = {
            name: [] for name in ("rewards", "costs", "step_rewards") if getattr(self.settings, name, None)
        }
        return {**self.__dict__, "settings": self.settings.model_copy(update=sources)}

    def build(self, needs: RoleNeeds, executor: Executor, *, generates: bool) -> dict[str, RoleHandle]:
        """A handle for every role needed; optimizers for those that train."""
        self.needs, self.generates = needs, generates
        # A role may start from the actor's weights, and a trained role may be sharded where it stands: those come last.
        order = sorted(needs.roles, key=lambda role: (role in needs.losses, role == "actor"))
        handles = executor.launch({role: RoleMaker(self, role) for role in order})
        for handle in handles.values():
            handle.ask_for_work()
        return {role: handles[role] for role in needs.roles}

    def check(self, role: str, ranks: Ranks) -> None:
        """Raises ConfigError (or ResourceError) where a role's model does not divide among such ranks. Loads no weights."""
        generates = role == "actor" and self.generates
        if generates:
            self.pool.check_rollout(ranks.workers)
            check_rollout_engine(self._rollout().engine, self.pool.rollout_tensor)
        tensor = self.pool.rollout_tensor if generates else 1
        if ranks.tensor * ranks.sequence * tensor == 1:
            return
        config = RoleModels(self.settings, self.given, "cpu").config(role)
        if config is None:
            raise ConfigError(
                f"the model of the role '{role}' is a class of its own, which is not divided along tensor or sequence",
                where=f"resource_pool.{role if tensor == 1 else 'rollout'}.parallel",
                remedy="use data and shard",
            )
        check_divides(config, ranks, f"resource_pool.{role}.parallel")
        check_divides(config, Ranks(tensor=tensor), "resource_pool.rollout.parallel")

    def worker(self, role: str, context: WorkerContext) -> Any:
        """The role's worker for this place."""
        if not hasattr(self, "models"):
            self._enter(context)
        self.context = context
        # Each role draws from a generator of its own: new weights (a value head, an adapter) do not depend on who was
        # built before in the same process.
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self.settings.run.seed, "role", role))
            return self._worker(role)

    def _enter(self, context: WorkerContext) -> None:
        """Once in a process: what the program that called did in its own."""
        for module in self.settings.imports:
            load_module(module, "imports")
        if self.settings.run.threads:
            torch.set_num_threads(self.settings.run.threads)
        quiet()
        self.models = RoleModels(self.settings, self.given, context.device, self._reads_parts)

    def _worker(self, role: str) -> Any:
        loss = self.needs.losses.get(role)
        if role == "actor":
            return self._actor(loss, self.generates)
        # The reference copies the actor's starting weights, so it is made from the same source, never from a trained actor.
        if role == "reference":
            return self._reference()
        if role == "teacher":
            return self._teacher()
        if role in ("critic", "cost_critic"):
            return self._critic(role, loss)
        if role.split("_")[0] in ("reward", "cost"):
            return self._reward(role, loss)
        raise ConfigError(f"no worker is known for the role '{role}'", where="stages")

    # ------------------------------------------------------------------ one role each

    def _actor(self, loss: Loss | None, generates: bool) -> Any:
        from podium.workers.actor import ActorWorker

        model = self.models.actor(trains=self._actor_trains)
        settings = self._rollout()
        # Sharded weights cannot generate as they are: generation has its own, which every update hands over.
        ranks = self.context.ranks
        apart = generates and loss is not None and ranks.shard * ranks.tensor * ranks.sequence > 1
        together = self.pool.rollout_tensor > 1 or has_no_numbers(model)
        if generates and (together or (apart and can_be_laid_out(model))):
            return self._dividing_actor(model, loss)
        generating = copy.deepcopy(model).requires_grad_(False) if apart else model
        policy = as_policy(model, self._temperature())  # before the engine keeps places: on a CPU it lays weights out anew
        rollout = self._rollout_engine(generating, settings) if generates else None
        engine = self._engine("actor", policy, loss)
        worker = ActorWorker(engine, rollout, sampling_of(settings), self.tokenizer, **self._minibatching(loss))
        if apart:
            from podium.hybrid.engine import hand_over_between

            worker.hand_over = hand_over_between(engine, generating, deadline_seconds=self.settings.deadlines.hand_over)
        return worker

    def _dividing_actor(self, model: Any, loss: Loss | None) -> Any:
        """The actor whose workers generate with copies of the model apart from training's: one each, or one for several."""
        from podium.hybrid.generation import DividedGeneration
        from podium.workers.actor import ActorWorker
        from podium.workers.rollout import RowExchange

        divided = DividedModel(model, self.pool.rollout_tensor)  # the engine cuts the model where it stands
        engine = self._engine("actor", as_policy(model, self._temperature()), loss)
        timeout = timedelta(seconds=self.settings.deadlines.call or 1e8)
        limit = self.settings.deadlines.hand_over
        side = DividedGeneration(divided, engine, self.context, timeout=timeout, deadline_seconds=limit)
        settings = self._rollout()
        rollout = self._rollout_engine(side.model, settings)
        worker = ActorWorker(engine, rollout, sampling_of(settings), self.tokenizer, **self._minibatching(loss))
        worker.hand_over = side.hand_over()
        worker.exchange = RowExchange.among(side.groups.copies, self.context, side.ranks, timeout=timeout)
        return worker

    def _rollout_engine(self, model: Any, settings: RolloutSettings) -> Any:
        options = {"max_concurrent": settings.max_concurrent, **settings.backend_options}
        name, own = settings.engine, isinstance(model, BaseParallelModel)
        if own and name == "native":  # the default, which a class of the user's own cannot have
            name = "own"
        if own != (name == "own"):
            raise ConfigError(
                f"the rollout engine '{name}' cannot run {type(model).__name__}",
                where="rollout.engine",
                remedy="use own" if own else "use native or hf; own is for subclasses of BaseParallelModel",
            )
        return create_rollout_engine(name, model, self.tokenizer, **options)

    def _reference(self) -> Any:
        from podium.workers.reference import ReferenceWorker

        model = self.models.reference(temperature=self._temperature(), actor_trains=self._actor_trains)
        return ReferenceWorker(self._engine("reference", model, None))

    def _teacher(self) -> Any:
        from podium.workers.reference import ReferenceWorker

        path = self.given.get("teacher") or getattr(self.settings.model, "teacher_path", None)
        if isinstance(path, str):  # a model in memory brings no tokenizer to compare
            self._check_vocabulary(load_tokenizer(path, needs_end_token=False), path)
        return ReferenceWorker(self._engine("teacher", self.models.teacher(temperature=self._temperature()), None))

    def _check_vocabulary(self, tokenizer: Any, path: str) -> None:
        """Log-probs of the same tokens can only be compared where the tokens are the same."""
        mine, theirs = self.tokenizer.get_vocab(), tokenizer.get_vocab()
        if mine != theirs:
            odd = sorted(set(mine.items()) ^ set(theirs.items()))[:3]
            raise ConfigError(
                f"the teacher's tokens are others than the student's ({len(theirs)} and {len(mine)}; they differ in {odd})",
                where=f"model.teacher_path: {path}",
                remedy="take a teacher of the same family",
            )

    def _critic(self, role: str, loss: Loss | None) -> Any:
        from podium.workers.critic import CriticWorker

        model = self.models.critic(role, trains=loss is not None, actor_trains=self._actor_trains)
        optimizer = getattr(self.settings, "critic", None) or self.settings.optimizer
        return CriticWorker(self._engine(role, model, loss, optimizer), **self._minibatching(loss))

    def _reward(self, role: str, loss: Loss | None) -> Any:
        from podium.workers.reward import RewardWorker

        model = self.models.reward(role, trains=loss is not None)
        engine = self._engine(role, model, loss)
        tokenizer = model.tokenizer or self.tokenizer
        return RewardWorker(engine, tokenizer=tokenizer, policy_tokenizer=self.tokenizer, **self._minibatching(loss))

    # ------------------------------------------------------------------ pieces

    def _engine(self, role: str, model: Any, loss: Loss | None, optimizer: OptimizerSettings | None = None) -> Any:
        backend = self.backends.get(role, "single")
        if loss is not None:
            model.recompute = self.settings.batch.activation_checkpointing
        options: dict[str, Any] = {
            "optimizer": (optimizer or self.settings.optimizer) if loss is not None else None,
            "microbatch_tokens": self.settings.batch.microbatch_tokens,
            "total_updates": self.needs.updates.get(role),
        }
        if loss is not None and (optimizer or self.settings.optimizer).offload:
            options["offload_optimizer"] = True
        if backend == "single" and loss is None:  # what never trains needs nothing that keeps its copies together
            return TRAIN_ENGINES.get("single")(model, **options)
        if options["microbatch_tokens"] == "auto" and self.context.world_size > 1:
            raise ConfigError(
                "microbatch_tokens: auto measures one device, and this role is on several",
                where="batch.microbatch_tokens",
                remedy="give a number",
            )
        return create_train_engine(backend, model, context=self.context, **options)

    def _reads_parts(self, role: str) -> bool:
        """Whether the role's weights are cut over its workers (so that none shall hold them all)."""
        ranks, backend = self.context.ranks, self.backends.get(role, "single")
        if backend == "single" and role not in self.needs.losses:  # see `_engine`
            return False
        engine = TRAIN_ENGINES.get("ddp" if backend == "single" else backend)
        return ranks.shard * ranks.tensor > 1 and engine is ShardedEngine and self.settings.model.lora is None

    @property
    def _actor_trains(self) -> bool:
        return "actor" in self.needs.losses

    def _load_tokenizer(self) -> Any:
        model = self.settings.model
        path = RoleModels(self.settings, self.given, "cpu").actor_path()
        return load_tokenizer(path, chat_template=model.chat_template, trust_remote_code=model.trust_remote_code)

    def _temperature(self) -> float:
        """The temperature of the log-probs: that of the samples; 1 for given text, and for greedy samples."""
        return (self._rollout().temperature or 1.0) if self.needs.samples else 1.0

    def _rollout(self) -> RolloutSettings:
        return getattr(self.settings, "rollout", None) or RolloutSettings()

    def _minibatching(self, loss: Loss | None) -> dict[str, Any]:
        batch = self.settings.batch
        sizes = {"minibatch_sequences": batch.minibatch_sequences, "epochs": batch.epochs}
        return {"loss": loss, "seed": self.settings.run.seed, "context": self.context, **sizes}
