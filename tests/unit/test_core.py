"""Batch, schema, settings, metrics, seeds."""

import pytest
import torch

from podium.core import schema
from podium.core.batch import Batch, Ragged
from podium.core.config import apply_overrides, dump_yaml, load_yaml, parse
from podium.core.errors import BatchError, ConfigError
from podium.core.metrics import Metrics
from podium.core.registry import Registry
from podium.core.seeding import derive_seed
from podium.core.settings import BatchSettings, LagrangeSettings, ModelSettings, OnlineSettings


def batch():
    return Batch(
        {
            "prompt_ids": [[1, 2], [3], [4, 5, 6]],
            "response_ids": [[7], [], [8, 9]],
            "rollout_log_probs": [[-1.0], [], [-2.0, -3.0]],
            "rewards": [1.0, 0.0, 0.5],
            "prompt": ["a", "b", "c"],
            "data.answer": [1, 2, 3],
        }
    )


def test_padded_and_back():
    b = batch()
    assert b.padded("response_ids").tolist() == [[7, 0], [0, 0], [8, 9]]
    assert b.mask("response").tolist() == [[True, False], [False, False], [True, True]]
    again = b.with_padded("rollout_log_probs", b.padded("rollout_log_probs"))
    assert again["rollout_log_probs"].to_list() == [[-1.0], [], [-2.0, -3.0]]


def test_rows_repeat_split_concatenate():
    b = batch()
    assert b.index([2, 0])["response_ids"].to_list() == [[8, 9], [7]]
    assert b.index(torch.tensor([True, False, True]))["prompt"] == ["a", "c"]
    assert b.repeat(2)["prompt"] == ["a", "a", "b", "b", "c", "c"]
    parts = b.split(2)
    assert [len(p) for p in parts] == [2, 1]
    whole = Batch.concatenate(parts)
    assert whole["response_ids"].to_list() == b["response_ids"].to_list() and whole.extras() == {"answer": [1, 2, 3]}
    assert len(b.index([])) == 0


def test_save_and_load(tmp_path):
    batch().save(tmp_path)
    back = Batch.load(tmp_path)
    assert (
        back.names == batch().names
        and back["response_ids"].to_list() == [[7], [], [8, 9]]
        and back["prompt"] == ["a", "b", "c"]
    )


def test_union_refuses_a_different_column_but_not_an_equal_one():
    b = batch()
    assert b.union(Batch({"rewards": [1.0, 0.0, 0.5], "values": b["rollout_log_probs"]})).names
    with pytest.raises(BatchError, match="different 'rewards'"):
        b.union(Batch({"rewards": [0.0, 0.0, 0.0]}))


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"reward": [1.0, 2.0, 3.0]}, "did you mean 'rewards'"),
        ({"scores": [1.0]}, "has 1 rows, the batch has 3"),
        ({"values": [[1.0], [2.0], [3.0, 4.0]]}, "1 tokens in row 1, .* has 0"),
        ({"scores": torch.zeros(3, 2)}, "must have the shape"),
        ({"response": "abc"}, "one Python value per row"),
    ],
)
def test_columns_that_do_not_fit(columns, message):
    with pytest.raises(BatchError, match=message):
        batch().with_columns(columns)


def test_a_missing_column_lists_those_there():
    with pytest.raises(BatchError, match=r"no column 'values'[\s\S]*prompt_ids"):
        batch()["values"]


def test_users_register_their_own_columns():
    schema.column("test_margin", "sequence", torch.float32, meaning="for this test")
    assert Batch({"test_margin": [1.0]})["test_margin"].tolist() == [1.0]
    with pytest.raises(BatchError, match="registered already"):
        schema.column("test_margin", "sequence", torch.int64)


def test_every_column_says_what_it_means():
    assert all(column.meaning for column in schema.known())


def test_ragged_index_matches_a_loop():
    rows = [[1.0], [], [2.0, 3.0], [4.0, 5.0, 6.0]]
    ragged = Ragged.from_rows(rows, torch.float32)
    picks = [3, 1, 1, 0, 2]
    assert ragged.index(torch.tensor(picks)).to_list() == [rows[i] for i in picks]


def test_unknown_setting_names_the_nearest():
    with pytest.raises(ConfigError, match=r"unknown setting 'optimizer.learning_rate'|unknown setting 'optimiser'"):
        parse(OnlineSettings, {"algorithm": "x", "optimiser": {"lr": 1}})
    with pytest.raises(ConfigError, match="did you mean 'temperature'"):
        parse(OnlineSettings, {"algorithm": "x", "rollout": {"temprature": 1}})


def test_wrong_type_names_key_and_value():
    with pytest.raises(ConfigError, match=r"'optimizer.lr': .*got 'fast'"):
        parse(OnlineSettings, {"algorithm": "x", "optimizer": {"lr": "fast"}})
    with pytest.raises(ConfigError, match=r"'rewards.0.weight'.*got 'much'"):
        parse(OnlineSettings, {"algorithm": "x", "rewards": [{"function": "a:b", "weight": "much"}]})


def test_batch_sizes_that_do_not_divide_name_what_would():
    with pytest.raises(ConfigError, match=r"minibatch_sequences=10 does not divide the step's 32 sequences .* 8 would"):
        parse(OnlineSettings, {"algorithm": "x", "batch": {"prompts_per_step": 4, "group_size": 8, "minibatch_sequences": 10}})
    assert BatchSettings(prompts_per_step=4, group_size=8, minibatch_sequences=8, epochs=2).updates_per_step == 8


def test_a_list_may_be_given_by_its_indices():
    values = apply_overrides({"algorithm": "ppo"}, ["rewards.0.function=a:f", "rewards.0.weight=2", "rewards.1.function=b:g"])
    settings = parse(OnlineSettings, values)
    assert [(r.function, r.weight) for r in settings.rewards] == [("a:f", 2.0), ("b:g", 1.0)]
    with pytest.raises(ConfigError, match="rewards"):
        parse(OnlineSettings, apply_overrides({"algorithm": "ppo"}, ["rewards.1.function=a.py:f"]))


def test_heads_without_names_may_be_numbers_in_yaml():
    assert ModelSettings(reward_heads={0: 0.4, "1": 0.6}).reward_heads == {"0": 0.4, "1": 0.6}


@pytest.mark.parametrize("given", [{"initial": 30.0}, {"minimum": 3.0, "maximum": 2.0}])
def test_a_multiplier_starts_within_its_bounds(given):
    with pytest.raises(ConfigError, match=r"initial=\S+ is not between minimum="):
        parse(LagrangeSettings, given, where="lagrange")


def test_overrides():
    base = {"optimizer": {"lr": 1e-6}, "rewards": [{"function": "a"}]}
    out = apply_overrides(base, ["optimizer.lr=1e-5", "rewards.0.weight=2", "rollout.stop=[x, y]", "run.name=null"])
    assert out["optimizer"]["lr"] == 1e-5 and out["rewards"][0]["weight"] == 2 and out["rollout"]["stop"] == ["x", "y"]
    assert base["optimizer"]["lr"] == 1e-6 and out["run"]["name"] is None
    for bad in ("optimizer.lr", "rewards.3.weight=1", "optimizer.lr.x=1"):
        with pytest.raises(ConfigError):
            apply_overrides(base, [bad])


def test_resolved_yaml_reads_back_the_same():
    import yaml

    settings = parse(OnlineSettings, {"algorithm": "x", "model": {"path": "m"}, "rewards": [{"function": len}]})
    text = dump_yaml(settings)
    assert "function: builtins:len" in text
    assert yaml.safe_load(text)["optimizer"]["betas"] == [0.9, 0.95]


def test_every_setting_has_a_docstring_and_there_are_few():
    from podium.core.config import describe
    from podium.recipes.ppo import PPOSettings

    rows = describe(PPOSettings)
    assert [r[0] for r in rows if not r[3]] == ["algorithm"] or not [r[0] for r in rows if not r[3]]
    assert len(rows) <= 126  # about 120 was the aim; a new one takes the place of another


def test_metrics_are_not_means_of_means():
    metrics = Metrics()
    metrics.add("loss", 10.0, 10)
    metrics.merge(Metrics({"loss": (0.0, 90.0)}))
    assert metrics.mean("loss") == 0.1


def test_seeds_depend_on_every_part():
    assert derive_seed(0, "a", 1) != derive_seed(0, "a", 2) != derive_seed(1, "a", 1)
    assert derive_seed(1, 23) != derive_seed(12, 3) and 0 <= derive_seed("x") < 2**63
    assert derive_seed(0, "rollout", 3, 7, 1) == 8703296992350878569  # the same on every machine and in every release


def test_registry_refuses_a_taken_name_and_names_the_nearest():
    registry = Registry("thing")
    registry.register("alpha")(1)
    with pytest.raises(ConfigError, match="did you mean 'alpha'"):
        registry.get("alhpa")
    with pytest.raises(ConfigError, match="registered already"):
        registry.register("alpha")(2)


def test_a_key_that_stands_twice_is_an_error(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("algorithm: grpo\nrun: {steps: 3}\nmodel: {path: x}\nrun: {name: z}\n")
    with pytest.raises(ConfigError, match=r"recipe.yaml, line 4: 'run' is set twice, in line 2 and in line 4"):
        load_yaml(path)
    path.write_text("rewards:\n- {function: a}\n- function: b\n  function: c\n")
    with pytest.raises(ConfigError, match="'function' is set twice, in line 3 and in line 4"):
        load_yaml(path)
    with pytest.raises(ConfigError, match="'x' is set twice"):
        apply_overrides({}, ["a={x: 1, x: 2}"])


def test_anchors_and_merges_are_no_repetition(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("d: {a: &a {x: 1, y: 1}, b: &b {<<: *a, x: 2}}\nc: {<<: *b, x: 4}\ne: *a\n")
    assert load_yaml(path)["c"] == {"x": 4, "y": 1}
