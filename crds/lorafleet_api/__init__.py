"""The LoraFleet API: object types, conditions, reasons and names shared by the operator and the runtime."""
