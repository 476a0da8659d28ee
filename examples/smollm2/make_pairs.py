"""Preference pairs for the reward model: the right name against another name, or against something else.

    python examples/smollm2/make_pairs.py pairs.jsonl

Both sides come as a bare name, as a whole statement, or cut, so that only the name tells them apart. The rest of the rejected
answers are what a policy finds instead. It finds what the pairs leave out: trained against pairs without strangers, it
learned to answer "Aisha" to everything; without bare predicates, it left out the name.
"""

import argparse
import json
import random

from podium.data.sources import load_rows

TASK = "reasoning_gym:needle_haystack?seed=2000000&size={size}&min_num_statements=3&max_num_statements=3"


def pair(prompt: str, answer: str, stranger: str, draw: random.Random) -> dict[str, str]:
    """The right name or its statement, against another one's, a stranger's, or something without a name."""
    facts, question = prompt.split("\n")[:2]
    statements = [text.strip().rstrip(".") for text in facts.split(". ") if text.strip()]
    right = next(text for text in statements if text.startswith(f"{answer} "))
    wrong = draw.choice([text for text in statements if text is not right])
    does = right.partition(" ")[2]
    kind = draw.random()
    if kind < 0.55:
        rejected = said(wrong, draw)
    elif kind < 0.7:
        rejected = said(f"{stranger} {does}", draw)
    else:
        rejected = draw.choice([does, wrong.partition(" ")[2], draw.choice(prompt.split()), question])
    return {"prompt": prompt, "chosen": said(right, draw), "rejected": rejected}


def said(statement: str, draw: random.Random) -> str:
    """A statement as a model may give it: the name alone, the whole, or cut somewhere."""
    words = statement.split()
    return draw.choice([words[0], f"{statement}.", " ".join(words[: draw.randint(1, len(words))])])


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
