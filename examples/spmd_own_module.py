"""A module and an optimizer of your own, wrapped with FSDP by you, become a role. No Ray, no engine of Podium.

    torchrun --nproc-per-node 2 examples/spmd_own_module.py --steps 20

Your program makes the process group, the model, the wrapping and the optimizer as it always did; `OwnPolicy` says which of
its methods the loop may call, and how their rows are divided (`@dispatch`). The loop below runs on every rank. The task is
small: tokens of the vocabulary's lower half are right.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from podium import Batch, estimate_advantages
from podium.algorithms import Counts, clipped_policy_loss, log_probs_from_logits, token_weights
from podium.controller.dispatch import dispatch
from podium.controller.executors.spmd import SpmdExecutor
from podium.core.metrics import Metrics
from podium.core.ranks import WorkerContext
from podium.core.seeding import derive_seed
from podium.core.shares import costs_of, cut, take

VOCABULARY, PROMPT, NEW_TOKENS = 32, 4, 8


# ------------------------------------------------------------------ what you have already


def build(device: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Your model, sharded by FSDP2 over all ranks, and your optimizer over its shards."""
    torch.manual_seed(0)
    size = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=4, **size)).to(device)
    mesh = init_device_mesh(device.partition(":")[0], (distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


# ------------------------------------------------------------------ what makes it a role


class OwnPolicy:
    """The methods that the loop calls. Every rank makes the same forward passes: FSDP gathers weights in each."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, context: WorkerContext) -> None:
        self.model, self.optimizer, self.context = model, optimizer, context

    @dispatch("prompts")
    @torch.no_grad()
    def generate(self, prompts: Batch, *, group_size: int = 1, step: int = 0) -> Batch:
        """So many answers to each prompt, of a fixed length; a sample's draws depend on its group and number alone."""
        batch = prompts.repeat(group_size).drop("occurrence")
        groups = batch["group_id"].tolist()
        draws = [
            torch.Generator().manual_seed(derive_seed("rollout", step, group, i % group_size)) for i, group in enumerate(groups)
        ]
        ids = batch.padded("prompt_ids")
        for _ in range(NEW_TOKENS):
            odds = self.model(input_ids=ids.to(self.context.device)).logits[:, -1].softmax(-1).cpu()
            drawn = [torch.multinomial(row, 1, generator=draw) for row, draw in zip(odds, draws, strict=True)]
            ids = torch.cat([ids, torch.stack(drawn)], dim=1)
        answers = ids[:, PROMPT:].tolist()
        ones = [[True] * NEW_TOKENS for _ in answers]
        return batch.with_columns({"response_ids": answers, "response_mask": ones, "loss_mask": ones})

    @dispatch("rows")
    @torch.no_grad()
    def compute_log_probs(self, batch: Batch) -> Batch:
        return Batch({"old_log_probs": list(self._log_probs(batch).cpu())})

    @dispatch("broadcast")
    def update(self, batch: Batch) -> Metrics:
        """One step on all rows: this rank takes its share, and divides by the number of tokens of all."""
        share = cut(costs_of(batch), self.context.data_size)[self.context.data_rank]
        mine = take(batch, share)
        weights = token_weights(mine.padded("loss_mask"), "token_mean", counts=Counts.of(batch.padded("loss_mask")))
        per_token, _ = clipped_policy_loss(self._log_probs(mine).cpu(), mine.padded("old_log_probs"), mine.padded("advantages"))
        # FSDP takes the mean of the ranks' gradients; the loss is a sum over them.
        loss = (per_token * weights).sum() * self.context.data_size
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return Metrics({"grad_norm": (float(getattr(norm, "full_tensor", lambda: norm)()), 1.0)})

    def _log_probs(self, batch: Batch) -> Tensor:
        ids = torch.cat([batch.padded("prompt_ids"), batch.padded("response_ids")], dim=1).to(self.context.device)
        logits = self.model(input_ids=ids).logits[:, PROMPT - 1 : -1]
        return log_probs_from_logits(logits, ids[:, PROMPT:])


# ------------------------------------------------------------------ the loop, on every rank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    executor = SpmdExecutor()
    model, optimizer = build(executor.device)
    policy = executor.launch({"actor": lambda context: OwnPolicy(model, optimizer, context)})["actor"]
    prompts = Batch({"prompt_ids": [[i, i + 1, i + 2, i + 3] for i in range(8)]})
    for step in range(args.steps):
        batch = policy.generate(prompts, group_size=8, step=step).result()
        rewards = (batch.padded("response_ids") < VOCABULARY // 2).float().mean(dim=1)
        batch = batch.with_columns({"rewards": rewards}).union(policy.compute_log_probs(batch))
        metrics = policy.update(estimate_advantages(batch, estimator="grpo")).result()
        if executor.writes:
            print(f"step {step + 1:3}  right {float(rewards.mean()):.4f}  gradient norm {metrics.mean('grad_norm'):.5f}")
    executor.shutdown()


if __name__ == "__main__":
    main()
