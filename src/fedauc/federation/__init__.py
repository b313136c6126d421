"""The same training across machines: the server's engine sends orders to sites and merges what they answer.

Only `flower.py` and what starts processes know Flower; everything else talks to the small `Grid` of `grid.py`.
"""
