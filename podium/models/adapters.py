"""LoRA adapters (Hu et al. 2021, arXiv:2106.09685) in a `transformers` model: putting them in, off, and into the weights.

`peft` puts the layers into the model itself, so everything that runs the model (packed training, the native and the `hf`
rollout engine) runs the adapted weights, and the base's parameters are where they were, frozen.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from podium.core.errors import ConfigError, ModelError
from podium.core.settings import LoraSettings
from podium.models.quantization import dequantised, is_quantised, keep_format

_NAME = "default"  # the adapter's name inside the model: peft's own default
ADAPTER_FOLDER = "adapter"


# ------------------------------------------------------------------ in


def add_lora(model: Any, lora: LoraSettings) -> None:
    """Puts a new adapter into the model, in place: `W x + alpha/rank * B A x`, B zero, so that nothing changes yet.

    The base is frozen; A and B (fp32) are all that trains.

    Args:
        model: a `transformers` model, or the base of one.
        lora: rank, alpha and which layers.

    Raises:
        ConfigError: `peft` is not installed.
        ModelError: the model has an adapter already, or no layer of these names, or they include the LM head.
    """
    peft = _peft()
    targets = lora.target_modules
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=0.0,
        target_modules=targets if isinstance(targets, str) else list(targets),
        task_type="CAUSAL_LM" if hasattr(model, "lm_head") else None,
        base_model_name_or_path=getattr(model.config, "_name_or_path", None) or None,
    )
    add_peft(model, config)


def add_peft(model: Any, config: Any) -> None:
    """As `add_lora`, from a `peft.LoraConfig`. Raises also where it asks for what Podium does not do."""
    peft = _peft()
    if adapter_layers(model):
        raise ModelError(
            "the model has an adapter already", where="model.lora", remedy="leave model.lora out to train that one"
        )
    if getattr(config, "peft_type", None) != peft.PeftType.LORA:
        raise ModelError(f"{type(config).__name__} is no LoRA configuration", remedy="give a peft.LoraConfig")
    if config.lora_dropout:
        raise ModelError(f"lora_dropout={config.lora_dropout}", remedy="set it to 0: " + NO_DROPOUT)
    if config.modules_to_save or config.bias != "none":
        raise ModelError("modules_to_save and bias are not trained beside an adapter", remedy="leave them at their defaults")
    keep_format(model)
    try:
        peft.inject_adapter_in_model(config, model, adapter_name=_NAME)
    except ValueError as error:
        linear = sorted({name.rpartition(".")[2] for name, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise ModelError(
            f"no adapter fits: {str(error).splitlines()[0][:200]}",
            where="model.lora.target_modules",
            remedy="its linear layers: " + ", ".join(linear),
        ) from error
    check_adapters(model)
    for layer in adapter_layers(model).values():
        layer.lora_A.float()
        layer.lora_B.float()


NO_DROPOUT = "a policy must give a token the same probability when it samples and when it trains"


def check_adapters(model: Any) -> None:
    """Raises ModelError for adapters that Podium cannot run or merge: other kinds than plain LoRA, or on the LM head."""
    for name, layer in adapter_layers(model).items():
        if not hasattr(layer, "lora_A") or layer.lora_embedding_A or any(layer.lora_variant.values()):
            raise ModelError(
                f"'{name}' has an adapter that is no plain LoRA of a linear layer", remedy="use a plain LoraConfig"
            )
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(head).__module__.partition(".")[0] == "peft":
        raise ModelError(
            "an adapter on the LM head would be left out: Podium reads the head's weight",
            where="model.lora.target_modules",
            remedy="target the layers below it ('all-linear' leaves it out)",
        )


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ConfigError(
            f"LoRA needs the package peft ({error})", where="model.lora", remedy="pip install 'podium[lora]'"
        ) from error
    return peft


# ------------------------------------------------------------------ looking


def plain_of(model: Any) -> Any:
    """The `transformers` model inside a `PeftModel` (its adapters are in its layers); any other model as it is.

    Raises ModelError for a `PeftModel` that does not work inside the layers (prompt and prefix tuning).
    """
    peft = sys.modules.get("peft")  # where nobody imported it, there is no such model
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    if model.active_peft_config.is_prompt_learning:
        raise ModelError(f"{type(model).__name__} learns a prompt, which Podium does not train", remedy="use LoRA")
    return model.get_base_model()


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """The layers that peft put in, by name; empty for a model without an adapter."""
    if "peft" not in sys.modules:
        return {}
    from peft.tuners.tuners_utils import BaseTunerLayer

    return {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}


@torch.no_grad()
def is_silent(model: nn.Module) -> bool:
    """Whether the adapter changes nothing yet (every B is zero); True without one."""
    return not any(b.weight.any() for layer in adapter_layers(model).values() for b in layer.lora_B.values())


# ------------------------------------------------------------------ off


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """The base alone, for a while. What trains, and the memory of the weights, is as before."""
    layers = list(adapter_layers(model).values())
    trains = [(p, p.requires_grad) for layer in layers for p in layer.parameters()]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter, flag in trains:  # peft switches them off and on with the adapter
            parameter.requires_grad_(flag)


class WithoutAdapter(nn.Module):
    """The model of a role with its adapter off: the reference, over the very weights that the actor has.

    Its parameters are the base's, under the names that they have without an adapter.

    Args:
        role: an `ActorModel` with an adapter.
    """

    def __init__(self, role: Any) -> None:
        super().__init__()
        self._role: tuple[Any] = (role,)  # no submodule: the adapter is no part of this model

    @property
    def model(self) -> Any:
        """The `transformers` model, with the adapter as it is now."""
        return self._role[0].model

    @property
    def packs(self) -> bool:
        return self._role[0].packs

    def compute(self, packed: Any, outputs: Sequence[str]) -> dict[str, Tensor]:
        """What the role computes, by the base alone."""
        with adapter_off(self._role[0]):
            return self._role[0].compute(packed, outputs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._role[0].named_parameters(*args, **kwargs):
            if ".lora_" not in name:
                yield _base_name(name), parameter

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        tensors = self._role[0].state_dict(*args, **kwargs)
        return {_base_name(name): tensor for name, tensor in tensors.items() if ".lora_" not in name}


def _base_name(name: str) -> str:
    return name.replace(".base_layer.", ".")


def sharing_copy(model: Any) -> Any:
    """A copy of a model without its adapter that shares the frozen parameters (no second copy of the weights).

    For a second role over the same base. Parameters that train are copied.
    """
    shared = {id(p): p for p in model.parameters() if not p.requires_grad}
    return remove_adapter(copy.deepcopy(model, shared))


def remove_adapter(model: Any) -> Any:
    """Takes the adapter out, in place, and gives the model back."""
    for name, layer in adapter_layers(model).items():
        model.set_submodule(name, layer.get_base_layer())
    for part in model.modules():
        if "peft_config" in vars(part):
            del part.peft_config
    return model


# ------------------------------------------------------------------ into the weights


@contextmanager
@torch.no_grad()
def merged(model: Any) -> Iterator[None]:
    """Inside, the model has plain layers with the adapter in their weights, to be saved; afterwards it is as it was.

    The live weights are not touched: each merged weight, `W + alpha/rank * B A` in the weight's dtype, is new, on the CPU.
    A quantised layer becomes a plain one in the model's dtype.
    """
    adapted = adapter_layers(model)
    inside = tuple(f"{name}." for name in adapted)
    swapped: dict[str, Any] = dict(adapted)
    swapped |= {n: m for n, m in model.named_modules() if is_quantised(m) and not n.startswith(inside)}
    settings = {name: vars(model.config).get(name) for name in ("quantization_config",)}
    flags = {n: getattr(model, n) for n in _LOADED_AS if n in vars(model)}
    try:
        for name, layer in swapped.items():
            model.set_submodule(name, _plain_layer(layer, model.dtype))
        for name in flags:
            setattr(model, name, None if name == "hf_quantizer" else False)
        if settings["quantization_config"] is not None:
            del model.config.quantization_config
        yield
    finally:
        for name, layer in swapped.items():
            model.set_submodule(name, layer)
        for name, value in flags.items():
            setattr(model, name, value)
        if settings["quantization_config"] is not None:
            model.config.quantization_config = settings["quantization_config"]


# What transformers notes on a model that it would otherwise save in another form.
_LOADED_AS = ("_hf_peft_config_loaded", "hf_quantizer", "is_quantized", "is_loaded_in_4bit", "is_loaded_in_8bit")


def _plain_layer(layer: Any, dtype: torch.dtype) -> nn.Module:
    """A layer (adapted, quantised or both) as a new plain one on the CPU."""
    base = layer.get_base_layer() if hasattr(layer, "get_base_layer") else layer
    weight, bias = dequantised(base), base.bias
    out = weight.to(dtype if is_quantised(base) else weight.dtype).cpu()
    if base is not layer:
        for name in layer.active_adapters:
            out = (out.float() + layer.get_delta_weight(name).float().cpu()).to(out.dtype)
    if is_quantised(base):
        plain: nn.Module = nn.Linear(base.in_features, base.out_features, bias=bias is not None, device="meta")
    else:
        plain = copy.copy(base)  # nn.Linear, or the Conv1D of GPT-2
        plain._parameters = dict(base._parameters)
    plain.weight = nn.Parameter(out, requires_grad=False)
    if bias is not None:
        plain.bias = nn.Parameter(bias.detach().to(out.dtype).cpu(), requires_grad=False)
    return plain


def save_adapter(model: Any, folder: Path) -> None:
    """Writes the adapter as a peft folder (`PeftModel.from_pretrained(base, folder)` loads it)."""
    import peft
    from safetensors.torch import save_file

    folder.mkdir()
    state = {
        f"base_model.model.{name.replace(f'.{_active(model)}.', '.')}": tensor.detach().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if ".lora_" in name and f".{_active(model)}." in name
    }
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.copy(model.peft_config[_active(model)])
    config.inference_mode = True
    assert isinstance(config, peft.PeftConfig)
    config.save_pretrained(str(folder))


def _active(model: Any) -> str:
    return next(iter(adapter_layers(model).values())).active_adapters[0]
