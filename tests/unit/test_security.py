"""Nothing that a user could have downloaded runs code: no pickle, no remote code, safe YAML, servers on loopback."""

from __future__ import annotations

import ast
import pickle
from pathlib import Path

import pytest
import torch

from podium.core.config import load_yaml
from podium.core.errors import ConfigError, ModelError
from podium.core.settings import ModelSettings
from podium.models.loading import load_causal_lm
from tests.tiny import tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "podium").rglob("*.py"))

# Between processes of one run, over pipes and stores that they opened for each other: no file is read.
OWN_PROCESSES = {"controller/process.py", "controller/executors/spmd.py", "hybrid/same_device.py"}
LOADERS = {
    "pickle": {"load", "loads", "Unpickler"},
    "cPickle": {"load", "loads"},
    "dill": {"load", "loads"},
    "cloudpickle": {"load", "loads"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "shelve": {"open"},
    "torch": {"load"},
    "yaml": {"load", "load_all", "full_load", "unsafe_load", "Loader", "UnsafeLoader", "FullLoader"},
    "pandas": {"read_pickle"},
}


def calls(tree):
    """(module or object name, attribute, node) of every `name.attribute` that is used."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.value.id, node.attr, node
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in node.names:
                yield node.module.split(".")[0], name.name, node


def test_no_loader_that_runs_what_it_reads():
    assert len(SOURCES) > 100
    for path in SOURCES:
        check(path)


def check(path):
    name = str(path.relative_to(ROOT / "podium"))
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for module, attribute, node in calls(tree):
        own = module == "pickle" and name in OWN_PROCESSES
        assert own or attribute not in LOADERS.get(module, ()), f"{name}:{node.lineno} {module}.{attribute}"
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            wrong = {"trust_remote_code": True, "allow_pickle": True, "weights_only": False, "shell": True}
            assert wrong.get(node.arg) is not node.value.value or node.arg not in wrong, (
                f"{name}:{node.value.lineno} {node.arg}"
            )
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value != "0.0.0.0", f"{name}:{node.lineno} binds to every address"


class Boom:
    def __reduce__(self):
        return (exec, ("open('boom', 'w').close()",))


def test_a_folder_whose_weights_are_a_pickle_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ModelError, match="safetensors"):
        load_causal_lm(tmp_path / "model")
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(pickle.dumps(Boom()))
    with pytest.raises(ModelError):
        load_causal_lm(tmp_path / "model")
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    "line",
    ["torch.load(path)", "pickle.load(file)", "yaml.load(text)", "from pickle import loads", "f(trust_remote_code=True)"],
)
def test_the_walk_sees_what_it_looks_for(line, tmp_path, monkeypatch):
    (tmp_path / "podium").mkdir()
    (tmp_path / "podium" / "mine.py").write_text(line + "\n")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    with pytest.raises(AssertionError, match=r"mine.py:1"):
        check(tmp_path / "podium" / "mine.py")


def test_remote_code_is_off():
    assert ModelSettings().trust_remote_code is False


def test_yaml_that_names_python_objects_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("algorithm: !!python/object/apply:os.system ['touch boom']\n")
    with pytest.raises(ConfigError):
        load_yaml(tmp_path / "recipe.yaml")
    assert not (tmp_path / "boom").exists()


def test_a_dataset_writes_nothing_outside_of_the_run_s_folder(tmp_path):
    """Names and texts of rows that look like paths stay names and texts."""
    from podium.recipes import train

    evil = "../../evil/x"
    row = {"prompt": evil, "answer": evil, evil: evil, "data_source": evil}
    (tmp_path / "home" / "runs").mkdir(parents=True)
    result = train(
        tiny_model(),
        [dict(row) for _ in range(4)],
        _named,
        tokenizer=tiny_tokenizer(),
        batch={"prompts_per_step": 2, "group_size": 2},
        rollout={"max_new_tokens": 2},
        run={"folder": str(tmp_path / "home" / "runs"), "name": "run", "steps": 1, "trackers": [], "progress": False},
    )
    written = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert written and all(path.is_relative_to(result.run_folder) for path in written)


def _named(completions, log_metric, log_extra, **columns):
    log_metric("../../evil/metric", 1.0)
    log_extra("../../evil/column", [1.0] * len(completions))
    return [float(len(c)) for c in completions]


@pytest.mark.parametrize("name", ["../outside", "a/b", "..", ""])
def test_a_run_s_name_is_a_file_name(name, tmp_path):
    from podium.runs.folder import RunFolder

    with pytest.raises(ConfigError, match="not a name for a run"):
        RunFolder.create(tmp_path / "runs", name)


def test_a_checkpoint_is_read_without_pickle(tmp_path):
    from podium.checkpoints.store import CheckpointStore

    path = CheckpointStore(tmp_path).save(1, {"x": {"w": torch.ones(2)}, "y": {"a": 1}})
    assert {p.suffix for p in path.iterdir()} == {".json", ".safetensors"}
