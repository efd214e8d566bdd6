"""What vescale_pipe gives to its siblings: nothing yet.

`vescale_timeline` for vescale_dtensor, vescale_comm and vescale_ckpt will be implemented here.
"""
