"""What the controller spends on data: a step's rows cut for 8 workers and put together again, Podium beside verl's DataProto.

2048 sequences of 512 prompt and 1024 response tokens (`--lengths full`), or of varied lengths up to that. One step's work on
each side, timed in turns in one process:

  cut        balance the rows by tokens, and cut them into 8 shares
  serialise  make the 8 shares ready to be sent (pickle's protocol 5, memory out of band; verl's own form)
  merge      put 8 results (two token columns) together, in the order of the rows

    OMP_NUM_THREADS=1 python benchmarks/dispatch.py [--rounds 7] [--lengths varied]

The figure is the median of the rounds, in milliseconds. verl is measured as its trainer does it: rows reordered by
`get_seqlen_balanced_partitions`, then `chunk`, then `concat`; both of its serialisations are shown. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from podium.controller.dispatch import PROTOCOLS
from podium.core.batch import Batch, Ragged
from podium.core.ranks import Ranks

ROWS, PROMPT, RESPONSE, WORKERS = 2048, 512, 1024, 8
FLOATS = ("rollout_log_probs", "old_log_probs", "advantages")


def lengths(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompt and response lengths of each row."""
    if kind == "full":
        return torch.full((ROWS,), PROMPT), torch.full((ROWS,), RESPONSE)
    draw = torch.Generator().manual_seed(0)
    return torch.randint(32, PROMPT + 1, (ROWS,), generator=draw), torch.randint(16, RESPONSE + 1, (ROWS,), generator=draw)


def podium_batch(prompts: torch.Tensor, responses: torch.Tensor) -> Batch:
    draw = torch.Generator().manual_seed(1)

    def ids(sizes: torch.Tensor) -> Ragged:
        return Ragged.of_lengths(torch.randint(0, 50_000, (int(sizes.sum()),), generator=draw), sizes)

    columns: dict[str, Any] = {"prompt_ids": ids(prompts), "response_ids": ids(responses)}
    ones = torch.ones(int(responses.sum()), dtype=torch.bool)
    columns["response_mask"] = columns["loss_mask"] = Ragged.of_lengths(ones, responses)
    for name in FLOATS:
        columns[name] = Ragged.of_lengths(torch.rand(len(ones), generator=draw), responses)
    columns["rewards"] = torch.rand(ROWS)
    return Batch(columns)


def podium_side(batch: Batch) -> dict[str, Callable[[], Any]]:
    rows, ranks = PROTOCOLS.get("rows"), Ranks(data=WORKERS)
    plan = rows((batch,), {}, ranks)
    results = [args[0].select("old_log_probs", "advantages") for args, _ in plan.calls]

    def serialise() -> list[bytes]:
        buffers: list[pickle.PickleBuffer] = []
        return [pickle.dumps(call, protocol=5, buffer_callback=buffers.append) for call in plan.calls]

    return {"cut": lambda: rows((batch,), {}, ranks), "serialise": serialise, "merge": lambda: plan.collect(results)}


def verl_side(batch: Batch) -> dict[str, Callable[[], Any]] | None:
    """verl's own functions over the same rows, padded as verl pads them; None where verl is not installed."""
    try:
        from verl.protocol import DataProto
        from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions
    except ImportError:
        return None
    prompt, response = (fixed(batch[name], width) for name, width in (("prompt_ids", PROMPT), ("response_ids", RESPONSE)))
    present = torch.cat([prompt[1], response[1]], dim=1)
    tensors = {
        "input_ids": torch.cat([prompt[0], response[0]], dim=1),
        "attention_mask": present.long(),
        "position_ids": present.long().cumsum(1) - 1,
        "responses": response[0],
        "response_mask": response[1].long(),
        **{name: fixed(batch[name], RESPONSE)[0] for name in FLOATS},
    }
    data = DataProto.from_dict(tensors={**tensors, "rewards": batch["rewards"]})

    def cut() -> list[Any]:
        sizes = data.batch["attention_mask"].view(ROWS, -1).sum(-1).tolist()
        parts = get_seqlen_balanced_partitions(sizes, k_partitions=WORKERS, equal_size=True)
        data.reorder(torch.tensor([row for part in parts for row in part]))
        return data.chunk(WORKERS)

    chunks = cut()
    results = [c.select(batch_keys=["old_log_probs", "advantages"]) for c in chunks]

    def serialise(method: str) -> list[bytes]:
        os.environ["VERL_DATAPROTO_SERIALIZATION_METHOD"] = method
        buffers: list[pickle.PickleBuffer] = []
        return [pickle.dumps(chunk, protocol=5, buffer_callback=buffers.append) for chunk in chunks]

    return {
        "cut": cut,
        "serialise": lambda: serialise(""),
        "serialise (numpy)": lambda: serialise("numpy"),
        "merge": lambda: DataProto.concat(results),
    }


def fixed(column: Ragged, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A column padded to a fixed width, and which entries exist."""
    padded = torch.zeros(len(column), width, dtype=column.dtype)
    valid = torch.arange(width) < column.lengths[:, None]
    padded[valid] = column.values
    return padded, valid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", choices=("full", "varied"), default="full")
    args = parser.parse_args()
    torch.set_num_threads(1)
    batch = podium_batch(*lengths(args.lengths))
    sides = {"podium": podium_side(batch), "verl": verl_side(batch)}
    times: dict[str, dict[str, list[float]]] = {name: {} for name, side in sides.items() if side}
    for _ in range(args.rounds):
        for name, into in times.items():
            for part, work in (sides[name] or {}).items():
                started = time.perf_counter()
                result = work()
                into.setdefault(part, []).append(1e3 * (time.perf_counter() - started))
                del result
    medians = {name: {part: statistics.median(values) for part, values in parts.items()} for name, parts in times.items()}
    for name, parts in medians.items():
        parts["step"] = parts["cut"] + min(v for p, v in parts.items() if p.startswith("serialise")) + parts["merge"]
        print(f"{name:7}" + "  ".join(f"{part} {ms:8.1f} ms" for part, ms in parts.items()))
    if "verl" not in medians:
        print("verl is not installed: pip install 'verl==0.9.1' tensordict")
    ratio = medians["verl"]["step"] / medians["podium"]["step"] if "verl" in medians else None
    print(json.dumps({"lengths": args.lengths, "milliseconds": medians, "verl_over_podium": ratio}))


if __name__ == "__main__":
    main()
