"""What vescale_rng gives to its siblings: nothing yet.

`vescale_random` for vescale_dtensor will be implemented here.
"""
