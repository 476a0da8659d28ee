"""Training on several GPUs that ends in a rollout which generates: whole copies beside tensor parallel generation.

    torchrun --nproc-per-node 2 benchmarks/handover_engines.py --shape 7b          # two GPUs, NCCL
    torchrun --nproc-per-node 2 benchmarks/handover_engines.py --shape tiny        # a laptop, gloo

A model of the shape with random weights is trained by FSDP2 over all ranks (its forward passes; no optimizer). For each layout
of generation (`tp`: one copy that all ranks have between them; `dp`: a whole copy on each) the script prints: milliseconds of
the hand-over, with its checks; tokens per second of the same requests; and the canary: the mean and the largest difference, in
nats, between the log-probs that the rollout sampled with and those that training computes of the same tokens, after a first
hand-over, after a second one with changed weights, and after the cache slept and woke. The last line has the comparisons.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen2Config

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.handover import SHAPES
from podium.core.batch import Batch
from podium.core.ranks import Ranks, WorkerContext
from podium.engines.base import SamplingParams
from podium.engines.layout import local_of
from podium.engines.rollout.divided import DividedModel
from podium.engines.rollout.native.choose import native_engine
from podium.engines.train.sharded import ShardedEngine
from podium.hybrid.generation import DividedGeneration
from podium.models.heads import ActorModel
from podium.workers.rollout import RowExchange


class NoText:
    """What an engine asks of a tokenizer, where nothing is text."""

    eos_token_id = None

    def decode(self, ids: list[int], **_: Any) -> str:
        return ""


def model_of(shape: str, device: torch.device) -> Any:
    """Random weights, the same on every rank (the engine takes the first one's in any case)."""
    hidden, width, layers, heads, kv, _, vocabulary, tied = SHAPES[shape]
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        tie_word_embeddings=tied,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def requests(args: argparse.Namespace, rank: int, ranks: int) -> Batch:
    """This rank's rows: prompts of 64 tokens, each for a group of 4."""
    vocabulary = SHAPES[args.shape][6]
    generator = torch.Generator().manual_seed(3)
    prompts = torch.randint(0, vocabulary, (args.rows // 4, 64), generator=generator).repeat_interleave(4, 0)
    mine = slice(rank * len(prompts) // ranks, (rank + 1) * len(prompts) // ranks)
    return Batch({"prompt_ids": prompts[mine].tolist(), "sample_seed": list(range(len(prompts)))[mine]})


class Side:
    """Training's engine and one way to generate with its weights."""

    def __init__(self, size: int, args: argparse.Namespace, context: WorkerContext) -> None:
        self.context, self.args, self.device = context, args, torch.device(context.device)
        model = model_of(args.shape, self.device)
        divided, actor = DividedModel(model, size), ActorModel(model)
        self.engine = ShardedEngine(actor, context=context, microbatch_tokens=8192)
        timeout = timedelta(seconds=300)
        self.side = DividedGeneration(divided, self.engine, context, timeout=timeout, deadline_seconds=120.0)
        options = {"max_cache_tokens": 1 << 18, "graphs": args.graphs} if self.device.type == "cuda" else {}
        self.rollout: Any = native_engine(self.side.model, NoText(), max_concurrent=args.rows, **options)  # type: ignore[arg-type]
        self.hand_over = self.side.hand_over()
        self.exchange = RowExchange.among(self.side.groups.copies, context, self.side.ranks, timeout=timeout)

    def run(self) -> dict[str, Any]:
        gaps, tokens_per_second, report = [], 0.0, None
        for phase in ("first", "changed", "slept"):
            if phase != "first":
                with torch.no_grad():
                    for parameter in self.engine.model.parameters():
                        local_of(parameter.detach()).mul_(1.01)
                self.engine.policy_version += 1
                report = self.hand_over(self.engine.policy_version)
                self.rollout.update_weights(self.engine.policy_version)
            if phase == "slept":
                self.rollout.release()
            rows = requests(self.args, self.context.rank, self.context.world_size)
            self._wait()
            start = time.perf_counter()
            out = self.exchange.generate(self.rollout, rows, SamplingParams(max_new_tokens=self.args.tokens))
            self._wait()
            tokens_per_second = self.args.rows * self.args.tokens / (time.perf_counter() - start)
            gaps.append(self._gap(out))
        assert report is not None
        return {
            "hand_over_ms": round(report.seconds * 1e3, 2),
            "checks_ms": round(report.verify_seconds * 1e3, 2),
            "received_MB": round(report.moved.received / 1e6, 1),
            "held_MB": round(sum(p.numel() * p.element_size() for p in self.side.model.parameters()) / 1e6, 1),
            "tokens_per_second": round(tokens_per_second, 1),
            "mean_gap_nats": [round(mean, 6) for mean, _ in gaps],
            "largest_gap_nats": [round(most, 5) for _, most in gaps],
        }

    def _gap(self, out: Batch) -> tuple[float, float]:
        """Between what was sampled with and what training computes of the same tokens: mean and largest, over all ranks."""
        computed = self.engine.compute(out.select("prompt_ids", "response_ids"), ("log_probs",))["log_probs"].values
        apart = (computed - out["rollout_log_probs"].values).abs()
        numbers = torch.tensor([float(apart.sum()), float(len(apart))], device=self.device)
        most = apart.max().to(self.device)
        dist.all_reduce(numbers)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return float(numbers[0] / numbers[1]), float(most)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--rows", type=int, default=64, help="responses, over all ranks (a multiple of 4)")
    parser.add_argument("--tokens", type=int, default=128, help="of each response")
    parser.add_argument("--no-graphs", dest="graphs", action="store_false", help="the plain path of the rollout engine")
    args = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if on_gpu else "cpu"
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    context = WorkerContext("actor", rank, Ranks(shard=ranks), device, "nccl" if on_gpu else "gloo")
    results: dict[str, dict[str, Any]] = {}
    for kind, size in (("tp", ranks), ("dp", 1)):
        side = Side(size, args, context)
        results[kind] = side.run()
        del side
        gc.collect()
        if on_gpu:
            torch.cuda.empty_cache()
        if rank == 0:
            print(json.dumps({"shape": args.shape, "ranks": ranks, "generation": kind, **results[kind]}), flush=True)
    if rank == 0:
        tp, dp = results["tp"], results["dp"]
        last = {
            "shape": args.shape,
            "ranks": ranks,
            "ratio_weights_held_dp_to_tp": round(dp["held_MB"] / tp["held_MB"], 3),
            "ratio_hand_over_dp_to_tp": round(dp["hand_over_ms"] / tp["hand_over_ms"], 3),
            "ratio_tokens_per_second_tp_to_dp": round(tp["tokens_per_second"] / dp["tokens_per_second"], 3),
            "ratio_mean_gap_tp_to_dp": round(tp["mean_gap_nats"][-1] / max(dp["mean_gap_nats"][-1], 1e-9), 3),
        }
        print(json.dumps(last), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
