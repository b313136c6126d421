"""The same training across machines: the server's engine sends downloads to sites and averages their uploads.

Only `flower.py`, `site_node.py`, `site_app.py` and the files that start processes know Flower; everything else uses the
small `Grid` interface of `exchange.py`, which the tests implement in memory.
"""
