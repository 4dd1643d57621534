"""Version v1alpha1 of the LoraFleet API."""
