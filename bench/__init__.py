"""asv suite: read from the working tree, never installed, so the ruler stays fixed while the measured code moves."""
