"""The reproduction of the paper, beside the library: tables, figures, tuning, significance, records."""
