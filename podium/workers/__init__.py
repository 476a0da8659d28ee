"""The roles' workers: an engine and what an algorithm asks of it. They don't know who calls them."""
