"""What was gained and what was lost: per-document losses, intervals, the forgetting report."""
