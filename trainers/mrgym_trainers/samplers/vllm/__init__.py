"""Sampling with vLLM: an engine beside the trainer, or servers, with weights synced in place."""
