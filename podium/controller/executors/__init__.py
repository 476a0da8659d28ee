"""Where workers live: one module per executor."""
