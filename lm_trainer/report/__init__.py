"""HTML pages that describe one run or compare several runs."""
