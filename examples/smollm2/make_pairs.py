"""Preference pairs for the reward model: the right name against another name, or against something else.

    python examples/smollm2/make_pairs.py pairs.jsonl

Half of the rejected answers are another name of the same problem, so that the model must find the right statement. The rest
are what a policy might find instead: strangers' names, statements, parts of them, the question. A policy finds what the
pairs leave out: trained against pairs without strangers, it learned to answer "Aisha" to everything.
"""

import argparse
import json
import random

from podium.data.sources import load_rows

TASK = "reasoning_gym:needle_haystack?seed=2000000&size={size}&min_num_statements=3&max_num_statements=3"


def pair(prompt: str, answer: str, stranger: str, draw: random.Random) -> dict[str, str]:
    """The bare right name against another name of the problem, a stranger's, or something else that a model might say."""
    facts, question = prompt.split("\n")[:2]
    statements = [text.strip().rstrip(".") for text in facts.split(". ") if text.strip()]
    right = next(text for text in statements if text.startswith(f"{answer} "))
    wrong = draw.choice([text for text in statements if text is not right])
    said = draw.choice([right, wrong])
    others = [f"{said}.", said.partition(" ")[2], " ".join(said.split()[:2]), draw.choice(prompt.split()), question]
    kind = draw.random()
    rejected = wrong.split()[0] if kind < 0.5 else stranger if kind < 0.7 else draw.choice(others)
    return {"prompt": prompt, "chosen": answer, "rejected": rejected}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--count", type=int, default=4000)
    args = parser.parse_args()
    draw = random.Random(0)
    rows = load_rows(TASK.format(size=args.count))
    pairs = [pair(row["prompt"], row["answer"], draw.choice(rows)["answer"], draw) for row in rows]
    kept = [row for row in pairs if row["chosen"] != row["rejected"]]  # a stranger may have the right name
    with open(args.file, "w", encoding="utf-8") as out:
        out.writelines(json.dumps(row) + "\n" for row in kept)
    print(f"wrote {len(kept)} pairs to {args.file}")
