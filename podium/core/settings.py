"""The sections that recipes are made of. Each default and its docstring stand once, here."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from pydantic import Field, field_serializer, field_validator, model_validator

from podium.core.config import Settings
from podium.core.errors import did_you_mean

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
Reduction = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]


class LoraSettings(Settings):
    rank: int = Field(default=16, gt=0)
    """Rank of the update of each weight: rank * (in + out) numbers train instead of in * out."""
    alpha: int = Field(default=32, gt=0)
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Layers that are adapted: all linear ones but the LM head, or those whose names end so (`[q_proj, v_proj]`)."""

    @model_validator(mode="before")
    @classmethod
    def _no_dropout(cls, values: Any) -> Any:
        """`dropout`, which LoRA has elsewhere, is no setting here: 0 is taken out, another value is told why."""
        if not isinstance(values, dict) or "dropout" not in values:
            return values
        if values["dropout"]:
            raise ValueError(
                f"dropout={values['dropout']} must be 0: a policy must give a token the same probability when it samples and "
                "when it trains"
            )
        return {name: value for name, value in values.items() if name != "dropout"}


class RopeScalingSettings(Settings):
    rope_type: str
    """`linear`, `yarn` or `llama3` (the names of `transformers`)."""
    factor: float = Field(gt=1)
    """How much longer than the model's own the context becomes."""
    options: dict[str, float] = Field(default_factory=dict)
    """The type's own fields, by the names of `transformers`: `beta_fast`, `original_max_position_embeddings`..."""

    @property
    def fields(self) -> dict[str, Any]:
        """All of it in one mapping, as a config holds it."""
        return {"rope_type": self.rope_type, "factor": self.factor, **self.options}

    @field_validator("rope_type")
    @classmethod
    def _known(cls, value: str) -> str:
        known = ("linear", "yarn", "llama3")
        if value in ("dynamic", "longrope"):
            raise ValueError(
                f"rope_type '{value}' changes every token's rotation with the longest sequence of the batch: the gradient "
                "would depend on the micro-batches, and cached keys would be wrong; use yarn"
            )
        if value not in known:
            raise ValueError(f"unknown rope_type '{value}'; {did_you_mean(value, known)}")
        return value

    @model_validator(mode="after")
    def _fields_of_type(self) -> RopeScalingSettings:
        of_type = {"yarn": ("attention_factor", "beta_fast", "beta_slow"), "llama3": ("low_freq_factor", "high_freq_factor")}
        mine = of_type.get(self.rope_type, ())
        for name in self.options:
            if name not in (*mine, "original_max_position_embeddings"):
                raise ValueError(f"{name} has no meaning for rope_type '{self.rope_type}'; {did_you_mean(name, mine)}")
        if self.rope_type == "llama3" and not set(mine) <= set(self.options):
            raise ValueError("rope_type 'llama3' needs options low_freq_factor and high_freq_factor (Llama 3.1: 1.0 and 4.0)")
        return self


class ModelSettings(Settings):
    path: str | None = None
    """A Hugging Face folder, a hub name, or a GGUF file."""
    dtype: Dtype = "auto"
    """Parameters' dtype. `auto`: bfloat16 where the device multiplies it natively, else float32; `float16` scales its loss."""
    reference_path: str | None = None
    """The reference model; by default the actor's starting weights."""
    critic_path: str | None = None
    """The critic's starting weights; by default the actor's, with a new value head."""
    reward_path: str | None = None
    """A sequence-classification model that scores responses (in addition to `rewards`)."""
    reward_heads: dict[str, float] = Field(default_factory=dict)
    """For a reward model with several scores: their names and weights."""
    trust_remote_code: bool = False
    """Run python code that ships with the model. Off unless asked."""
    chat_template: str | None = None
    """Overrides the tokenizer's chat template."""
    lora: LoraSettings | None = None
    """Train adapters instead of all weights, in every role that trains; the reference is the base with the adapter off."""
    quantization: Literal["none", "4bit", "8bit"] = "none"
    """Keep the frozen base in 4 bits (QLoRA's NF4) or 8; needs `lora`."""
    rope_scaling: RopeScalingSettings | None = None
    """Stretches the rotary embedding for contexts longer than the model's own."""

    @field_validator("reward_heads", mode="before")
    @classmethod
    def _head_names(cls, heads: Any) -> Any:
        """YAML reads the names `0` and `1`, which heads without names have, as numbers."""
        return {str(k) if type(k) is int else k: v for k, v in heads.items()} if isinstance(heads, dict) else heads

    @model_validator(mode="after")
    def _quantised_weights_do_not_train(self) -> ModelSettings:
        if self.quantization != "none" and self.lora is None:
            raise ValueError(
                f"quantization={self.quantization} needs lora: quantised weights cannot be trained (set lora.rank=16)"
            )
        return self


class DataSettings(Settings):
    path: str | None = None
    """JSONL or parquet file, a `datasets` folder or name, or `reasoning_gym:TASK`."""
    eval_path: str | None = None
    """Held-out data, same forms. By default `eval_samples` rows are kept out of `path`."""
    eval_samples: int = Field(default=0, ge=0)
    """Rows to hold out of `path` when there is no `eval_path`; with one, how many of its rows to use (0: all)."""
    prompt_column: str = "prompt"
    """Column with the prompt (text or chat messages), where the format is not detected from known columns."""
    system_prompt: str | None = None
    """Put before every prompt."""
    chat: Literal["auto", "always", "never"] = "auto"
    """Apply the chat template: to message lists only (`auto`), to plain text too, or never."""
    max_prompt_tokens: int = Field(default=1024, gt=0)
    """The longest prompt, in tokens."""
    too_long: Literal["drop", "truncate", "error"] = "drop"
    """What becomes of a longer prompt: dropped (counted and said), cut on the left, or an error."""
    train_on: Literal["completion", "assistant", "all"] = "completion"
    """What SFT learns: the completion (a conversation's last answer), every assistant turn, or every token."""
    shuffle: bool = True
    """New order every epoch, from the run's seed."""
    options: dict[str, Any] = Field(default_factory=dict)
    """For generated data (`reasoning_gym:TASK`): `size`, `seed`, and the task's own settings."""


class ConditionSettings(Settings):
    source: str
    """Another reward source, by its name."""
    at_least: float = Field(allow_inf_nan=False)
    """What its score must reach."""


class GateSettings(Settings):
    at_least: float = Field(allow_inf_nan=False)
    """What this source's score must reach, or the whole reward is `floor`."""
    floor: float = Field(default=0.0, allow_inf_nan=False)
    """The whole reward of a response that fails; where several gates fail, the lowest floor."""


class ShapingSettings(Settings):
    """How one source's score enters the sum. None of it is done in an evaluation but `only_if` and `gate`."""

    normalize: Literal["none", "batch", "group", "running"] = "none"
    """Less the mean, over the deviation: of the step's rows, of the group's, or of the run so far (dynamic scaling)."""
    clip: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """The normalised score is kept within plus and minus this."""
    only_if: ConditionSettings | None = None
    """Counts only where another source's score reaches a bound; else it adds 0."""
    gate: GateSettings | None = None
    """Where the score fails its bound, the whole reward is a floor value."""


class SourceSettings(Settings):
    """A function that scores, and how it is called."""

    function: str | Callable[..., Any]
    """`module:function`, `file.py:function`, a built-in (`math_verify`, `code_tests`...), `rules.yaml`, `http://host/path`."""
    name: str | None = None
    """Name in the metrics; by default the function's."""
    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Its factor in the sum of rewards."""
    on_error: Literal["raise", "skip"] = "raise"
    """A reward that raises: an error that names the sample, or the sample is left out of the update and counted."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the function as keywords; a built-in is made with them."""

    @field_serializer("function")
    def _function_name(self, function: Any) -> str:
        """A function object stands in the resolved settings by its name."""
        while isinstance(function, partial):
            function = function.func
        named = function if hasattr(function, "__qualname__") else type(function)  # an object that is called
        return function if isinstance(function, str) else f"{named.__module__}:{named.__qualname__}"


class RewardSettings(ShapingSettings, SourceSettings):
    """A reward source (or a cost's): the function, and how its score enters the sum."""


class StepRewardSettings(SourceSettings):
    """A source of step-wise rewards: `f(prompts, completions, **columns)` gives `((start, end), value)` pairs."""

    unit: Literal["char", "token"] = "char"
    """What `start` and `end` count: characters of the response's text, or its tokens."""


class RolloutSettings(Settings):
    engine: str = "native"
    """`native` (in process, the trainer's own weights) or `hf` (plain generate, slow, the oracle)."""
    max_new_tokens: int = Field(default=256, gt=0)
    """The longest response, in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature; 0 is greedy. Training's log-probs use it too."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling."""
    top_k: int = Field(default=0, ge=0)
    """Sample among the k likeliest tokens (0: all)."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Leave out tokens less likely than this share of the likeliest."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response (kept in it)."""
    max_concurrent: int = Field(default=256, gt=0)
    """Sequences decoded at once."""
    backend_options: dict[str, Any] = Field(default_factory=dict)
    """What belongs to one engine alone."""


class OptimizerSettings(Settings):
    lr: float = Field(default=1e-6, gt=0)
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    eps: float = Field(default=1e-8, gt=0)
    """AdamW's epsilon."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay (matrices only)."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up: keep, or decay to `min_lr_ratio` over the run's updates."""
    warmup_updates: int = Field(default=0, ge=0)
    """Linear warm-up, in optimizer updates."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """The end of the decay as a share of `lr`."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    states: Literal["fp32", "8bit"] = "fp32"
    """AdamW's two moments: 8 bytes a trained weight, or 2."""
    offload: bool = False
    """Master weights and moments live in the CPU's memory: slower updates, 12 bytes a trained weight less on the devices."""

    @field_validator("betas")
    @classmethod
    def _rates(cls, betas: tuple[float, float]) -> tuple[float, float]:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError("each must be at least 0 and less than 1")
        return betas


class BatchSettings(Settings):
    prompts_per_step: int = Field(default=32, gt=0)
    """Prompts (rows, where nothing is generated) taken from the data in a step."""
    group_size: int = Field(default=8, gt=0)
    """Responses sampled per prompt."""
    minibatch_sequences: int = Field(default=0, ge=0)
    """Sequences per optimizer update; 0: all of a step, one update."""
    epochs: int = Field(default=1, gt=0)
    """Passes over a step's sequences."""
    microbatch_tokens: int | Literal["auto"] = 8192
    """Tokens in one forward and backward pass; auto: as many as memory has room for, found by running one. Changes memory and
    speed, never the gradient."""
    activation_checkpointing: Literal["none", "selective", "full", "offload"] = "none"
    """What the backward pass computes again instead of keeping it: MLPs (selective) or whole layers (full), whose inputs can
    wait in the CPU's memory (offload)."""

    @field_validator("microbatch_tokens")
    @classmethod
    def _holds_a_token(cls, tokens: int | str) -> int | str:
        if isinstance(tokens, int) and tokens < 1:
            raise ValueError("must be at least 1, or auto")
        return tokens

    @property
    def planned_microbatch_tokens(self) -> int:
        """`microbatch_tokens`, or what a plan assumes for `auto`."""
        return 8192 if self.microbatch_tokens == "auto" else self.microbatch_tokens

    @property
    def sequences_per_step(self) -> int:
        return self.prompts_per_step * self.group_size

    @property
    def updates_per_step(self) -> int:
        per_update = self.minibatch_sequences or self.sequences_per_step
        return self.epochs * (self.sequences_per_step // per_update)

    @model_validator(mode="after")
    def _divides(self) -> BatchSettings:
        n, m = self.sequences_per_step, self.minibatch_sequences
        if m and n % m:
            near = [d for d in range(1, n + 1) if n % d == 0]
            best = min(near, key=lambda d: abs(d - m))
            raise ValueError(
                f"minibatch_sequences={m} does not divide the step's {n} sequences "
                f"({self.prompts_per_step} prompts x {self.group_size}); {best} would"
            )
        return self


class KLSettings(Settings):
    coef: float = Field(default=0.0, ge=0)
    """Weight of the KL term; 0: no reference model is loaded."""
    place: Literal["reward", "loss"] = "loss"
    """Subtracted from each token's reward, or added to the loss."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators."""
    controller: Literal["adaptive", "fixed", "none"] = "fixed"
    """How `coef` moves: towards `target`, not at all, or no KL at all."""
    target: float = Field(default=0.05, gt=0)
    """KL per sequence that the adaptive controller aims at, in nats."""
    horizon: int = Field(default=10_000, gt=0)
    """The adaptive controller's horizon, in sequences."""


class CorrectionSettings(Settings):
    """Correction of what the rollout's kernels or weights computed otherwise than training does."""

    kind: str = "none"
    """`token_truncated`, `sequence_truncated`, `token_masked`, `sequence_rejected`, or your own."""
    cap: float | None = Field(default=None, gt=0)
    """The largest importance weight (truncated kinds); by default the kind's own."""
    low: float | None = Field(default=None, ge=0)
    """Masked or rejected below this ratio; by default the kind's own."""
    high: float | None = Field(default=None, gt=0)
    """Masked or rejected above this ratio; by default the kind's own."""


class LagrangeSettings(Settings):
    """The multiplier that holds a cost at its threshold (Safe-RLHF)."""

    threshold: float = Field(default=0.0, allow_inf_nan=False)
    """The mean cost of a response that is allowed."""
    initial: float = Field(default=1.0, gt=0)
    """The multiplier at the start."""
    lr: float = Field(default=0.1, gt=0)
    """Learning rate of its logarithm, per step and unit of cost."""
    minimum: float = Field(default=1e-4, gt=0)
    """Never below this (a multiplier of 0 could not rise again)."""
    maximum: float = Field(default=5.0, gt=0)
    """Never above this: it bounds how far the reward can be given up."""

    @model_validator(mode="after")
    def _within(self) -> LagrangeSettings:
        if not self.minimum <= self.initial <= self.maximum:
            raise ValueError(
                f"initial={self.initial:g} is not between minimum={self.minimum:g} and maximum={self.maximum:g}; "
                "the multiplier starts within its bounds"
            )
        return self


class EvaluationSettings(Settings):
    every_steps: int = Field(default=0, ge=0)
    """Evaluate on the held-out rows every so many steps (0: at the start and the end only)."""
    at_start: bool = True
    """Also before the first step."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of the evaluation; 0 is greedy."""
    solved_at: float = 1.0
    """`accuracy` is the share of held-out responses whose reward is at least this."""


class CheckpointSettings(Settings):
    every_steps: int = Field(default=0, ge=0)
    """Save all state every so many steps (0: at the end and on Ctrl-C only)."""
    keep: int = Field(default=2, gt=0)
    """The newest so many are kept."""
    export: bool = True
    """Write a Hugging Face folder at the end."""
    background: bool = True
    """Copy the state, and write it while the next step runs. Takes the state's size in host memory once more."""


class BoundSettings(Settings):
    """Where a watched number raises an alarm."""

    warn: float | None = Field(default=None, allow_inf_nan=False)
    """Beyond this a line is shown and kept in the run folder; null: never."""
    stop: float | None = Field(default=None, allow_inf_nan=False)
    """Beyond this the run stops, with its last state saved; null: never."""


class WatchSettings(Settings):
    """Numerics, watched from the first step (docs/doctor.md)."""

    enabled: bool = True
    """Compare training's log-probs with the rollout's, and hold the numbers below against their bounds."""
    log_prob_gap: BoundSettings = Field(default_factory=lambda: BoundSettings(warn=0.05))
    """Upper bound on the mean |difference| of training's and the rollout's log-probs, in nats a token."""
    effective_sample_size: BoundSettings = Field(default_factory=lambda: BoundSettings(warn=0.5))
    """Lower bound on the share of samples that count after importance weighting."""
    staleness: BoundSettings = Field(default_factory=BoundSettings)
    """Upper bound on the updates between the weights that sampled and those that train."""
    entropy: BoundSettings = Field(default_factory=lambda: BoundSettings(warn=0.02))
    """Lower bound on the sampled tokens' entropy, in nats a token."""
    nonfinite: Literal["skip", "stop"] = "skip"
    """A loss or gradient that is not finite: the update is left out, or the run stops too. The samples are kept either way."""


class RunSettings(Settings):
    name: str | None = None
    """The run's name; by default the algorithm and the time."""
    folder: str = "runs"
    """Where run folders go."""
    steps: int = Field(default=100, gt=0)
    """Training steps."""
    seed: int = Field(default=0, ge=0)
    """All randomness follows from it."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`; `auto` takes a GPU where there is one."""
    threads: int = Field(default=0, ge=0)
    """CPU threads for torch (0: torch's choice)."""
    trackers: list[str] = Field(default_factory=lambda: ["tensorboard"])
    """`tensorboard`, `wandb`, `mlflow`; metrics.jsonl is always written."""
    log_samples: int = Field(default=8, ge=0)
    """Rollouts written to the run folder per step."""
    progress: bool = True
    """Show progress bars (off when the output is no terminal)."""


class DeadlineSettings(Settings):
    """How long a run waits, in seconds (0: without end). When a deadline passes a report is written, then `action` is taken."""

    rollout: float = Field(default=3600.0, ge=0)
    """A rollout. (In other processes `call` holds for it.)"""
    reward: float = Field(default=1800.0, ge=0)
    """Scoring a step's responses: reward functions, models, remote scorers, together."""
    call: float = Field(default=3600.0, ge=0)
    """Any other stage: log-probs, values, updates; in other processes any call of a role, and how long ranks wait for each
    other."""
    data: float = Field(default=600.0, ge=0)
    """Taking a step's rows from the data."""
    save: float = Field(default=3600.0, ge=0)
    """Waiting for a checkpoint to be written."""
    hand_over: float = Field(default=600.0, ge=0)
    """Where ranks send each other the new weights to generate with: moving them, and checking what arrived."""
    action: Literal["stop", "retry", "restart"] = "stop"
    """`stop` with a checkpoint; make the step again (`retry`); start the workers again from the last checkpoint (Ray)."""
    retries: int = Field(default=2, ge=0)
    """How often a step is made again, where `action` is `retry`; then the run stops."""


class ExecutorSettings(Settings):
    kind: Literal["local", "ray", "spmd"] = "local"
    """Where workers live: this process; Ray actors; the processes that torchrun started."""
    workers: int = Field(default=1, gt=0)
    """Processes of the pool, where `resource_pool` describes none: so many GPUs, or CPU processes where there is none."""
    address: str | None = None
    """A running Ray cluster (`auto`, `host:port`); by default RAY_ADDRESS, else one is started on this machine."""
    restarts: int = Field(default=3, ge=0)
    """How often a run that lost a worker goes on from its last checkpoint by itself (Ray)."""


class RecipeSettings(Settings):
    """What every recipe has; an algorithm's own class adds its section."""

    algorithm: str
    """The recipe's name."""
    imports: list[str] = Field(default_factory=list)
    """Your own python files or modules (`mine.py`, `package.module`), run first: they register estimators, losses, recipes."""
    model: ModelSettings = Field(default_factory=ModelSettings)
    """Models and tokenizer."""
    data: DataSettings = Field(default_factory=DataSettings)
    """Where prompts or examples come from."""
    batch: BatchSettings = Field(default_factory=BatchSettings)
    """Sizes: each says its unit."""
    optimizer: OptimizerSettings = Field(default_factory=OptimizerSettings)
    """The actor's optimizer."""
    evaluation: EvaluationSettings = Field(default_factory=EvaluationSettings)
    """Held-out evaluation."""
    checkpoint: CheckpointSettings = Field(default_factory=CheckpointSettings)
    """Saving and resuming."""
    watch: WatchSettings = Field(default_factory=WatchSettings)
    """Numerics that are watched, and when they warn or stop."""
    run: RunSettings = Field(default_factory=RunSettings)
    """The run itself."""
    deadlines: DeadlineSettings = Field(default_factory=DeadlineSettings)
    """How long the run waits, and what happens then."""
    executor: ExecutorSettings = Field(default_factory=ExecutorSettings)
    """Where the workers of the roles live."""
    resource_pool: dict[str, Any] = Field(default_factory=dict)
    """Devices of each role: `{actor: {gpus: [0, 1]}, reference: actor}`; see docs/executors.md."""

    @field_validator("algorithm")
    @classmethod
    def _lower(cls, value: str) -> str:
        return value.lower()


class SampledSettings(RecipeSettings):
    """Recipes in which the model answers and is scored, if only in an evaluation."""

    rewards: list[RewardSettings] = Field(default_factory=list)
    """Reward sources, summed by weight."""
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """How responses are sampled."""


class OnlineSettings(SampledSettings):
    """Recipes that follow a policy gradient."""

    step_rewards: list[StepRewardSettings] = Field(default_factory=list)
    """Rewards for parts of a response, at the tokens that complete them."""
    kl: KLSettings = Field(default_factory=KLSettings)
    """The KL term against the reference."""
    clip_low: float | None = Field(default=None, gt=0, le=1)
    """The ratio is clipped below 1 - clip_low; by default the policy loss's own (`clip`: 0.2)."""
    clip_high: float | None = Field(default=None, gt=0)
    """The ratio is clipped above 1 + clip_high; by default the policy loss's own (`clip`: 0.2)."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Lower bound on the objective for negative advantages (Ye et al. 2019); None: off."""
    policy_loss: str = "clip"
    """A registered policy loss: `clip` (PPO's surrogate), `gspo`, `cispo`, `reinforce`, or your own."""
    correction: CorrectionSettings = Field(default_factory=CorrectionSettings)
    """Importance correction between rollout and training."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Entropy bonus."""
    loss_reduction: Reduction = "token_mean"
    """How token losses become one number."""


class GroupSettings(OnlineSettings):
    """Recipes without a critic: the baseline comes from other responses to the prompt, or from the batch."""

    advantage: str = "grpo"
    """A registered advantage estimator, or your own."""
    sampling_rounds: int = Field(default=0, ge=0)
    """Dynamic sampling: groups whose rewards are all equal teach nothing; fresh prompts are rolled out in their place, up to so
    many rollouts a step. 0: off."""
    overlong_buffer: int = Field(default=0, ge=0)
    """Overlong shaping: in the last so many tokens below `rollout.max_new_tokens` a penalty grows. 0: off."""
    overlong_penalty: float = Field(default=1.0, gt=0)
    """The penalty of a response of full length."""


class StagesSettings(RecipeSettings):
    """For stages of one's own: what an algorithm would set is said by the stages themselves."""

    algorithm: str = "custom"
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    """How responses are sampled."""
    critic: OptimizerSettings = Field(default_factory=lambda: OptimizerSettings(lr=1e-5))
    """The critic's optimizer."""
