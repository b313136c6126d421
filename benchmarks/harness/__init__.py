"""What drives the contenders: the work, their environments, their processes, and the table."""
