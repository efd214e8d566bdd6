"""Tests on many ranks: real gloo processes, threads, or a fake group of any size.

Development only; no released package may import it. See README.md for the ten lines that a test needs.
Importing this package does not import torch.
"""

from vescale_testing.fake import fake_ranks
from vescale_testing.meshes import cached_mesh
from vescale_testing.ranks import RankFailure, run_ranks
from vescale_testing.threads import run_threads

__all__ = ["RankFailure", "cached_mesh", "fake_ranks", "run_ranks", "run_threads"]
