"""Other engines to measure against; nothing in the product needs them."""
