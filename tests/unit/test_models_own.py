"""A model class of the user's own: what its defaults compute, its rollout, and whole runs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from podium import BaseParallelModel, RewardStage, RolloutStage, Trainer
from podium.algorithms import Loss, supervised_loss
from podium.core.batch import Batch
from podium.core.errors import ConfigError, ModelError, RolloutError
from podium.core.settings import OptimizerSettings
from podium.engines.base import Request, SamplingParams
from podium.engines.rollout import create_rollout_engine
from podium.engines.rollout.own import OwnEngine
from podium.engines.train import SingleDeviceEngine
from podium.models.own import OwnActor
from podium.stages.policy import GRPOStage
from tests.tiny import VOCAB_SIZE, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


class Mixer(BaseParallelModel):
    """The mean of all tokens so far, and a layer."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.embedding, self.head = nn.Embedding(VOCAB_SIZE, width), nn.Linear(width, VOCAB_SIZE)
            nn.init.normal_(self.head.weight)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embedding(input_ids).cumsum(1) / torch.arange(1, input_ids.shape[1] + 1)[:, None]
        return self.head(torch.tanh(hidden))


def rows() -> Batch:
    draw = torch.Generator().manual_seed(3)
    ids = {
        name: [torch.randint(3, 100, (n,), generator=draw).tolist() for n in lengths]
        for name, lengths in (("prompt_ids", (5, 3, 12)), ("response_ids", (7, 0, 9)))
    }
    return Batch({**ids, "loss_mask": [[True] * len(r) for r in ids["response_ids"]]})


def sample(engine: Any, requests: list[Request]) -> list[Any]:
    for request in requests:
        engine.submit(request)
    done = []
    while engine.pending:
        done += engine.step()
    return sorted(done, key=lambda t: t.request_id)


def test_log_probs_and_entropy_are_those_of_the_logits() -> None:
    model = Mixer()
    engine = SingleDeviceEngine(OwnActor(model, temperature=0.7), microbatch_tokens=10)
    out = engine.compute(rows(), ("log_probs", "entropy"))
    for row in range(3):
        prompt, response = rows()["prompt_ids"][row], rows()["response_ids"][row]
        ids = torch.cat([prompt, response])[None]
        logits = model(ids, torch.ones_like(ids))[0, len(prompt) - 1 : -1].detach() / 0.7
        want = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        torch.testing.assert_close(out["log_probs"][row], want)
        entropy = -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)
        torch.testing.assert_close(out["entropy"][row], entropy)


def test_the_gradient_is_the_same_for_any_micro_batches() -> None:
    gradients = []
    for budget in (1000, 15, 1):
        engine = SingleDeviceEngine(OwnActor(Mixer()), optimizer=OptimizerSettings(lr=1e-3), microbatch_tokens=budget)
        gradients.append(engine.update(rows(), supervised_loss()).mean("grad_norm"))
    assert gradients[1:] == pytest.approx([gradients[0]] * 2, rel=1e-5)


def test_samples_carry_the_log_probs_that_training_computes_and_depend_on_their_seed_alone() -> None:
    model, sampling = Mixer(), SamplingParams(max_new_tokens=8, temperature=0.7)
    requests = [Request((5, 6, 7 + i), sampling, seed=i) for i in range(6)]
    together = sample(create_rollout_engine("own", model, tiny_tokenizer()), requests)
    alone = sample(OwnEngine(model, tiny_tokenizer(), max_concurrent=1), requests)
    assert [t.response_ids for t in together] == [t.response_ids for t in alone]
    assert len({tuple(t.response_ids) for t in together}) > 1
    batch = Batch({"prompt_ids": [r.prompt_ids for r in requests], "response_ids": [t.response_ids for t in together]})
    want = SingleDeviceEngine(OwnActor(model, temperature=0.7)).compute(batch, ("log_probs",))["log_probs"].values
    got = torch.tensor([p for t in together for s in t.segments for p in s.log_probs])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_loss_of_the_models_own() -> None:
    class Penalised(Mixer):
        def compute_loss(
            self, loss: Loss, columns: Mapping[str, Tensor], outputs: Callable[[], Mapping[str, Tensor]]
        ) -> tuple[Tensor, dict[str, Tensor]]:
            per_token, metrics = super().compute_loss(loss, columns, outputs)
            penalty = self.head.weight.square().mean()
            return per_token + penalty, {**metrics, "penalty": penalty.detach().expand_as(per_token)}

    plain, penalised = (
        SingleDeviceEngine(OwnActor(kind()), optimizer=OptimizerSettings(lr=1e-3)).update(rows(), supervised_loss())
        for kind in (Mixer, Penalised)
    )
    assert penalised.mean("loss") - plain.mean("loss") == pytest.approx(penalised.mean("penalty"), rel=1e-4)


def test_what_a_class_must_give_is_said() -> None:
    class Nothing(BaseParallelModel):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

    class Flat(Nothing):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return torch.zeros(len(input_ids), VOCAB_SIZE)

    class Hasty(Mixer):
        def generate(self, prompts: Any, draw: Any) -> None:
            draw([0], torch.zeros(1, VOCAB_SIZE))

    for model, error, message in ((Nothing(), NotImplementedError, "must define forward"), (Flat(), ModelError, "logits")):
        with pytest.raises(error, match=message):
            SingleDeviceEngine(OwnActor(model)).compute(rows(), ("log_probs",))
    with pytest.raises(ModelError, match="does not compute values"):
        SingleDeviceEngine(OwnActor(Mixer())).compute(rows(), ("values",))
    with pytest.raises(RolloutError, match=r"before draw\(\) had ended row 0"):
        sample(OwnEngine(Hasty(), tiny_tokenizer()), [Request((5,), SamplingParams(max_new_tokens=3))])
    limited = Mixer()
    limited.max_positions = 4
    with pytest.raises(RolloutError, match="max_positions=4"):
        OwnEngine(limited, tiny_tokenizer()).submit(Request((5,), SamplingParams(max_new_tokens=8)))


# ------------------------------------------------------------------ whole runs

PROMPTS = [{"prompt": f"What is {a} plus {b}?"} for a in range(3) for b in range(4)]


def length_reward(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    return [float(len(c) % 5) / 4 for c in completions]


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    run = {"folder": str(folder), "steps": 2, "trackers": [], "progress": False}
    sizes = {"prompts_per_step": 4, "group_size": 2}
    return {"batch": sizes, "optimizer": {"lr": 1e-2}, "rollout": {"max_new_tokens": 5}, "run": run, **more}


def test_stages_train_it_with_a_reference(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = Mixer()
    stages = [
        RolloutStage(model=model, tokenizer=tiny_tokenizer()),
        RewardStage(functions=[length_reward]),
        GRPOStage(kl_coef=0.1),
    ]
    result = Trainer(stages=stages, config=settings(tmp_path), data=PROMPTS).train()
    assert result.steps == 2 and not torch.equal(model.head.weight, Mixer().head.weight)
    again = Mixer()
    again.load_state_dict(load_file(result.run_folder / "model" / "model.safetensors"))
    assert torch.equal(again.head.weight, model.head.weight)


@pytest.mark.parametrize(
    ("values", "actor", "message"),
    [
        ({"algorithm": "ppo"}, Mixer, "gives no hidden states"),
        ({"algorithm": "grpo", "model": {"lora": {}}}, Mixer, "adapters go into transformers models"),
        ({"algorithm": "grpo", "rollout": {"engine": "hf"}}, Mixer, "'hf' cannot run Mixer"),
        ({"algorithm": "grpo", "rollout": {"engine": "own"}}, tiny_model, "'own' cannot run LlamaForCausalLM"),
    ],
)
def test_what_it_cannot_be_used_for(tmp_path: Path, values: Any, actor: Any, message: str) -> None:
    config = {**settings(tmp_path), "rewards": [{"function": length_reward}], **values}
    trainer = Trainer(config=config, models={"actor": actor()}, tokenizer=tiny_tokenizer(), data=PROMPTS)
    with pytest.raises(ConfigError, match=message):
        trainer.prepare()


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("own_model", ROOT / "examples" / "own_model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_example_learns(tmp_path: Path) -> None:
    before, after = example().main(steps=40, folder=str(tmp_path))
    assert before < 0.2 and after > before + 0.3


def test_the_examples_generation_gives_the_logits_of_its_forward() -> None:
    module = example()
    torch.manual_seed(0)
    tokenizer = module.digits_tokenizer()
    model = module.GRUModel(len(tokenizer))
    requests = [
        Request(tuple(prompt), SamplingParams(max_new_tokens=5), seed=i) for i, prompt in enumerate([[2, 3], [4], [5, 6, 7]])
    ]
    carried = sample(OwnEngine(model, tokenizer), requests)
    model.generate = lambda prompts, draw: BaseParallelModel.generate(model, prompts, draw)
    again = sample(OwnEngine(model, tokenizer), requests)
    assert [t.response_ids for t in carried] == [t.response_ids for t in again]
