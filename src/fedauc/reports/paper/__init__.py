"""The paper's tables and figures, made from records only, beside the numbers that the paper prints."""
