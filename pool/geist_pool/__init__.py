"""geist-pool: worker processes that share language-model contexts through shared memory."""
