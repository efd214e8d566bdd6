"""The parts of benchmarks/ckpt.py: systems under test, how they are measured, and one module per group of rows."""
