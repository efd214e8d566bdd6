"""From a call to its local execution: calls and rules, choice of strategies, caches, policies, fallbacks."""
