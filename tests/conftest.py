"""One thread per process, set before torch starts its pool: several on shared cores are many times slower."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test reaches the network
os.environ["WANDB_MODE"] = "offline"

import torch

torch.set_num_threads(1)
