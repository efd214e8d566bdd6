"""Moving local parts between ranks: collectives, plans, and moves that autograd understands."""
