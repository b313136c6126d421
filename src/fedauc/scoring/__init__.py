"""A model in use: calibrated probabilities, operating points, the saved scorer and its model card."""
