"""A whole GRPO step on one device: generate, score, one AdamW update, no KL; beside the roofline of `roofline.py`, and TRL.

    python benchmarks/grpo_step.py [--size 0.5b] [--prompts 32] [--group 8] [--prompt-tokens 256] [--new-tokens 512]
    python benchmarks/grpo_step.py --peer trl-vllm
    python benchmarks/grpo_step.py --size 1.5b --prompts 128 --prompt-tokens 512

Random bf16 weights of Qwen2.5's shapes; all answers have the full length (no token ends them); the reward is any number that
differs within a group. The rates that the roofline needs are measured in the same run. The first step (compilation, graphs)
is left out. `--peer trl-vllm` lets TRL with vLLM in its process make the same step first, `--peer trl` TRL with `generate`
of transformers; each in a process of its own (`trl_peer.py`), in several settings. `--size tiny --device cpu` runs the
script itself anywhere. The last line is one JSON object; `ratio_...` is how many times a step of Podium's a peer's is.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from podium.profiling.machine import copy_rate, matrix_rate, synchronize

sys.path.insert(0, str(Path(__file__).parent))
import roofline
from models import SHAPES, add_step_arguments, grpo_trainer


def measured_machine(device: str) -> roofline.Machine:
    """The rate of a product on random data, in the dtype that the step computes in, and the bandwidth of a copy."""
    return roofline.Machine(matrix_rate(device, torch.bfloat16 if device == "cuda" else torch.float32), copy_rate(device))


def podium_steps(args: argparse.Namespace, shape: roofline.Shape, folder: str) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step, and where the last one's time went."""
    from podium.stages.base import StepContext

    trainer = grpo_trainer(shape, args, folder, args.steps, args.microbatch_tokens)
    seconds, shares = [], {}
    for number in range(args.steps):
        context = StepContext(number, trainer.roles, args.group)
        started = time.perf_counter()
        batch = trainer.run_step(trainer.loader.next_batch(), context)
        synchronize(args.device)
        seconds.append(time.perf_counter() - started)
        shares = {n: v for n, v in context.metrics.means().items() if n.startswith("time/")}
        new = float(batch.lengths("response").float().mean())
        print(f"step {number}: {seconds[-1]:.2f} s, {new:.0f} new tokens a sequence, {shares}", flush=True)
    return seconds, shares


def peer_steps(args: argparse.Namespace) -> dict[str, Any]:
    """What `trl_peer.py` reports of the same step, from a process of its own; what it prints is passed on to stderr."""
    same = ("size", "prompts", "group", "prompt_tokens", "new_tokens", "device")
    command = [sys.executable, str(Path(__file__).with_name("trl_peer.py"))]
    command += [part for name in same for part in ("--" + name.replace("_", "-"), str(getattr(args, name)))]
    command += ["--steps", str(args.peer_steps), "--microbatch", str(args.peer_microbatch)]
    command += ["--vllm"] if args.peer == "trl-vllm" else []
    deadline = time.monotonic() + args.peer_seconds
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        watch = threading.Timer(args.peer_seconds, process.kill)
        watch.start()
        for line in process.stdout:
            last = line.strip() or last
            print("   peer:", line.rstrip()[:300], file=sys.stderr, flush=True)
        watch.cancel()
    if process.returncode:
        late = f" (it was stopped after {args.peer_seconds} s)" if time.monotonic() > deadline else ""
        return {"error": f"{args.peer} ended with status {process.returncode}{late}: {last[:300]}"}
    return json.loads(last)


def ratios(peer: str, report: dict[str, Any], ours: float) -> dict[str, float]:
    """How many times ours the peer's step is: its fastest setting, and its default."""
    seconds = report.get("seconds")
    if not seconds:
        return {}
    name = peer.replace("-", "_")
    return {f"ratio_to_{name}": min(seconds.values()) / ours, f"ratio_to_{name}_default": seconds["default"] / ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_step_arguments(parser)
    parser.add_argument("--microbatch-tokens", type=int, default=32_768)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--peer", choices=("trl-vllm", "trl"), default=None)
    parser.add_argument("--peer-steps", type=int, default=2, help="counted steps of each of the peer's settings")
    parser.add_argument("--peer-microbatch", type=int, default=32, help="sequences in a forward pass of the peer's training")
    parser.add_argument("--peer-seconds", type=float, default=360, help="the peer is stopped after so many")
    args = parser.parse_args()
    # Before this process takes memory of the device.
    peer = peer_steps(args) if args.peer else {}
    shape, machine = SHAPES[args.size], measured_machine(args.device)
    floor = roofline.step(shape, machine, args.prompts, args.group, args.prompt_tokens, args.new_tokens)
    with tempfile.TemporaryDirectory() as folder:
        seconds, shares = podium_steps(args, shape, folder)
    typical = sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2]
    report = {"size": args.size, "seconds": typical, "all": seconds, "of_roofline": floor["step"] / typical, "roofline": floor}
    report |= {"shares": shares, **({args.peer: peer, **ratios(args.peer, peer, typical)} if args.peer else {})}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
