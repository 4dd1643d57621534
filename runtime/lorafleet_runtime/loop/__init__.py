"""The driver loop: lifecycle, rollout and training tasks around the registry, the trainer and the engines."""
