"""The floor under a synchronous GRPO step on one GPU: the sum over its stages of max(bytes / bandwidth, operations / rate).

    python benchmarks/roofline.py [--size 1.5b] [--prompts 128] [--group 8] [--prompt-tokens 512] [--new-tokens 512]
                                  [--matrix-tflops 787] [--copy-tbps 4.23]

Formulas, with P the parameters that multiply (the head once, no embedding), L layers, H heads of width D, K key/value heads,
V the vocabulary, F the rate of a bf16 product and B the bandwidth of a copy (bytes read + bytes written), both measured:

- a forward pass over n tokens at mean context c: 2 P n + 4 L H D c n operations (the head only where a token is predicted);
- prefill: a forward pass over the prompts, each once;
- a decode step of b sequences at context c: max(2 P bytes / B, 2 P b / F), then max(the keys and values read,
  2 x 2 L K D bytes a token, / B; 4 L H D c b / F), then 8 V b bytes of logits / B. A shared prompt's keys are read for each;
- training: three forward passes' operations over prompts (each once, they are shared) and responses;
- AdamW: 30 bytes a parameter (gradient, master and two moments read; master, moments and the bf16 weight written).

No reference and no old log-probs: with kl_coef 0 and one update a step they are not needed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A decoder of the common form."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    width: int
    mlp: int
    vocabulary: int
    tied: bool

    @property
    def body(self) -> int:
        """Parameters of the layers that multiply."""
        attention = self.hidden * self.width * 2 * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    @property
    def head(self) -> int:
        return self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        return self.body + self.head * (1 if self.tied else 2)

    def attention(self, context: float) -> float:
        """Operations of one query over `context` keys, in all layers."""
        return 4 * self.layers * self.heads * self.width * context


SHAPES = {
    "0.5b": Shape(24, 896, 14, 2, 64, 4864, 151_936, True),
    "1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151_936, True),
    "7b": Shape(28, 3584, 28, 4, 128, 18944, 151_936, False),
}


@dataclass(frozen=True)
class Machine:
    """Operations a second of a bf16 product, and bytes a second of a copy, as measured."""

    rate: float
    bandwidth: float


def forward_flops(shape: Shape, tokens: int, predicted: int, context: float) -> float:
    return 2 * shape.body * tokens + 2 * shape.head * predicted + tokens * shape.attention(context)


def decode_step(shape: Shape, machine: Machine, sequences: int, context: float) -> float:
    """Seconds of one step."""
    weights = shape.body + shape.head
    linear = max(2 * weights / machine.bandwidth, 2 * weights * sequences / machine.rate)
    keys_values = 4 * shape.layers * shape.kv_heads * shape.width * context * sequences
    attention = max(keys_values / machine.bandwidth, shape.attention(context) * sequences / machine.rate)
    return linear + attention + 8 * shape.vocabulary * sequences / machine.bandwidth


def step(shape: Shape, machine: Machine, prompts: int, group: int, prompt_tokens: int, new_tokens: int) -> dict[str, float]:
    """Seconds of each stage and their sum, all sequences decoding at once to the same length."""
    sequences, predicted = prompts * group, prompts * group * new_tokens
    tokens = prompts * prompt_tokens + predicted
    whole = (prompts * prompt_tokens * prompt_tokens / 2 + predicted * (prompt_tokens + new_tokens / 2)) / tokens
    stages = {
        "prefill": forward_flops(shape, prompts * prompt_tokens, 0, prompt_tokens / 2) / machine.rate,
        "decode": sum(decode_step(shape, machine, sequences, prompt_tokens + done) for done in range(new_tokens)),
        "training": 3 * forward_flops(shape, tokens, predicted, whole) / machine.rate,
        "adamw": 30 * shape.parameters / machine.bandwidth,
    }
    return {**stages, "step": sum(stages.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SHAPES, default="1.5b")
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=512)
    parser.add_argument("--matrix-tflops", type=float, default=787.0)
    parser.add_argument("--copy-tbps", type=float, default=4.23)
    args = parser.parse_args()
    machine = Machine(1e12 * args.matrix_tflops, 1e12 * args.copy_tbps)
    print(json.dumps(step(SHAPES[args.size], machine, args.prompts, args.group, args.prompt_tokens, args.new_tokens)))


if __name__ == "__main__":
    main()
