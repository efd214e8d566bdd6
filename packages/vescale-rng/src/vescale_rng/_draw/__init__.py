"""How a random operator on a sharded tensor is drawn: sources of numbers, and the walk over the local elements."""
