"""Parts of comm.py."""
