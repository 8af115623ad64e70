"""How fast a run is and how fast it could be: FLOPs from the spec, peaks, throughput, MFU."""
