"""Parts of pipe.py."""
