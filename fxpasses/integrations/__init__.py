"""What other libraries need from us: Hugging Face's Trainer and accelerate, and users of Inductor's own hooks."""
