"""What `geist-pool demo` asks about (:mod:`geist_pool.demo.world`)."""
