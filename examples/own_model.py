"""A model class of your own, in plain torch, trained with GRPO: no `transformers` model anywhere.

    python examples/own_model.py                # about ten seconds on one CPU core

The task: two digits, answer with the larger one. The model: a GRU of 50,000 parameters that starts from nothing. It defines
`forward`, which is all that Podium needs, and `generate`, because a GRU can do better than running the whole sequence again
for every token: it carries its state.
"""

import argparse
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from podium import BaseParallelModel, Trainer
from podium.models.own import Draw, pad


class GRUModel(BaseParallelModel):
    """Embedding, GRU, linear head."""

    def __init__(self, vocabulary: int, width: int = 96) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits `[B, T, V]`. Padding is on the right, so a token never sees it, and the mask is not needed."""
        states, _ = self.gru(self.embedding(input_ids))
        return self.head(states)

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], draw: Draw) -> None:
        """The same logits as `forward`, from a state that goes on from token to token."""
        ids, mask = pad(prompts, self.device)
        states, _ = self.gru(self.embedding(ids))
        state = states[torch.arange(len(prompts)), mask.sum(1) - 1]  # at each prompt's last token
        running = list(range(len(prompts)))
        while running:
            tokens, ended = draw(running, self.head(state))
            going = [place for place, end in enumerate(ended) if not end]
            running = [running[place] for place in going]
            states, _ = self.gru(self.embedding(tokens[going])[:, None], state[going][None])
            state = states[:, 0]


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit."""
    words = ["<pad>", "<end>", *"012345"]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<end>")


def larger(prompts: list[str], completions: list[str], **columns: list) -> list[float]:
    """1 for the larger digit and nothing after it; half of that where something follows."""
    answers = [(completion.split(), max(prompt.split())) for prompt, completion in zip(prompts, completions, strict=True)]
    return [0.5 * (words[:1] == [right]) + 0.5 * (words == [right]) for words, right in answers]


def main(steps: int = 120, folder: str = "runs", seed: int = 0) -> tuple[float, float]:
    """Accuracy on all pairs of digits, before and after."""
    torch.manual_seed(seed)
    tokenizer = digits_tokenizer()
    rows = [{"prompt": f"{a} {b}"} for a in range(6) for b in range(6)]
    trainer = Trainer(
        config={
            "algorithm": "grpo",
            "rewards": [{"function": larger}],
            "rollout": {"max_new_tokens": 2},
            "batch": {"prompts_per_step": 18, "group_size": 8},
            "optimizer": {"lr": 5e-3},
            "entropy_coef": 0.03,  # from nothing, it must go on trying
            "run": {"steps": steps, "folder": folder, "name": "own-model", "threads": 1, "trackers": [], "seed": seed},
        },
        models={"actor": GRUModel(len(tokenizer))},
        tokenizer=tokenizer,
        data=rows,
        eval_data=rows,
    )
    result = trainer.train()
    return result.evaluation_before["eval/accuracy"], result.evaluation_after["eval/accuracy"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=120)
    print("accuracy: {:.2f} -> {:.2f}".format(*main(parser.parse_args().steps)))
