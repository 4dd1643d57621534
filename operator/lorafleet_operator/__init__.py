"""The LoraFleet operator: AdapterRun and AdapterPool objects in, HTTP calls to runtimes and status out.

Imports no torch, ray, vllm and no Kubernetes client library.
"""
