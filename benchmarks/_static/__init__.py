"""Parts of static_eager.py."""
