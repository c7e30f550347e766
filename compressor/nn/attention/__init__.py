"""Attention in 8 bits or fewer: kv_cache.py quantizes keys and values, and queries, which queries.py shows it."""
