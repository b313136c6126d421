"""The paper's experiments: what each table and figure runs, how it is tuned, and the records of finished runs."""
