"""Head and loss in chunks of rows: the logits never exist in full (pass `chunk_loss`)."""
