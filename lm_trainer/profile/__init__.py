"""Speed of a run and limits of its devices: model FLOPs, hardware peaks, throughput and MFU."""
