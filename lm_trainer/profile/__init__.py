"""Speed of a run and limits of its devices: FLOPs from the spec, peaks, throughput, MFU."""
