"""The LoraFleet runtime: registry, HTTP, driver loop, trainer, engines and rollout workers."""
