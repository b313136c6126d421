"""The graphed engine: a cohort's local step, compiled and captured in one CUDA graph."""
