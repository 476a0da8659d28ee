"""Rollout speed on one device: whole requests, prefill and scheduling included, forced lengths, log-probs returned.

    python benchmarks/rollout.py --engine native,vllm,hf --workload A,B,C --model 0.5b,1.5b,7b
    python benchmarks/rollout.py --engine native --workload L --model 1.5b
    python benchmarks/rollout.py --device cpu --engine native,hf,vllm --workload S --model 135m --dtype float32

Engines alternate in one run, over random weights of Qwen2.5's shapes (135m: SmolLM2's). Workloads: A, 256 requests of
100-1024 tokens in and 100-1024 out (seeded); B, 128 prompts x 8 samples, 512 + 512; C, 256 x (256 + 256); S, 64 x (32 + 64);
L, 4 x (131,072 + 4,096), which also says the speed of prefill and decode apart. `hf` (transformers' generate) runs C and S
alone: it takes no batch of mixed lengths. `paged` is the native engine with pages, `slots` the one without, whatever the
device. An engine that is not installed is skipped, with the reason. On one GPU next to vLLM each has `--memory` of it for
keys and values. vLLM runs as it is fastest: in this process, but for 7b in one of its own; its cache of prefixes is emptied
before each round. Each size of model (and L) has a process to itself, so that memory is given back.

The roofline: each step's bytes over this machine's copy bandwidth, or its operations over its matrix rate, whichever is
longer, summed; weights, keys and values (a shared prompt once) and logits each read once. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
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
Run = Callable[[Work], float | None]
"""Does the work; returns the seconds until every request had its first token, where that is known."""


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
    if name == "L":
        return [(prompt(131072), 4096, i) for i in range(4)]
    raise SystemExit(f"no workload {name}")


def warm_up(engine: str, name: str, work: Work) -> Work:
    """What compiles and records all that the work needs: for engines that record graphs as they meet them, the work itself."""
    if name == "L":
        return [(p[:20000], 16, i) for p, _, i in work]
    return work if engine not in ("vllm", "hf") else [(p, min(n, 16), i) for p, n, i in work]


def config_of(size: str, positions: int = 32768) -> Any:
    from transformers import LlamaConfig, Qwen2Config

    kind, name = (LlamaConfig, "LlamaForCausalLM") if size == "135m" else (Qwen2Config, "Qwen2ForCausalLM")
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": positions, **SHAPES[size]}
    return kind(**shape, architectures=[name])  # without a name vLLM takes the model without its head


def random_model(size: str, args: Any) -> Any:
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config, dtype = config_of(size, positions_of(args)), getattr(torch, args.dtype)
    with torch.device(args.device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.generation_config.eos_token_id = None
    return model.eval()


def positions_of(args: Any) -> int:
    """The longest request, with room: 136 x 1024 for L."""
    return 139264 if "L" in args.workload.split(",") else 32768


def token_bytes(size: str, args: Any) -> int:
    """Memory of one token's keys and values."""
    s = SHAPES[size]
    width = s["hidden_size"] // s["num_attention_heads"]
    return 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * width * getattr(torch, args.dtype).itemsize


# ------------------------------------------------------------------ engines: each returns a function that runs the work


def native(model: Any, options: dict[str, Any], top_p: float, kind: str = "native") -> Run:
    from podium.engines.base import Request, SamplingParams
    from podium.engines.rollout.native.choose import native_engine
    from podium.engines.rollout.native.engine import NativeEngine
    from podium.engines.rollout.native.paged_engine import PagedEngine

    make: Any = {"native": native_engine, "slots": NativeEngine, "paged": PagedEngine}[kind]
    engine = make(model, SimpleNamespace(eos_token_id=None), **options)

    def run(work: Work) -> float:
        for prompt, length, seed in work:
            engine.submit(Request(prompt, SamplingParams(max_new_tokens=length, top_p=top_p), seed))
        start, done = time.perf_counter(), engine.step()  # fills every cache that fits, and sends a window off
        _synchronize()
        first = time.perf_counter() - start
        while engine.pending:
            done += engine.step()
        assert sorted(len(t.response_ids) for t in done) == sorted(n for _, n, _ in work)
        assert all(len(t.segments[0].log_probs) == len(t.response_ids) for t in done)
        return first

    run.engine = engine  # type: ignore[attr-defined]
    return run


def hf(model: Any, options: dict[str, Any]) -> Run:
    from podium.models.lm_head import own_attention

    def run(work: Work) -> None:
        ids = torch.tensor([p for p, _, _ in work], device=model.device)
        with own_attention(model, "sdpa"), torch.no_grad():
            out = model.generate(ids, max_new_tokens=work[0][1], min_new_tokens=work[0][1], do_sample=True, pad_token_id=0)
        assert out.shape[1] == ids.shape[1] + work[0][1]

    return run


def vllm(size: str, args: Any) -> Run:
    """Its engine in this process, or (7b, where the GPU leaves the host time) in one of its own: whichever is faster."""
    import tempfile

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if size == "7b" else "0"
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if importlib.util.find_spec("flashinfer") is None:  # it samples truncated distributions alone, and none is here
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    own: dict[str, Any] = {"gpu_memory_utilization": args.memory}
    if args.device == "cpu":
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        own = {}
    from vllm import LLM
    from vllm import SamplingParams as Params

    folder = tempfile.mkdtemp()
    config_of(size, positions_of(args)).save_pretrained(folder)
    longest = positions_of(args) if args.workload == "L" else 4096
    llm = LLM(
        folder, load_format="dummy", skip_tokenizer_init=True, dtype=args.dtype, max_num_seqs=1024, max_model_len=longest, **own
    )  # fmt: skip

    every: dict[str, Any] = {"ignore_eos": True, "detokenize": False, "logprobs": 0, "seed": None}

    def run(work: Work) -> None:
        llm.reset_prefix_cache()
        params = [Params(max_tokens=n, top_p=args.top_p, **every) for _, n, _ in work]
        outs = llm.generate([{"prompt_token_ids": list(p)} for p, _, _ in work], params, use_tqdm=False)
        assert sum(len(o.outputs[0].token_ids) for o in outs) == sum(n for _, n, _ in work)

    return run


# ------------------------------------------------------------------ the roofline


def machine(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes per second of a copy (read and written), and operations per second of a product, measured here."""
    count, side = (1 << 31, 8192) if device == "cuda" else (1 << 27, 1024)
    big = torch.empty(count, dtype=torch.int16, device=device).random_()
    other = torch.empty_like(big)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
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


def roofline(size: str, work: Work, number: int, bandwidth: float, rate: float) -> float:
    """The least seconds that the work can take, with weights, keys and values of `number` bytes each."""
    s = SHAPES[size]
    layers, heads, kv, hidden = (
        s[k] for k in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "hidden_size")
    )
    width = hidden // heads
    body = layers * (hidden * width * (2 * heads + 2 * kv) + 3 * hidden * s["intermediate_size"])
    vocabulary = s.get("vocab_size", VOCABULARY)
    head = hidden * vocabulary
    kv_bytes = 2 * layers * kv * width * number
    lengths = {p: len(p) for p, _, _ in work}
    number_of = {p: i for i, p in enumerate(lengths)}
    total = sum(2 * body * n + 2 * layers * heads * width * n**2 for n in lengths.values()) / rate
    rows = [(number_of[p], len(p), n) for p, n, _ in work]
    for t in range(1, max(n for _, _, n in rows)):
        live = [(p, length) for p, length, n in rows if n > t]
        shared = sum(dict(live).values())
        weights = max(number * (body + head) / bandwidth, 2 * (body + head) * len(live) / rate)
        operations = 4 * layers * heads * width * sum(length + t for _, length in live)
        keys = max((shared + t * len(live)) * kv_bytes / bandwidth, operations / rate)
        total += weights + keys + 8 * len(live) * vocabulary / bandwidth
    return total


# ------------------------------------------------------------------ running


def timed(run: Run, work: Work) -> tuple[float, float | None]:
    """Seconds, and those until every request had its first token."""
    _synchronize()
    start = time.perf_counter()
    first = run(work)
    _synchronize()
    return time.perf_counter() - start, first


def profile(run: Any, work: Work) -> None:
    """Time of each kernel over a whole run, and how much of the run no kernel ran."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CUDA]) as made:
        seconds, _ = timed(run, work)
    rows = sorted(((e.self_device_time_total / 1e6, e.count, e.key) for e in made.key_averages()), reverse=True)
    busy = sum(row[0] for row in rows)
    print(f"  profile: {seconds:.3f} s, kernels {busy:.3f} s, {sum(r[1] for r in rows)} of them")
    for spent, calls, name in rows[:22]:
        print(f"    {spent * 1e3:9.1f} ms {spent / busy:6.1%} {calls:8d} x {spent / calls * 1e6:8.1f} us  {name[:90]}")


def engines_of(size: str, args: Any) -> dict[str, Run]:
    names, made = args.engine.split(","), {}
    options: dict[str, int] = {"max_concurrent": 1024}
    if args.workload == "L":
        options = {"max_concurrent": 4, "max_cache_tokens": sum(len(p) + n for p, n, _ in workload("L")) + 1024}
    elif "vllm" in names and args.device == "cuda":
        options["max_cache_tokens"] = int(args.memory * torch.cuda.mem_get_info()[1]) // token_bytes(size, args)
    options |= {k: int(v) for k, v in (o.split("=") for o in args.option)}
    model = random_model(size, args) if set(names) - {"vllm"} else None
    for name in names:
        try:
            if name == "vllm":
                made[name] = vllm(size, args)
            else:
                made[name] = hf(model, options) if name == "hf" else native(model, options, args.top_p, name)
        except (ImportError, RuntimeError, ValueError) as error:
            print(f"{name} skipped: {error}", flush=True)
    return made


def arguments() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="native,vllm")
    parser.add_argument("--workload", default="A,B")
    parser.add_argument("--model", default="0.5b")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--memory", type=float, default=0.4, help="of the GPU, for each of native and vllm when both run")
    parser.add_argument("--top-p", type=float, default=1.0, help="truncated sampling (native, vllm)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", action="store_true", help="also the time of each kernel (native)")
    parser.add_argument("--option", action="append", default=[], help="name=integer, for the native engine")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no GPU here; --device cpu runs on the CPU")
    names = args.workload.split(",")
    short = ",".join(name for name in names if name != "L")
    jobs = [(size, part) for size in args.model.split(",") for part in (short, "L" if "L" in names else "") if part]
    if len(jobs) > 1:
        runs = [run for size, part in jobs for run in in_own_process(size, part)]
        print(json.dumps({"runs": runs}))
        return
    dtype = getattr(torch, args.dtype)
    bandwidth, rate = machine(args.device, dtype)
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}: copy {bandwidth / 1e9:.1f} GB/s, {args.dtype} {rate / 1e12:.2f} TFLOP/s", flush=True)
    if args.device == "cuda":
        torch.cuda.empty_cache()
    engines = engines_of(args.model, args)
    runs = [measure(engines, args.model, name, args, bandwidth, rate) for name in names]
    print(json.dumps({"bandwidth": bandwidth, "rate": rate, "runs": runs}))


def in_own_process(size: str, part: str) -> list[dict[str, Any]]:
    """This benchmark for one size of model and these workloads; its results. What it prints is printed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--model", size, "--workload", part]
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout or ():
            print(line, end="", flush=True)
            last = line
    if child.returncode:
        print(f"{size} {part}: ended with {child.returncode}", flush=True)
        return []
    return json.loads(last)["runs"]


def measure(engines: dict[str, Run], size: str, name: str, args: Any, *ceilings: float) -> dict[str, Any]:
    work = workload(name)
    tokens = sum(n for _, n, _ in work)
    times: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    for turn in range(args.rounds + 1):  # the first warms up: kernels are compiled, graphs recorded
        for engine, run in engines.items():
            if engine == "hf" and name not in "CS":
                continue
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            used = time.process_time()
            seconds, first = timed(run, work if turn else warm_up(engine, name, work))
            used = time.process_time() - used
            of_cpu = f", {used:.2f} s of CPU time" if args.device == "cpu" else ""
            print(f"{size} {name} {engine} {turn or 'warm-up'}: {seconds:.2f} s{of_cpu}", flush=True)
            if turn:
                cpu[engine] = used
                times.setdefault(engine, []).append(seconds)
                if name == "L" and first is not None:
                    tell_parts(work, seconds, first, run)
    best = {engine: tokens / sorted(t)[len(t) // 2] for engine, t in times.items()}
    floor = tokens / roofline(size, work, getattr(torch, args.dtype).itemsize, *ceilings)
    out: dict[str, Any] = {"model": size, "workload": name, "dtype": args.dtype, "roofline": round(floor)}
    for engine, speed in best.items():
        out[f"{engine}_tokens_per_s"] = round(speed)
        out[f"{engine}_of_roofline"] = round(speed / floor, 3)
        if args.device == "cpu":  # where others use the machine too, this compares better than the time on the wall
            out[f"{engine}_tokens_per_cpu_s"] = round(tokens / cpu[engine])
        if engine != "native" and "native" in best:
            out[f"ratio_native_over_{engine}"] = round(best["native"] / speed, 2)
    print(json.dumps(out), flush=True)
    if args.profile and "native" in engines:
        profile(engines["native"], work)
    return out


def tell_parts(work: Work, seconds: float, first: float, run: Any) -> None:
    """Prefill and decode apart, and memory."""
    prompts, tokens = sum(len(p) for p, _, _ in work), sum(n for _, n, _ in work)
    line = f"  prefill {prompts} tokens in {first:.1f} s = {prompts / first:,.0f} tokens/s; "
    line += f"decode {tokens} tokens in {seconds - first:.1f} s = {tokens / (seconds - first):,.0f} tokens/s"
    if torch.cuda.is_available():
        cache, peak = run.engine.cache_bytes / 1e9, torch.cuda.max_memory_allocated() / 1e9
        line += f"; cache {cache:.1f} GB, peak memory of all {peak:.1f} GB"
    print(line, flush=True)


if __name__ == "__main__":
    main()
