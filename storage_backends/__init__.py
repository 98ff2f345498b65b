"""Storage services behind the host tier; the only code that imports storage clients."""
