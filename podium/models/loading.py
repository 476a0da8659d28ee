"""Models and tokenizers from a Hugging Face folder, the hub or a GGUF file, and back into a folder."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from podium.core.errors import ModelError, PodiumError
from podium.core.files import writing
from podium.models.quantization import keep_format, quantized_loading
from podium.models.rope import scale_rope

T = TypeVar("T")
PathLike = str | Path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


# ------------------------------------------------------------------ dtype


def native_bfloat16(device: str | torch.device) -> bool:
    """Whether the device multiplies bf16 in hardware: CUDA from Ampere on, a CPU with AMX or AVX512-BF16.

    Elsewhere bf16 is emulated and slower than fp32.
    """
    if torch.device(device).type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # Private names in torch 2.11 to 2.13; where a later version drops them the answer is the safe one.
    probes = (getattr(torch.cpu, name, None) for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.device(device).type == "cpu" and any(probe() for probe in probes if probe is not None)


def resolve_dtype(dtype: str | torch.dtype, device: str | torch.device) -> torch.dtype:
    """`auto`: bf16 where the device multiplies it natively, else fp32; others as they say."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto":
        return torch.bfloat16 if native_bfloat16(device) else torch.float32
    if dtype not in DTYPES:
        raise ModelError(f"unknown dtype '{dtype}'", where="model.dtype", remedy="one of: auto, " + ", ".join(DTYPES))
    return DTYPES[dtype]


# ------------------------------------------------------------------ loading


def check_path(path: PathLike) -> None:
    """Raises ModelError where the path is a local one (not a hub name) and no model is there."""
    _source(path)


def quiet() -> None:
    """Turns off transformers' own progress bars: Podium shows its own."""
    transformers_logging.disable_progress_bar()


def load_tokenizer(
    path: PathLike,
    *,
    chat_template: str | None = None,
    trust_remote_code: bool = False,
    needs_end_token: bool = True,
) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder, a hub name or a GGUF file.

    One without a pad token uses its end token for padding, in memory only: masks come from the rollout, never from pad ids.

    Args:
        chat_template: replaces the tokenizer's own.
        trust_remote_code: run python code that ships with the tokenizer.
        needs_end_token: False for a reward model, which ends no response (encoders have none).

    Raises:
        ModelError: nothing is there, it cannot be read, or it has no end token and needs one.
    """
    source, options = _source(path)
    tokenizer = _guarded(
        lambda: AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options), path, "a tokenizer"
    )
    if "gguf_file" in options:
        _take_gguf_special_tokens(tokenizer, Path(path).expanduser())
    if needs_end_token and tokenizer.eos_token_id is None:
        raise ModelError(
            f"the tokenizer of '{path}' has no end token (eos_token), so no response could end",
            where="model.path",
            remedy='set "eos_token" in its tokenizer_config.json to the token that ends an answer',
        )
    if tokenizer.pad_token_id is None and tokenizer.eos_token_id is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def _take_gguf_special_tokens(tokenizer: PreTrainedTokenizerBase, path: Path) -> None:
    """The special tokens that the GGUF file names; transformers guesses them (SmolLM2's end token comes out as its start)."""
    from gguf import GGUFReader

    fields = GGUFReader(path).fields
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        field = fields.get(f"tokenizer.ggml.{key}_token_id")
        if field is not None:
            setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(int(field.contents())))
    tokenizer.clean_up_tokenization_spaces = False


def load_config(path: PathLike, *, trust_remote_code: bool = False) -> Any:
    """The `transformers` config of a folder, a hub name or a GGUF file; no weights are needed. Raises ModelError."""
    source, options = _source(path)
    return _guarded(
        lambda: AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **options), path, "a config"
    )


def load_causal_lm(
    path: PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    quantization: str = "none",
    rope_scaling: Mapping[str, Any] | None = None,
) -> PreTrainedModel:
    """A `transformers` causal LM from a folder, a hub name or a GGUF file, without dropout.

    Args:
        dtype: `auto`, `float32`, `bfloat16` or `float16` (see `resolve_dtype`).
        device: where the parameters go.
        trust_remote_code: run python code that ships with the model.
        quantization: "none"; "4bit" or "8bit" keep the weights of the linear layers so, frozen (see `models.quantization`).
        rope_scaling: a longer context by another rotary embedding (see `models.rope`); None: the model's own.

    Raises:
        ModelError: nothing is there, it cannot be read, or weights are missing in it; it has no rotary embedding to scale.
        ConfigError: `quantization` without bitsandbytes.
    """
    return load_pretrained(
        AutoModelForCausalLM,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        quantization=quantization,
        rope_scaling=rope_scaling,
    )


def load_sequence_classifier(
    path: PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    new_head: int = 0,
    **options: Any,
) -> PreTrainedModel:
    """A `transformers` sequence classifier (reward model) from a folder or a hub name, without dropout.

    Args:
        new_head: 0 loads the saved head; otherwise the weights may be a causal LM's, and a new head with so many outputs
            is put on them.
        options: `quantization`, `rope_scaling`, as for `load_causal_lm`.

    Raises:
        ModelError: as `load_causal_lm`; or the folder has no classification head and no new one was asked for.
    """
    return load_pretrained(
        AutoModelForSequenceClassification,
        path,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        may_miss=("score.weight", "score.bias") if new_head else (),
        new_config={"num_labels": new_head} if new_head else {},
        ignore_mismatched_sizes=bool(new_head),
        **options,
    )


def load_pretrained(
    auto_class: Any,
    path: PathLike,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    trust_remote_code: bool = False,
    may_miss: Collection[str] = (),
    quantization: str = "none",
    rope_scaling: Mapping[str, Any] | None = None,
    new_config: Mapping[str, Any] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Any `transformers` auto class, without dropout; every failure is a ModelError that names the path.

    Args:
        may_miss: weights that may be missing in the folder (they get new values); any other is an error.
        quantization, rope_scaling: as for `load_causal_lm`.
        new_config: fields of the config that are other than in the folder.
        options: passed to `from_pretrained`.
    """
    source, gguf = _source(path)
    if not gguf:
        _refuse_pickle(source)
        options["use_safetensors"] = True  # of a hub's repository too: a pickle runs what it holds
    dtype = resolve_dtype(dtype, device)
    options |= quantized_loading(quantization, dtype, device)

    def load() -> tuple[PreTrainedModel, dict[str, Any]]:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code, **gguf, **(new_config or {}))
        if rope_scaling is not None:
            scale_rope(config, rope_scaling)
        options["config"] = config
        return auto_class.from_pretrained(
            source, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, **gguf, **options
        )

    model, info = _guarded(load, path, auto_class.__name__)
    missing = sorted(set(info["missing_keys"]) - set(may_miss))
    if missing:  # transformers fills them with random values and only warns
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise ModelError(
            f"'{path}' lacks the weights {shown}",
            where="model.path",
            remedy=f"it was not saved from an {auto_class.__name__}, or is incomplete: load another folder",
        )
    model = without_dropout(_without_quantization(model) if gguf else model)
    if quantization == "none":
        return model.to(device)
    keep_format(model)
    return model  # it was put there as it was read


def _refuse_pickle(source: str) -> None:
    """Raises ModelError for a local folder whose weights are there as a pickle only."""
    folder = Path(source)
    pickles = sorted(p.name for p in folder.glob("*.bin") if p.name.startswith("pytorch_model")) if folder.is_dir() else []
    if pickles and not any(folder.glob("*.safetensors")):
        raise ModelError(
            f"the weights in '{source}' are a pickle ({pickles[0]}), which can run code; only safetensors are read",
            where="model.path",
            remedy="where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)",
        )


def without_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Switches dropout off for good: a policy must give a token the same probability when it samples and when it trains."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model.eval()


def _source(path: PathLike) -> tuple[str, dict[str, str]]:
    """What `from_pretrained` takes: a folder or hub name, and the options for a GGUF file.

    Raises ModelError where the path is a local one and nothing usable is there.
    """
    text, local = str(path), Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise ModelError(f"there is no file '{text}'", where="model.path", remedy="check the path of the GGUF file")
        return str(local.parent), {"gguf_file": local.name}
    if local.is_dir():
        if not (local / "config.json").is_file():
            found = sorted(p.name for p in local.glob("*.gguf"))
            remedy = f"name the file itself: {local / found[0]}" if found else "a Hugging Face model folder has config.json"
            if (local / "adapter_config.json").is_file():
                remedy = "it holds an adapter alone: give the folder of the merged model that was exported with it"
            raise ModelError(f"the folder '{text}' holds no model (no config.json)", where="model.path", remedy=remedy)
        return str(local), {}
    if local.exists() or local.is_absolute() or text.startswith((".", "~")) or text.count("/") > 1:
        raise ModelError(
            f"there is no model folder '{text}'",
            where="model.path",
            remedy="give a folder with config.json and weights, a GGUF file, or a hub name (owner/name)",
        )
    return text, {}


def _guarded(load: Callable[[], T], path: PathLike, what: str) -> T:
    """Runs a loader; what goes wrong in it becomes one ModelError that names the path."""
    try:
        return load()
    except PodiumError:
        raise
    except ImportError as error:
        raise ModelError(
            f"'{path}' needs a package that is not installed: {_first_line(error)}",
            where="model.path",
            remedy="install it; for GGUF files: pip install 'podium[gguf]' accelerate",
        ) from error
    except Exception as error:
        local = Path(path).expanduser().exists()
        raise ModelError(
            f"'{path}' could not be loaded as {what}: {_first_line(error)}",
            where="model.path",
            remedy="check that the folder is complete"
            if local
            else "there is no such folder here; check the name, and that this machine can reach the Hugging Face hub",
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _without_quantization(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a plain model: one that was read from a GGUF file refuses to be saved."""
    config = deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    # The weights are handed over, not copied; buffers outside the state dict (rotary tables) come along too.
    plain.load_state_dict(model.state_dict(), assign=True)
    for name, buffer in model.named_buffers():
        parent, _, leaf = name.rpartition(".")
        plain.get_submodule(parent)._buffers[leaf] = buffer
    for mine, theirs in zip(plain.modules(), model.modules(), strict=True):
        for name, value in vars(theirs).items():
            if isinstance(value, torch.Tensor):  # tensors kept as plain attributes
                setattr(mine, name, value)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    config.architectures = [type(model).__name__]
    return plain


# ------------------------------------------------------------------ saving


def save_pretrained(folder: PathLike, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
    """Writes a Hugging Face folder that plain `transformers` loads. What was there is replaced, whole or not at all."""
    with replaced_folder(folder) as fresh:
        model.save_pretrained(fresh)
        if tokenizer is not None:
            tokenizer.save_pretrained(fresh)


@contextmanager
def replaced_folder(folder: PathLike) -> Iterator[Path]:
    """A new folder to write into, beside `folder`; it takes that name when the block ends without an error.

    After a crash there is the old folder or the new one, never a half-written one. Raises CheckpointError where it cannot be
    written (disk full, no permission).
    """
    folder = Path(folder)
    fresh, old = (folder.parent / f".{folder.name}.{kind}-{uuid.uuid4().hex[:8]}" for kind in ("new", "old"))
    try:
        with writing(folder, "the model"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            fresh.mkdir()
            yield fresh
            if folder.exists():
                folder.rename(old)
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
