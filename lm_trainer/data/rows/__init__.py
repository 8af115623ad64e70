"""From cached tokens to rows of a batch: chunks, packing, and the order of rows."""
