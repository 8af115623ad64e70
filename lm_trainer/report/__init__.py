"""HTML pages about one run, or a comparison of several."""
