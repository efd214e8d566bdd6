"""What vescale_comm gives to its siblings: nothing yet.

`vescale_collectives` for vescale_dtensor and `vescale_wrap_stage` for vescale_pipe will be implemented here.
"""
