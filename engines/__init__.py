"""THE CONTRACT: what a bundle is. The builder writes it, the runtime reads it; standard library and NumPy only."""
