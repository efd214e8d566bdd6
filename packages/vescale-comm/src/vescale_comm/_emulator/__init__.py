"""The emulator: many ranks in one process, with collectives that add in the order of a real backend.

`orders`, `gloo` and `nccl` are plans of integers; `sums` carries them out; `turns`, `world`, `store`, `exchange`,
`moves`, `work` and `group` are the emulated world; `recorder`, `real` and `compare` find where two runs part.
"""
