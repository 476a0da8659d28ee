"""Generation by ranks that have a copy of the model between them: the tokens and log-probs of one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from podium.core.batch import Batch
from podium.core.errors import ConfigError, ModelError
from podium.engines.base import SamplingParams
from podium.engines.rollout.divided import DividedModel
from podium.engines.rollout.generate import generate
from podium.engines.rollout.native.choose import native_engine
from podium.engines.train import SingleDeviceEngine, create_train_engine
from podium.hybrid.engine import SharedHandOver
from podium.hybrid.generation import DividedGeneration
from podium.models.heads import ActorModel
from podium.workers.rollout import RowExchange
from tests.parallel.processes import context_of, on_ranks, once
from tests.parallel.test_hand_over import update
from tests.parallel.test_sharded_training import OPTIMIZER
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.timeout(900)  # of the test that waits for the processes, on a busy machine

GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)
SAMPLED = SamplingParams(max_new_tokens=12, temperature=0.8)
TRUNCATED = SamplingParams(max_new_tokens=12, top_p=0.9, top_k=40)
PAGES = {"page_size": 4, "steps_per_look": 3, "prefill_tokens": 16}
# Training's axes; the copies by which two ranks generate follow from the size.
TRAINED: list[dict[str, int]] = [{"shard": 2}, {"tensor": 2}, {"data": 2}, {"sequence": 2}]
FAMILIES = ("qwen2", "qwen3", "mistral", "gemma2")


def rows(count: int = 6) -> Batch:
    """Prompts of several lengths, some of them twice (they share a prefill), each with its own seed."""
    prompts = [[7 + i // 2, 30, 41 + i // 2][: 1 + i // 2 % 3] for i in range(count)]
    return Batch({"prompt_ids": prompts, "sample_seed": list(range(100, 100 + count))})


def sampled(engine: Any, sampling: SamplingParams, batch: Batch | None = None) -> dict[str, Any]:
    out = generate(engine, rows() if batch is None else batch, sampling)
    return {name: out[name].to_list() for name in ("response_ids", "rollout_log_probs")}


def alone(family: str, sampling: SamplingParams, updates: int = 0, **options: Any) -> dict[str, Any]:
    """One process."""
    model = tiny_model(family)
    if updates:
        from podium.algorithms import supervised_loss
        from tests.properties.test_train_invariance import shared_rows

        engine = SingleDeviceEngine(ActorModel(model), optimizer=OPTIMIZER)
        for _ in range(updates):
            engine.update(shared_rows(), supervised_loss())
    return sampled(native_engine(model, tiny_tokenizer(), max_concurrent=4, **options), sampling)


def side_of(rank: int, family: str, sizes: dict[str, int], size: int = 2, **options: Any) -> tuple[Any, Any, Any, Any]:
    model = tiny_model(family)
    divided, context = DividedModel(model, size), context_of(rank, **sizes)
    engine = create_train_engine("ddp", ActorModel(model), context=context, optimizer=OPTIMIZER)
    side = DividedGeneration(divided, engine, context, timeout=timedelta(seconds=60))
    rollout = native_engine(side.model, tiny_tokenizer(), max_concurrent=4, **options)
    return engine, side, rollout, side.hand_over()


def two_ranks(rank: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for family in FAMILIES:  # a window, a soft cap, norms of single heads, biases
        _, side, rollout, _ = side_of(rank, family, {"data": 2})
        held = sum(p.numel() for p in side.model.parameters())
        out[family] = {"greedy": sampled(rollout, GREEDY), "sampled": sampled(rollout, SAMPLED), "held": held}
    for family in ("qwen3", "llama"):
        for fused in (True, False):
            rollout = side_of(rank, family, {"data": 2}, fused=fused, **PAGES)[2]
            out[f"{family}, pages, {fused}"] = {"sampled": sampled(rollout, SAMPLED), "truncated": sampled(rollout, TRUNCATED)}
    for sizes in TRAINED:
        out[str(sizes)] = after_updates(rank, sizes)
    out["pages over training's memory"] = after_updates(rank, {"tensor": 2}, **PAGES)
    out["exchange"] = exchanged(rank)
    return out


def after_updates(rank: int, sizes: dict[str, int], **options: Any) -> dict[str, Any]:
    """Two updates with a hand-over after each; what is sampled then, and what moved."""
    engine, _, rollout, hand_over = side_of(rank, "qwen3", sizes, **options)
    for _ in range(2):
        update(engine)
        report = hand_over(engine.policy_version)
        rollout.update_weights(engine.policy_version)
    return {
        "moved": vars(report.moved),
        "shared": isinstance(hand_over, SharedHandOver),
        "sampled": sampled(rollout, SAMPLED),
    }


def exchanged(rank: int) -> dict[str, Any]:
    """Each rank's share of the rows, generated together; and rows that both have, generated apart."""
    out: dict[str, Any] = {}
    for name, sizes, size in (("together", {"shard": 2}, 2), ("apart", {"tensor": 2}, 1)):
        _, side, rollout, _ = side_of(rank, "llama", sizes, size)
        context = context_of(rank, **sizes)
        exchange = RowExchange.among(side.groups.copies, context, side.ranks)
        uneven = [slice(0, 4), slice(4, 6)] if name == "together" else [slice(0, 6)] * 2
        mine = rows().slice(uneven[rank].start, uneven[rank].stop)
        seen: list[int] = []
        made = exchange.generate(rollout, mine, SAMPLED, on_progress=lambda done, *_, seen=seen: seen.append(done))
        out[name] = {
            "ids": made["response_ids"].to_list(),
            "seeds": made["sample_seed"].tolist(),
            "done": max(seen),
            "steps": rollout.counters.decode_steps,
        }
        if name == "together":
            out["given up"] = given_up(exchange, rollout, mine, rank)
    return out


def given_up(exchange: RowExchange, rollout: Any, mine: Batch, rank: int) -> str:
    def stop(done: int, total: int, tokens: int) -> None:
        if rank == 1:
            raise KeyboardInterrupt("enough")

    try:
        exchange.generate(rollout, mine, SAMPLED, on_progress=stop)
    except BaseException as error:
        return f"{type(error).__name__}: {error}, {rollout.pending} left"
    return "nothing happened"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "divided-rollout", lambda _: on_ranks(two_ranks, 2, timeout=280))[1]


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["response_ids"] == want["response_ids"]
    for mine, theirs in zip(got["rollout_log_probs"], want["rollout_log_probs"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_sample_what_one_does(family: str, two: list[dict[str, Any]]) -> None:
    whole = sum(p.numel() for p in tiny_model(family).parameters())
    for ranks in two:
        assert_same(ranks[family]["greedy"], alone(family, GREEDY))
        assert_same(ranks[family]["sampled"], alone(family, SAMPLED))
        assert ranks[family]["held"] < 0.7 * whole  # embedding and norms are whole
    assert two[0][family] == two[1][family]  # to the last bit


@pytest.mark.parametrize("name", [f"{family}, pages, {fused}" for family in ("qwen3", "llama") for fused in (True, False)])
def test_over_pages_too(name: str, two: list[dict[str, Any]]) -> None:
    family, _, fused = name.split(", ")
    for ranks in two:
        assert_same(ranks[name]["sampled"], alone(family, SAMPLED, fused=fused == "True", **PAGES))
        assert_same(ranks[name]["truncated"], alone(family, TRUNCATED, fused=fused == "True", **PAGES))
    assert two[0][name] == two[1][name]


@pytest.mark.parametrize("sizes", TRAINED, ids=str)
def test_the_weights_follow_training(sizes: dict[str, int], two: list[dict[str, Any]]) -> None:
    want = alone("qwen3", SAMPLED, updates=2)
    for ranks in two:
        got = ranks[str(sizes)]
        assert_same(got["sampled"], want)
        assert got["shared"] == (sizes == {"tensor": 2})
        assert (got["moved"]["received"] > 0) == (sizes == {"shard": 2})
        if got["shared"]:
            assert set(got["moved"].values()) == {0}


def test_training_follows_an_engine_that_lays_its_memory_out_anew(two: list[dict[str, Any]]) -> None:
    for ranks in two:
        got = ranks["pages over training's memory"]
        assert got["shared"] and set(got["moved"].values()) == {0}
        assert_same(got["sampled"], alone("qwen3", SAMPLED, updates=2))


def test_rows_are_exchanged_among_those_that_generate_together(two: list[dict[str, Any]]) -> None:
    want = alone("llama", SAMPLED)["response_ids"]
    together, apart = ([ranks["exchange"][name] for ranks in two] for name in ("together", "apart"))
    assert together[0]["ids"] + together[1]["ids"] == want
    assert [r["seeds"] for r in together] == [[100, 101, 102, 103], [104, 105]]
    assert [r["done"] for r in together] == [6, 6]
    assert [r["ids"] for r in apart] == [want, want] and [r["done"] for r in apart] == [3, 3]
    assert apart[0]["steps"] < together[0]["steps"]  # half of the rows each


def test_ranks_of_one_copy_stop_together(two: list[dict[str, Any]]) -> None:
    first, second = (ranks["exchange"]["given up"] for ranks in two)
    assert "another worker of this copy" in first and first.endswith("0 left")
    assert second.startswith("KeyboardInterrupt") and second.endswith("0 left")


# Training's axes, ranks that share a copy, and which ones: those that keep the most (HybridFlow's micro data-parallel groups).
FOUR: list[tuple[dict[str, int], int, tuple[tuple[int, ...], ...]]] = [
    ({"shard": 4}, 2, ((0, 2), (1, 3))),
    ({"shard": 2, "tensor": 2}, 2, ((0, 1), (2, 3))),
    ({"data": 2, "tensor": 2}, 2, ((0, 1), (2, 3))),
    ({"tensor": 4}, 2, ((0, 2), (1, 3))),  # each keeps the quarter that it has
    ({"tensor": 4}, 4, ((0, 1, 2, 3),)),
    ({"shard": 4}, 4, ((0, 1, 2, 3),)),
    ({"sequence": 2, "data": 2}, 1, ((0,), (1,), (2,), (3,))),
]


def four_ranks(rank: int) -> list[dict[str, Any]]:
    out = []
    for sizes, size, _ in FOUR:
        model = tiny_model("qwen3", num_key_value_heads=4)
        divided, context = DividedModel(model, size), context_of(rank, **sizes)
        engine = create_train_engine("ddp", ActorModel(model), context=context, optimizer=OPTIMIZER)
        side = DividedGeneration(divided, engine, context, timeout=timedelta(seconds=60))
        rollout = native_engine(side.model, tiny_tokenizer(), max_concurrent=4)
        hand_over = side.hand_over()
        update(engine)
        report = hand_over(engine.policy_version)
        rollout.update_weights(engine.policy_version)
        exchange = RowExchange.among(side.groups.copies, context, side.ranks)
        each = 12 // context.data_size
        mine = rows(12).slice(context.data_rank * each, (context.data_rank + 1) * each)
        made = exchange.generate(rollout, mine, SAMPLED)
        columns = {name: made[name].to_list() for name in ("response_ids", "rollout_log_probs")}
        out.append(
            {"copies": side.groups.copies, "leads": context.ranks.leads(rank), "received": report.moved.received, **columns}
        )
    return out


@pytest.mark.slow
def test_four_ranks_sample_what_one_does() -> None:
    """Any layout of training into any of generation, rows dealt by training's axes; who generates together keeps the most."""
    from podium.algorithms import supervised_loss
    from tests.properties.test_train_invariance import shared_rows

    ranks = on_ranks(four_ranks, 4, timeout=280)
    single = SingleDeviceEngine(ActorModel(tiny_model("qwen3", num_key_value_heads=4)), optimizer=OPTIMIZER)
    single.update(shared_rows(), supervised_loss())
    want = sampled(native_engine(single.model.model, tiny_tokenizer(), max_concurrent=4), SAMPLED, rows(12))
    for number, (sizes, size, copies) in enumerate(FOUR):
        cases = [made[number] for made in ranks]
        assert cases[0]["copies"] == copies, sizes
        got = {
            name: [row for case in cases if case["leads"] for row in case[name]]
            for name in ("response_ids", "rollout_log_probs")
        }
        assert_same(got, want)
        same = "shard" not in sizes and sizes.get("tensor", 1) == size
        assert all((case["received"] == 0) == same for case in cases), sizes


def test_what_cannot_be_divided_is_refused() -> None:
    from podium.core.settings import LoraSettings
    from podium.models.adapters import add_lora

    with pytest.raises(ConfigError, match=r"2 key/value heads do not divide by tensor=4(?s:.*)one of \[1, 2\]"):
        DividedModel(tiny_model("llama"), 4)
    tuned = tiny_model("llama")
    add_lora(tuned, LoraSettings(rank=2))
    with pytest.raises(ModelError, match="LoRA adapter is not cut"):
        DividedModel(tuned, 2)
