"""The LoraFleet runtime: registry, HTTP, driver loop, trainer, engines and rollout workers."""

__version__ = "0.1.0"
