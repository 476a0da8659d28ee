"""Preference pairs for the reward model: the right name against another name, or against something else.

    python examples/smollm2/make_pairs.py pairs.jsonl --count 6000

Half of the rejected answers are another name of the same problem, so that the model must find the right statement. The rest
are what a policy might find instead: statements, parts of them, the question. Without these a policy learns to say them: a
reward model that never saw an echo of the question liked it best.
"""

import argparse
import json
import random

from podium.data.sources import load_rows

TASK = "reasoning_gym:needle_haystack?seed=2000000&size={size}&min_num_statements=3&max_num_statements=3"


def pair(prompt: str, answer: str, draw: random.Random) -> dict[str, str]:
    """The bare right name against another name (half of the pairs), or against something else that a model might say."""
    statements = [text.strip().rstrip(".") for text in prompt.split("\n")[0].split(". ") if text.strip()]
    right = next(text for text in statements if text.startswith(f"{answer} "))
    wrong = draw.choice([text for text in statements if text is not right])
    name, said = wrong.split()[0], draw.choice([right, wrong])
    others = [f"{said}.", said.partition(" ")[2], " ".join(said.split()[:2]), f"The answer is {name}.", prompt.split("\n")[1]]
    return {"prompt": prompt, "chosen": answer, "rejected": name if draw.random() < 0.5 else draw.choice(others)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--count", type=int, default=6000)
    args = parser.parse_args()
    draw = random.Random(0)
    rows = load_rows(TASK.format(size=args.count))
    with open(args.file, "w", encoding="utf-8") as out:
        for row in rows:
            out.write(json.dumps(pair(row["prompt"], row["answer"], draw)) + "\n")
    print(f"wrote {len(rows)} pairs to {args.file}")
