"""What a run says about itself: rates, memory and MFU, on the console, in metrics.jsonl and to trackers."""
