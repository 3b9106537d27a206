"""The worker process: one pass after another over the jobs it holds."""
