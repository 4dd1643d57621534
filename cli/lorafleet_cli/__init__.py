"""The command line of LoraFleet: what a user types beside kubectl."""
