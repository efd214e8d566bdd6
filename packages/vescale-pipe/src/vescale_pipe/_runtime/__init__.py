"""Runs the steps of one rank: stages forward and backward, messages, losses, tied weights."""
