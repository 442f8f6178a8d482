"""Top-k over few of many columns, in blocks (pass `split_topk`)."""
