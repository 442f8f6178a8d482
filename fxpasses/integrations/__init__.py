"""Integrations: Hugging Face's Trainer and accelerate, and programs that use Inductor's own hooks."""
