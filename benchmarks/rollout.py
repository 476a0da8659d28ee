"""Rollout speed on one device: whole requests, prefill and scheduling included, forced lengths, log-probs returned.

    python benchmarks/rollout.py --engine native,vllm,hf --workload A,B --model 0.5b,1.5b,7b
    python benchmarks/rollout.py --device cpu --engine native,hf --workload S --model 135m

Engines alternate in one run, over random bf16 weights of Qwen2.5's shapes (135m: SmolLM2's). Workloads: A, 256 requests of
100-1024 tokens in and 100-1024 out (seeded); B, 128 prompts x 8 samples, 512 + 512; C, 256 x (256 + 256); S, 64 x (32 + 64).
`hf` (transformers' generate) runs C and S alone: it takes no batch of mixed lengths. `paged` is the native engine with
pages, `slots` the one without, whatever the device. An engine that is not installed is skipped, with the reason.

The roofline: each step's bytes over this machine's copy bandwidth, or its operations over its matrix rate, whichever is
longer, summed; weights, keys and values (a shared prompt once) and logits each read once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
             "num_key_value_heads": 2, "tie_word_embeddings": True},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
           "num_key_value_heads": 4, "tie_word_embeddings": False},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
             "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49152},
}  # fmt: skip
VOCABULARY = 151936
Work = list[tuple[tuple[int, ...], int, int]]
"""(prompt, tokens to generate, seed) of each request."""


def workload(name: str) -> Work:
    rng = random.Random(0)

    def prompt(length: int) -> tuple[int, ...]:
        return tuple(rng.randrange(49152) for _ in range(length))

    if name == "A":
        return [(prompt(rng.randint(100, 1024)), rng.randint(100, 1024), i) for i in range(256)]
    if name == "B":
        prompts = [prompt(512) for _ in range(128)]
        return [(p, 512, i) for i, p in enumerate(p for p in prompts for _ in range(8))]
    if name == "C":
        return [(prompt(256), 256, i) for i in range(256)]
    if name == "S":
        return [(prompt(32), 64, i) for i in range(64)]
    raise SystemExit(f"no workload {name}")


def config_of(size: str) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    kind = LlamaConfig if size == "135m" else Qwen2Config
    return kind(**{"vocab_size": VOCABULARY, "max_position_embeddings": 32768, **SHAPES[size]})


def random_model(size: str, device: str) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(size), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


# ------------------------------------------------------------------ engines: each returns a function that runs the work


def native(model: Any, options: dict[str, Any], kind: str = "native") -> Callable[[Work], None]:
    from podium.engines.base import Request, SamplingParams
    from podium.engines.rollout.native.choose import native_engine
    from podium.engines.rollout.native.engine import NativeEngine
    from podium.engines.rollout.native.paged_engine import PagedEngine

    make: Any = {"native": native_engine, "slots": NativeEngine, "paged": PagedEngine}[kind]
    engine = make(model, SimpleNamespace(eos_token_id=None), **options)

    def run(work: Work) -> None:
        for prompt, length, seed in work:
            engine.submit(Request(prompt, SamplingParams(max_new_tokens=length), seed))
        done = []
        while engine.pending:
            done += engine.step()
        assert sorted(len(t.response_ids) for t in done) == sorted(n for _, n, _ in work)
        assert all(len(t.segments[0].log_probs) == len(t.response_ids) for t in done)

    run.engine = engine  # type: ignore[attr-defined]
    return run


def hf(model: Any, options: dict[str, Any]) -> Callable[[Work], None]:
    from podium.models.lm_head import own_attention

    def run(work: Work) -> None:
        ids = torch.tensor([p for p, _, _ in work], device=model.device)
        with own_attention(model, "sdpa"), torch.no_grad():
            out = model.generate(ids, max_new_tokens=work[0][1], min_new_tokens=work[0][1], do_sample=True, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + work[0][1]

    return run


def vllm(size: str) -> Callable[[Work], None]:
    import tempfile

    from vllm import LLM
    from vllm import SamplingParams as Params

    folder = tempfile.mkdtemp()
    config_of(size).save_pretrained(folder)
    llm = LLM(folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_num_seqs=1024, max_model_len=4096)

    def run(work: Work) -> None:
        params = [Params(max_tokens=n, ignore_eos=True, detokenize=False, logprobs=0, seed=None) for _, n, _ in work]
        outs = llm.generate([{"prompt_token_ids": list(p)} for p, _, _ in work], params, use_tqdm=False)
        assert sum(len(o.outputs[0].token_ids) for o in outs) == sum(n for _, n, _ in work)

    return run


# ------------------------------------------------------------------ the roofline


def machine(device: str) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and bf16 operations per second, measured here."""
    count, side = (1 << 31, 8192) if device == "cuda" else (1 << 27, 1024)
    big = torch.empty(count, dtype=torch.int16, device=device).random_()
    other = torch.empty_like(big)
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    copy = _median(lambda: other.copy_(big))
    product = _median(lambda: torch.mm(a, b))
    return 2 * big.numel() * 2 / copy, 2 * side**3 / product


def _median(call: Callable[[], Any]) -> float:
    times = []
    for _ in range(8):
        _synchronize()
        start = time.perf_counter()
        call()
        _synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[4]


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def roofline(size: str, work: Work, bandwidth: float, rate: float) -> float:
    """The least seconds that the work can take."""
    s = SHAPES[size]
    layers, heads, kv, hidden = (
        s[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    width = hidden // heads
    body = layers * (hidden * width * (2 * heads + 2 * kv) + 3 * hidden * s["intermediate_size"])
    vocabulary = s.get("vocab_size", VOCABULARY)
    head = hidden * vocabulary
    kv_bytes = 2 * layers * kv * width * 2
    prompts = {p for p, _, _ in work}
    prefill = sum(2 * body * len(p) + 2 * layers * heads * width * len(p) ** 2 for p in prompts) / rate
    total = prefill
    for t in range(1, max(n for _, n, _ in work)):
        live = [(p, n) for p, n, _ in work if n > t]
        shared = sum(map(len, {p for p, _ in live}))
        weights = max(2 * (body + head) / bandwidth, 2 * (body + head) * len(live) / rate)
        operations = 4 * layers * heads * width * sum(len(p) + t for p, _ in live)
        keys = max((shared + t * len(live)) * kv_bytes / bandwidth, operations / rate)
        total += weights + keys + 8 * len(live) * vocabulary / bandwidth
    return total


# ------------------------------------------------------------------ running


def timed(run: Callable[[Work], None], work: Work) -> float:
    _synchronize()
    start = time.perf_counter()
    run(work)
    _synchronize()
    return time.perf_counter() - start


def profile(run: Any, work: Work) -> None:
    """Time of each kernel over a whole run, and how much of the run no kernel ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as made:
        seconds = timed(run, work)
    rows = sorted(((e.self_device_time_total / 1e6, e.count, e.key) for e in made.key_averages()), reverse=True)
    busy = sum(row[0] for row in rows)
    print(f"  profile: {seconds:.3f} s, kernels {busy:.3f} s, {sum(r[1] for r in rows)} of them")
    for spent, calls, name in rows[:22]:
        print(f"    {spent * 1e3:9.1f} ms {spent / busy:6.1%} {calls:8d} x {spent / calls * 1e6:8.1f} us  {name[:90]}")


def engines_of(names: list[str], size: str, device: str, options: dict[str, Any]) -> dict[str, Callable[[Work], None]]:
    made: dict[str, Callable[[Work], None]] = {}
    model = random_model(size, device) if set(names) - {"vllm"} else None
    for name in names:
        try:
            if name == "vllm":
                made[name] = vllm(size)
            else:
                made[name] = hf(model, options) if name == "hf" else native(model, options, name)
        except ImportError as error:
            print(f"{name} skipped: {error}", flush=True)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="native,vllm")
    parser.add_argument("--workload", default="A,B")
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel (native)")
    parser.add_argument("--option", action="append", default=[], help="name=integer, for the native engine")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu runs on the CPU")
    bandwidth, rate = machine(args.device)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}: copy {bandwidth / 1e9:.1f} GB/s, bf16 {rate / 1e12:.2f} TFLOP/s", flush=True)
    options = {"max_concurrent": 1024, **{k: int(v) for k, v in (o.split("=") for o in args.option)}}
    results: dict[str, Any] = {"bandwidth": bandwidth, "rate": rate, "runs": []}
    for size in args.model.split(","):
        engines = engines_of(args.engine.split(","), size, args.device, options)
        for name in args.workload.split(","):
            results["runs"].append(measure(engines, size, name, args, bandwidth, rate))
        engines.clear()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    print(json.dumps(results))


def measure(engines: dict[str, Callable[[Work], None]], size: str, name: str, args: Any, *ceilings: float) -> dict[str, Any]:
    work = workload(name)
    tokens = sum(n for _, n, _ in work)
    times: dict[str, list[float]] = {}
    for turn in range(args.rounds + 1):  # the first warms up: kernels are compiled, graphs recorded
        for engine, run in engines.items():
            if engine == "hf" and name not in "CS":
                continue
            seconds = timed(run, work)
            print(f"{size} {name} {engine} {turn or 'warm-up'}: {seconds:.2f} s", flush=True)
            if turn:
                times.setdefault(engine, []).append(seconds)
    best = {engine: tokens / sorted(t)[len(t) // 2] for engine, t in times.items()}
    floor = tokens / roofline(size, work, *ceilings)
    out: dict[str, Any] = {"model": size, "workload": name, "roofline": round(floor)}
    for engine, speed in best.items():
        out[f"{engine}_tokens_per_s"] = round(speed)
        out[f"{engine}_of_roofline"] = round(speed / floor, 3)
        if engine != "native" and "native" in best:
            out[f"ratio_native_over_{engine}"] = round(best["native"] / speed, 2)
    print(json.dumps(out), flush=True)
    if args.profile and "native" in engines:
        profile(engines["native"], work)
    return out


if __name__ == "__main__":
    main()
