"""Top-k of long rows, in blocks of columns (pass `split_topk`)."""
