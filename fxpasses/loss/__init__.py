"""Head and loss in chunks of rows: logits never stand in full (pass `chunk_loss`)."""
