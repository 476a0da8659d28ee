"""Models without numbers, and their weights read from safetensors in parts: no process ever holds the whole model."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from podium.core.errors import ModelError
from podium.models.lm_head import base_of
from podium.models.loading import PathLike, load_config, resolve_dtype, without_dropout
from podium.models.rope import scale_rope
from podium.models.small import small_of

_log = logging.getLogger(__name__)

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True)
class Parts:
    """Where the parameters of a model lie: by the parameter's name the file and the name in it."""

    places: Mapping[str, tuple[Path, str]]

    def read(self, name: str, box: Sequence[slice] | None = None) -> Tensor:
        """A parameter, or a box of it, in the file's dtype on the CPU. Only that is read."""
        path, key = self.places[name]
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(key) if box is None else file.get_slice(key)[tuple(box)]


_parts: weakref.WeakKeyDictionary[nn.Module, Parts] = weakref.WeakKeyDictionary()


def parts_in(model: nn.Module) -> dict[str, Parts]:
    """Where the weights lie of those modules inside a model (or itself) that have none yet, by the modules' names."""
    return {name: _parts[module] for name, module in model.named_modules() if module in _parts}


def base_in_parts(model: PreTrainedModel) -> PreTrainedModel:
    """The base of such a model, to be used without its head."""
    base = base_of(model)
    inside = {id(parameter): name for name, parameter in base.named_parameters()}
    places = {inside[id(p)]: _parts[model].places[name] for name, p in model.named_parameters() if id(p) in inside}
    _parts[base] = Parts(places)
    return base


def causal_lm_in_parts(
    path: PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantization: str = "none",
    rope_scaling: Mapping[str, Any] | None = None,
) -> PreTrainedModel | None:
    """A `transformers` causal LM as `load_causal_lm` gives it, but with its parameters on the meta device: an engine that cuts
    it reads its own parts (`parts_in`). Buffers are there, on `device`.

    None, with a line in the log that says why, where the weights cannot be read in parts: the folder is not local or has no
    safetensors, weights have other names or shapes in it, or are quantised.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() or quantization != "none":
        return None
    try:
        config = load_config(path, trust_remote_code=trust_remote_code)
        if getattr(config, "quantization_config", None) is not None:
            raise ModelError("its weights are quantised")
        if rope_scaling is not None:
            scale_rope(config, rope_scaling)
        with parameters_on_meta():
            model = AutoModelForCausalLM.from_config(
                config, dtype=resolve_dtype(dtype, device), trust_remote_code=trust_remote_code
            )
        places = _places(model, folder)
        small_of(model)
    except ModelError as error:
        _log.warning("%s is loaded whole on every rank before it is cut: %s", path, error.what)
        return None
    for _, module in model.named_modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = buffer.to(device) if buffer is not None else None
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    _parts[model] = Parts(places)
    return without_dropout(model)


@contextmanager
def parameters_on_meta() -> Any:
    """Inside, parameters of new modules have no memory; buffers do."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return None  # as it is
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(without_memory)  # type: ignore[arg-type]
    try:
        yield
    finally:
        hook.remove()


def _places(model: PreTrainedModel, folder: Path) -> dict[str, tuple[Path, str]]:
    """Raises ModelError where a parameter is not there under its own name (or that of one it is tied to)."""
    if any(name not in dict(model.named_parameters(remove_duplicate=False)) for name in model.state_dict()):
        raise ModelError("it saves more than parameters")
    files = _files(folder)
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    places: dict[str, tuple[Path, str]] = {}
    for name, parameter in model.named_parameters():
        key = next((other for other in names[id(parameter)] if other in files), None)
        if key is None:
            raise ModelError(f"'{name}' is not among its weights under that name")
        places[name] = (files[key], key)
    for path in set(files.values()):
        with safe_open(path, framework="pt") as file:
            for name, (where, key) in places.items():
                if where == path and file.get_slice(key).get_shape() != list(model.get_parameter(name).shape):
                    raise ModelError(f"'{name}' has another shape in its file")
    return places


def _files(folder: Path) -> dict[str, Path]:
    """Each weight's file."""
    if (folder / _INDEX).is_file():
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = {name: folder / file for name, file in index.items()}
    elif (folder / _SINGLE).is_file():
        with safe_open(folder / _SINGLE, framework="pt") as file:
            files = dict.fromkeys(file.keys(), folder / _SINGLE)
    else:
        raise ModelError("it has no safetensors")
    missing = next((path.name for path in set(files.values()) if not path.is_file()), None)
    if missing is not None:
        raise ModelError(f"the file {missing} is missing")
    return files
