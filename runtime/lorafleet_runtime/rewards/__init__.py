"""Rewards: built-in verifiers, and user functions in a child process per run."""
