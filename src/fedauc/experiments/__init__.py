"""From a frozen configuration to a run folder, and from arrays to a trained model."""
