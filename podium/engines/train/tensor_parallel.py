"""Tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) with DTensor, for layers named as in Llama, Qwen, Mistral, Gemma.

Queries, keys, values, gate and up are cut by columns (heads), the products after them by rows. Norms, the embedding and the
heads are whole on every rank. What comes after the base is computed for a share of the tokens on each rank
(`inner_ranks.py`), so the LM head's work is divided too.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor, nn

from podium.core.errors import ConfigError, ModelError
from podium.core.ranks import Ranks
from podium.engines.layout import Split
from podium.engines.train.collectives import scale_backward, sum_backward

BY_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
BY_ROWS = ("o_proj", "down_proj")
PER_HEAD = ("q_norm", "k_norm")
"""Norms of single heads: whole on every rank, but each rank's gradient is that of its own heads."""


def check_divides(config: Any, ranks: Ranks, where: str = "parallel") -> None:
    """Whether a model's heads and widths divide by these ranks; from its config alone, before anything is loaded.

    Raises ConfigError with the values that would do.
    """
    if ranks.tensor * ranks.sequence == 1:
        return
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    heads: int = getattr(config, "num_attention_heads", None) or 0
    kv: int = getattr(config, "num_key_value_heads", None) or heads
    if not heads:
        raise ConfigError(f"{type(config).__name__} has no attention heads to divide", where=where, remedy="use data or shard")
    if ranks.tensor > 1:
        width = getattr(config, "intermediate_size", 0) or 0
        sizes = {"attention heads": heads, "key/value heads": kv, "intermediate size": width}
        good = [t for t in range(1, kv + 1) if not any(n % t for n in sizes.values())]
        bad = [f"{n} {name}" for name, n in sizes.items() if n % ranks.tensor]
        if bad:
            raise ConfigError(
                f"the model's {' and '.join(bad)} do not divide by tensor={ranks.tensor}",
                where=f"{where}.tensor",
                remedy=f"one of {good}",
            )
    if ranks.sequence > 1:
        h, k = heads // ranks.tensor, kv // ranks.tensor
        good = [s for s in range(1, h + 1) if h % s == 0 and (k % s == 0 or s % k == 0)]
        if ranks.sequence not in good:
            each = f" on each of {ranks.tensor} tensor ranks" if ranks.tensor > 1 else ""
            raise ConfigError(
                f"{h} attention and {k} key/value heads{each} do not divide by sequence={ranks.sequence}",
                where=f"{where}.sequence",
                remedy=f"one of {good}",
            )


def decoder_layers(base: nn.Module) -> nn.ModuleList | None:
    """The list of a base's layers; None where there is none that is as long as its config says."""
    config: Any = getattr(base, "config", None)
    count = getattr(config.get_text_config(), "num_hidden_layers", None) if config is not None else None
    lists = (m for m in base.modules() if isinstance(m, nn.ModuleList) and len(m) == count)
    return next(lists, None)


def split_of(name: str) -> Split | None:
    """How tensor parallelism cuts a parameter, by its name; None: not at all."""
    module, _, kind = name.rpartition(".")
    last = module.rpartition(".")[2]
    if last in BY_COLUMNS:
        return Split(0)
    return Split(1) if last in BY_ROWS and kind == "weight" else None


def cuts_of(layer: nn.Module, where: str = "parallel.tensor") -> dict[str, Literal["columns", "rows"]]:
    """How each linear layer inside a decoder layer is cut, by its name. Raises ModelError for one of an unknown name."""
    cuts: dict[str, Literal["columns", "rows"]] = {}
    for name, module in layer.named_modules():
        last = name.rpartition(".")[2]
        if last in BY_COLUMNS:
            cuts[name] = "columns"
        elif last in BY_ROWS:
            cuts[name] = "rows"
        elif isinstance(module, nn.Linear):
            raise ModelError(
                f"tensor parallelism does not know how to cut '{name}' of {type(layer).__name__}",
                where=where,
                remedy=f"it cuts {', '.join(BY_COLUMNS + BY_ROWS)}; use shard for this model",
            )
    return cuts


def apply_tensor_parallel(base: Any, mesh: Any) -> None:
    """Cuts the base's layers over the mesh's ranks, in place. Every rank must have the same weights.

    Raises ModelError for a linear layer of an unknown name.
    """
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers, group = decoder_layers(base), mesh.get_group()
    if layers is None:
        raise ModelError(f"{type(base).__name__} has no list of layers that tensor parallelism could cut", remedy="use shard")
    for parameter in base.parameters():
        parameter.data = parameter.data.contiguous()  # a CPU may have it by columns
    styles = {"columns": ColwiseParallel, "rows": RowwiseParallel}
    for layer in layers:
        parallelize_module(layer, mesh, {name: styles[cut]() for name, cut in cuts_of(layer).items()}, src_data_rank=None)  # type: ignore[arg-type]
    # The embedding's gradient is the same on every rank and the (maybe tied) head's a share: a share of both adds up.
    base.get_input_embeddings().register_forward_hook(lambda _, __, out: scale_backward(out, 1 / mesh.size()))

    def whole_gradient(_: nn.Module, __: Any, out: Any) -> Any:
        hidden: Tensor = out.last_hidden_state
        out.last_hidden_state = sum_backward(hidden, group)
        return out

    base.register_forward_hook(whole_gradient)
